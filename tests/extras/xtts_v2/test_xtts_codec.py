"""XTTS's codec keeps the contract of a codec, from the tensors of a release to its own file.

coqui-tts itself is the reference in tests/xtts; here they are tiny and it is not needed.
"""

import math

import pytest
import torch
import torch.nn.functional as F
import torchaudio
from released_sound import spoken, xtts_mels
from released_xtts import random_dvae, random_sound, settings, sound_tensors, write_release
from torch import Tensor

from kit.audio import codec as codecs
from kit.audio.clip import resampled
from kit.audio.codec import AudioStream
from kit.base.errors import KitError, SpeechError
from kit.extras.xtts_v2 import codec as xtts
from kit.extras.xtts_v2.codec import XTTSCodec, xtts_codec
from kit.extras.xtts_v2.model import load_xtts

RATE = 24_000
INPUT_RATE = 22_050
STATES = 96  # width of the tiny release's


@pytest.fixture(scope="module")
def codec() -> XTTSCodec:
    return xtts_codec(random_sound(), random_dvae(), settings())


def some_codes(count: int, rows: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(count)
    return torch.randint(0, 32, (rows, count), generator=random)


def some_states(count: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(count)
    states = torch.randn(1, count, STATES, generator=random)
    return {"states": states, "speaker": F.normalize(torch.randn(1, 512, generator=random))}


def test_the_contract_in_numbers_and_a_round_trip_at_the_rate_of_the_sound(codec):
    assert codec.vocab_size == 32
    assert (codec.sample_rate, codec.input_sample_rate) == (RATE, INPUT_RATE)
    assert codec.frame_rate == codec.config.frame_rate == pytest.approx(21.533, abs=1e-3)
    assert codec.samples(147) == 640 * 256 == round(147 / codec.frame_rate * RATE)
    codes = codec.encode(resampled(spoken(RATE, rate=RATE), RATE, INPUT_RATE)[None])
    assert codes.shape == (1, 22)
    assert torch.equal(codec.round_trip(spoken(RATE, rate=RATE)), codec.decode(codes)[0])


@pytest.mark.parametrize("with_state_inputs", [True, False])
@pytest.mark.parametrize(("start", "end"), [(0, 30), (31, 60), (89, 90)])
def test_a_part_with_context_sounds_as_in_the_whole(codec, with_state_inputs, start, end):
    codes = some_codes(90)
    given = some_states(90) if with_state_inputs else {}
    context = codec.vocoder.context if with_state_inputs else codec.context
    first = max(0, start - context)
    around = slice(first, end + context)
    part = given | ({"states": given["states"][:, around]} if with_state_inputs else {})
    wave = codec.decode(codes[:, around], first, **part)
    whole = codec.decode(codes, **given)[:, codec.samples(start) : codec.samples(end)]
    wave = wave[:, codec.samples(start) - codec.samples(first) :][:, : whole.shape[1]]
    assert (wave - whole).abs().max() <= 1e-4 * whole.abs().max()


def test_streamed_codes_are_the_whole(codec):
    codes = some_codes(150)[0]
    stream = AudioStream(codec, first=4, longest=30)
    pieces = [*map(stream.push, codes.split(3)), stream.finish()]
    whole = codec.decode(codes[None])[0]
    assert sum(1 for piece in pieces if len(piece)) > 3
    assert (torch.cat(pieces) - whole).abs().max() <= 1e-4 * whole.abs().max()


def test_a_speaker_vector_is_computed_at_any_rate(codec):
    at_48 = codec.speaker_embedding(spoken(96_000, rate=48_000), 48_000)
    at_22 = codec.speaker_embedding(spoken(44_100), 22_050)
    assert at_48.shape == (512,)
    assert at_48 @ at_22 > 0.9
    with pytest.raises(SpeechError, match=r"lasts 0\.10 s"):
        codec.speaker_embedding(spoken(2205), 22_050)
    with pytest.raises(SpeechError, match="is silent"):
        codec.speaker_embedding(torch.zeros(22_050), 22_050)


def test_a_release_becomes_a_codec_with_a_file_of_its_own(tmp_path):
    release = load_xtts(write_release(tmp_path / "release"))
    codec = xtts_codec(release.sound, release.dvae, release.config)
    path = tmp_path / "codec.safetensors"
    codecs.save_codec(codec, path)
    again = codecs.load_codec(path)
    assert again.config == codec.config and again.config.codes == release.model.config.start_code
    wave = spoken(INPUT_RATE)[None]
    assert torch.equal(again.encode(wave), codec.encode(wave))
    given = some_states(7)
    assert torch.equal(again.decode(some_codes(7), **given), codec.decode(some_codes(7), **given))
    before = codec.state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in again.state_dict().items())


OTHER_GPT = {"model_args": {"gpt_start_audio_token": 1024}}
REFUSALS = [
    (lambda _: xtts_codec(random_sound(), random_dvae(), OTHER_GPT), "32 codes.* 1024"),
    (lambda c: c.decode(torch.tensor([[3, 32]])), r"0\.\.31"),
    (lambda _: XTTSCodec(xtts.XTTSCodecConfig(channels=4)), "channels = 4"),
    (lambda c: c.fit_schedule([]), "comes with a release"),
    (lambda _: xtts_codec(random_sound(), {}, settings()), r"dvae\.pth"),
    (lambda _: xtts_mels({}), "mel_stats"),
    (lambda _: xtts_mels({"mel_stats": torch.ones(64)}), "mel_stats"),
    (lambda _: xtts_mels({"mel_stats": torch.ones(80).long()}), "mel_stats"),
    (lambda _: xtts_mels({"mel_stats": torch.zeros(80)}), "mel_stats"),
]


@pytest.mark.parametrize(("call", "facts"), REFUSALS)
def test_what_does_not_fit_is_reported(codec, call, facts):
    with pytest.raises(KitError, match=facts):
        call(codec)


def test_the_releases_sizes_are_the_defaults():
    """Tensor for tensor they are compared in tests/xtts, where coqui-tts is installed."""
    tensors = sound_tensors()
    assert len(tensors) == 537 and sum(t.numel() for t in tensors.values()) == 25_882_035
    with torch.device("meta"):
        dvae = xtts.DVAE()
    assert sum(p.numel() for p in dvae.parameters()) == 51_567_184


@pytest.mark.parametrize("n_fft", [1024, 2048])
def test_a_mel_is_torchaudios_divided_by_the_stats(n_fft):
    stats = torch.rand(80) + 0.5
    front_end = xtts.XTTSMel(xtts.XTTSMelConfig(n_fft=n_fft, mel_stats=tuple(stats.tolist())))
    sizes = {"n_fft": n_fft, "win_length": 1024, "hop_length": 256, "n_mels": 80}
    theirs = torchaudio.transforms.MelSpectrogram(INPUT_RATE, f_max=8000, norm="slaney", **sizes)
    wave = spoken(INPUT_RATE)[None]
    wanted = theirs(wave).clamp(min=1e-5).log() / stats[:, None]
    assert (front_end.log_mel(wave) - wanted).abs().max() < 1e-4


VOCODER = "hifigan_decoder.waveform_decoder."


@pytest.mark.parametrize(
    ("prefix", "name"), [(VOCODER, "conds.2.bias"), ("", "decoder.3.net.2.weight")]
)
def test_every_tensor_has_its_place(prefix, name):
    sound, dvae = random_sound(), random_dvae()
    changed, full = (sound, prefix + name) if prefix else (dvae, name)
    whole = dict(changed)
    wrong = {
        "missing": {n: t for n, t in whole.items() if n != full},
        "misshapen": whole | {full: torch.ones(7)},
        "unknown": whole | {f"{full}.more": torch.ones(7)},
        "not finite": whole | {full: whole[full] * math.nan},
    }
    for fault, tensors in wrong.items():
        parts = (tensors, dvae) if prefix else (sound, tensors)
        with pytest.raises(KitError, match=f"({fault}.*{name}|{name}.*{fault})"):
            xtts_codec(*parts, settings())
