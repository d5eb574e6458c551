"""An XTTS-v2's encoder and vocoder: sizes, lengths, and the messages for bad files.

coqui-tts itself is the reference in tests/xtts; here they are tiny and it is not needed.
"""

import math

import pytest
import torch
import torchaudio
from released_sound import spoken, xtts_mels
from released_xtts import random_dvae, random_sound, settings
from torch.nn.utils.parametrizations import weight_norm

from kit.base.errors import KitError
from kit.extras.xtts_v2.codec import DVAE, XTTSCodec, XTTSMel, XTTSMelConfig, xtts_codec
from kit.extras.xtts_v2.model import sound_tensors

RATE = 22_050
VOCODER = "hifigan_decoder.waveform_decoder"
SPEAKER = "hifigan_decoder.speaker_encoder"


def codec_of(tensors: dict | None = None) -> XTTSCodec:
    """A tiny release's codec; in `tensors` those of the DVAE are named `dvae.`"""
    tensors = all_tensors() if tensors is None else tensors
    dvae = {n.removeprefix("dvae."): t for n, t in tensors.items() if n.startswith("dvae.")}
    sound = {n: t for n, t in tensors.items() if not n.startswith("dvae.")}
    return xtts_codec(sound, dvae, settings())


def all_tensors() -> dict:
    return random_sound() | {f"dvae.{name}": t for name, t in random_dvae().items()}


def test_the_releases_sizes_are_the_defaults():
    """Tensor for tensor they are compared in tests/xtts, where coqui-tts is installed."""
    tensors = sound_tensors({})
    assert len(tensors) == 537 and sum(t.numel() for t in tensors.values()) == 25_882_035
    with torch.device("meta"):
        dvae = DVAE()
    assert sum(p.numel() for p in dvae.parameters()) == 51_567_184


@pytest.mark.parametrize("n_fft", [1024, 2048])
def test_a_mel_is_torchaudios_divided_by_the_stats(n_fft):
    stats = torch.rand(80) + 0.5
    front_end = XTTSMel(XTTSMelConfig(n_fft=n_fft, mel_stats=tuple(stats.tolist())))
    sizes = {"n_fft": n_fft, "win_length": 1024, "hop_length": 256, "n_mels": 80}
    theirs = torchaudio.transforms.MelSpectrogram(RATE, f_max=8000, norm="slaney", **sizes)
    wave = spoken(RATE)[None]
    wanted = theirs(wave).clamp(min=1e-5).log() / stats[:, None]
    assert (front_end.log_mel(wave) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    "stats", [{}, {"mel_stats": torch.ones(64)}, {"mel_stats": torch.zeros(80)}]
)
def test_a_release_without_sound_stats_is_reported(stats):
    with pytest.raises(KitError, match="mel_stats"):
        xtts_mels(stats)


def test_a_release_without_a_dvae_is_reported():
    with pytest.raises(KitError, match=r"dvae\.pth"):
        xtts_codec(random_sound(), {}, settings())


SHOWN = {
    f"{VOCODER}.conds.2.bias": "vocoder.conds.2.bias",
    f"{SPEAKER}.layer3.4.bn2.running_var": "speaker_encoder.layer3.4.bn2.running_var",
    "dvae.decoder.3.net.2.weight": "dvae.decoder.3.net.2.weight",
}


@pytest.mark.parametrize(("name", "shown"), SHOWN.items())
def test_every_tensor_has_its_place(name, shown):
    tensors = all_tensors()
    wrong = {
        rf"missing: {shown}\.": {n: t for n, t in tensors.items() if n != name},
        rf"misshapen: {shown} \(7,\)": {**tensors, name: torch.ones(7)},
        rf"unknown: {shown}\.more": {**tensors, f"{name}.more": torch.ones(7)},
        rf"{shown} is not finite": {**tensors, name: tensors[name] * math.nan},
    }
    for message, given in wrong.items():
        with pytest.raises(KitError, match=message):
            codec_of(given)


def test_weight_normalisation_is_torchs():
    tensors = random_sound()
    layer = weight_norm(torch.nn.ConvTranspose1d(16, 8, 16, 8, padding=4))
    prefix = f"{VOCODER}.ups.0."
    own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    layer.load_state_dict(own)
    own_layer = xtts_codec(tensors, random_dvae(), settings()).vocoder.ups[0]
    assert torch.allclose(own_layer.weight, layer.weight, atol=1e-6)
    assert torch.equal(own_layer.bias, layer.bias)
