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


def test_stats_that_are_none_and_a_window_longer_than_the_transform_are_reported():
    for stats in ((), (1.0,) * 79, (1.0,) * 79 + (0.0,), (math.nan,) * 80):
        with pytest.raises(KitError, match=r"mel_stats = .*: give 80 numbers"):
            XTTSMelConfig(mel_stats=stats)
    with pytest.raises(KitError, match=r"win_length = 1024: must lie in 1 to 512"):
        XTTSMelConfig(n_fft=512, mel_stats=(1.0,) * 80)


STATS = {
    r"it is \(64,\)": torch.ones(64),
    "none of them 0": torch.zeros(80),
    r"it is \(80,\) of torch\.int64": torch.ones(80, dtype=torch.long),
    "mel_stats": torch.full((80,), math.inf),
}


@pytest.mark.parametrize("message", STATS)
def test_a_release_without_sound_stats_is_reported(message):
    with pytest.raises(KitError, match=message):
        xtts_mels({"mel_stats": STATS[message]})
    with pytest.raises(KitError, match="it is missing"):
        xtts_mels({})


@pytest.mark.parametrize("frames", [1, 2, 4, 5, 87])
@torch.no_grad()
def test_a_code_is_four_frames(frames):
    dvae = codec_of().dvae
    codes = dvae.encode(torch.randn(2, 80, frames))
    assert codes.shape == (2, math.ceil(frames / 4)) and codes.dtype == torch.int64
    assert codes.min() >= 0 and codes.max() < 32
    assert dvae.decode(codes).shape == (2, 80, 4 * codes.shape[1])


@pytest.mark.parametrize(("codes", "frames"), [(1, 4), (2, 8), (10, 43), (147, 640)])
@torch.no_grad()
def test_states_become_frames_of_256_samples(codes, frames):
    vocoder = codec_of().vocoder
    wave = vocoder(torch.randn(2, codes, 96), torch.randn(2, 512))
    assert wave.shape == (2, 256 * frames) and wave.abs().max() <= 1


@torch.no_grad()
def test_a_speaker_is_a_direction():
    for samples in (400, 5280, 32_001):
        speaker = codec_of().speaker_encoder(torch.randn(3, samples) * 0.1)
        assert speaker.shape == (3, 512)
        assert torch.allclose(speaker.norm(dim=1), torch.ones(3))


SHOWN = {
    f"{VOCODER}.conds.2.bias": "vocoder.conds.2.bias",
    f"{SPEAKER}.layer3.4.bn2.running_var": "speaker_encoder.layer3.4.bn2.running_var",
    "dvae.decoder.3.net.2.weight": "dvae.decoder.3.net.2.weight",
}


@pytest.mark.parametrize(("name", "shown"), SHOWN.items())
def test_every_tensor_has_its_place(name, shown):
    tensors = all_tensors()
    wrong = {
        rf"missing: {shown}\. Take": {n: t for n, t in tensors.items() if n != name},
        rf"misshapen: {shown} \(7,\), not ": {**tensors, name: torch.ones(7)},
        rf"unknown: {shown}\.more": {**tensors, f"{name}.more": torch.ones(7)},
        rf"of another type: {shown} torch\.int64": {**tensors, name: tensors[name].long()},
        rf"is damaged: {shown} is not finite": {**tensors, name: tensors[name] * math.nan},
    }
    for message, given in wrong.items():
        with pytest.raises(KitError, match=message):
            codec_of(given)


def test_a_codec_is_its_own_copy_in_single_precision():
    tensors = {n: t.half() if t.is_floating_point() else t for n, t in all_tensors().items()}
    kept = {n: t.clone() for n, t in tensors.items()}
    codec = codec_of(tensors)
    assert not codec.training
    assert {t.dtype for t in codec.parameters()} == {torch.float32}
    with torch.no_grad():
        for weight in codec.state_dict().values():
            weight.zero_()
    assert all(torch.equal(tensors[n], t) for n, t in kept.items()), "what was read stays"


def test_weight_normalisation_is_torchs():
    tensors = random_sound()
    layer = weight_norm(torch.nn.ConvTranspose1d(16, 8, 16, 8, padding=4))
    prefix = f"{VOCODER}.ups.0."
    own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    layer.load_state_dict(own)
    own_layer = xtts_codec(tensors, random_dvae(), settings()).vocoder.ups[0]
    assert torch.allclose(own_layer.weight, layer.weight, atol=1e-6)
    assert torch.equal(own_layer.bias, layer.bias)


def test_no_dvae_is_reported_and_what_training_kept_of_one_is_left():
    with pytest.raises(KitError, match=r"no DVAE.*put dvae\.pth"):
        xtts_codec(random_sound(), {}, settings())
    more = {"dvae.discrete_loss.accumulator": torch.zeros(100, 32)}
    codec = codec_of(all_tensors() | more)
    assert codec.state_dict().keys() == codec_of().state_dict().keys()
