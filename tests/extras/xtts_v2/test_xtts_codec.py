"""XTTS's codec keeps the contract of a codec, from the tensors of a release to its own file."""

import pytest
import torch
import torch.nn.functional as F
from released_sound import spoken
from released_xtts import random_dvae, random_sound, settings, write_release
from torch import Tensor

from kit.audio import codec as codecs
from kit.audio.clip import resampled
from kit.audio.codec import AudioStream
from kit.base.errors import KitError, SpeechError
from kit.extras.xtts_v2.codec import XTTSCodec, XTTSCodecConfig, xtts_codec
from kit.extras.xtts_v2.model import load_xtts
from kit.extras.xtts_v2.vocoder import to_frames

RATE = 24_000
INPUT_RATE = 22_050
STATES = 96  # width of the tiny release's


@pytest.fixture(scope="module")
def codec() -> XTTSCodec:
    return xtts_codec(random_sound(), random_dvae(), settings())


def some_codes(count: int, rows: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(count)
    return torch.randint(0, 32, (rows, count), generator=random)


def some_states(count: int, rows: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(count)
    states = torch.randn(rows, count, STATES, generator=random)
    return {"states": states, "speaker": F.normalize(torch.randn(rows, 512, generator=random))}


def test_the_contract_in_numbers_and_a_round_trip_at_the_rate_of_the_sound(codec):
    assert codec.vocab_size == 32
    assert (codec.sample_rate, codec.input_sample_rate) == (RATE, INPUT_RATE)
    assert codec.frame_rate == codec.config.frame_rate == pytest.approx(21.533, abs=1e-3)
    assert codec.samples(147) == 640 * 256 == round(147 / codec.frame_rate * RATE)
    codes = codec.encode(resampled(spoken(RATE, rate=RATE), RATE, INPUT_RATE)[None])
    assert codes.shape == (1, 22)
    assert torch.equal(codec.round_trip(spoken(RATE, rate=RATE)), codec.decode(codes)[0])


@pytest.mark.parametrize("count", [0, 1, 147])
def test_the_length_of_the_sound_follows_the_codes(codec, count):
    alone = codec.decode(some_codes(count, 2))
    spoken_by = codec.decode(some_codes(count, 2), **some_states(count, 2))
    assert alone.shape == spoken_by.shape == (2, codec.samples(count))
    assert abs(codec.samples(count) - count / codec.frame_rate * RATE) < 256
    assert torch.isfinite(alone).all() and torch.isfinite(spoken_by).all()


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


def test_griffin_lim_sounds_log_mels_of_speech(codec):
    stats = codec.mel.mel_stats[:, None]
    mel = codec.mel.log_mel(spoken(44_100)[None])[..., :172]
    wave = codec.griffin_lim(codec.magnitude(to_frames(mel)))
    again = codec.mel.log_mel(resampled(wave, RATE, 22_050))
    nats = (mel * stats)[0, :, 4:160]
    errors = (again * stats)[0, :, 4:160] - nats
    loud = nats > nats.max() - 5
    assert errors[loud].abs().mean() < 0.5
    assert nats[loud].std() > 1


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
    xtts = load_xtts(write_release(tmp_path / "release"))
    codec = xtts_codec(xtts.sound, xtts.dvae, xtts.config)
    path = tmp_path / "codec.safetensors"
    codecs.save_codec(codec, path)
    again = codecs.load_codec(path)
    assert again.config == codec.config and again.config.codes == xtts.model.config.start_code
    wave = spoken(INPUT_RATE)[None]
    assert torch.equal(again.encode(wave), codec.encode(wave))
    given = some_states(7)
    assert torch.equal(again.decode(some_codes(7), **given), codec.decode(some_codes(7), **given))
    one, other = (each.speaker_embedding(wave[0], INPUT_RATE) for each in (again, codec))
    assert torch.equal(one, other)
    before = xtts_codec(xtts.sound, xtts.dvae, xtts.config).state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in again.state_dict().items())


def made(sound: dict | None = None, **over) -> XTTSCodec:
    return xtts_codec(sound or random_sound(), random_dvae(), settings() | over)


ENCODER = "hifigan_decoder.speaker_encoder.fc.weight"
OTHER_GPT = {"model_args": settings()["model_args"] | {"gpt_start_audio_token": 1024}}
REFUSALS = [
    (
        lambda _: made(random_sound() | {ENCODER: torch.zeros(256, 2)}),
        r"speaker_encoder\.fc\.weight",
    ),
    (lambda _: made(audio={"sample_rate": 24_000}), r"`audio\.sample_rate` = 24000"),
    (lambda _: made(**OTHER_GPT), "32 codes.* 1024"),
    (lambda c: c.decode(torch.tensor([[3, 32]])), r"0\.\.31"),
    (lambda c: c.decode(some_codes(5), states=some_states(5)["states"]), r"`speaker`.*\(1, 512\)"),
    (lambda c: c.decode(some_codes(4), **some_states(5)), r"\(1, 4, 96\).*\(1, 5, 96\)"),
    (lambda _: XTTSCodec(XTTSCodecConfig(channels=4)), "channels = 4"),
    (lambda c: c.fit_schedule([]), "comes with a release"),
]


@pytest.mark.parametrize(("call", "facts"), REFUSALS)
def test_what_does_not_fit_is_reported(codec, call, facts):
    with pytest.raises(KitError, match=facts):
        call(codec)
