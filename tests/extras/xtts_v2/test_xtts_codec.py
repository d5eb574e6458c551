"""XTTS's codec keeps the contract of a codec, from the tensors of a release to its own file."""

import dataclasses
import math

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
from kit.extras.xtts_v2.vocoder import frames_of, to_frames

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


def test_a_code_for_every_started_1024_samples(codec):
    for samples in (100, 1024, 1025, 4096, 22_050):
        codes = codec.encode(spoken(samples).expand(2, -1))
        assert codes.shape == (2, math.ceil(samples / 1024))
        assert codes.dtype == torch.int64 and codes.max() < 32


@pytest.mark.parametrize("count", [0, 1, 3, 40, 147])
def test_the_length_of_the_sound_follows_the_codes(codec, count):
    alone = codec.decode(some_codes(count, 2))
    spoken_by = codec.decode(some_codes(count, 2), **some_states(count, 2))
    assert alone.shape == spoken_by.shape == (2, codec.samples(count))
    assert abs(codec.samples(count) - count / codec.frame_rate * RATE) < 256
    assert torch.isfinite(alone).all() and torch.isfinite(spoken_by).all()


def test_clips_are_encoded_as_each_alone(codec):
    waves = [spoken(20_000), spoken(31_000, seed=1)]
    mels, codes = codecs.mels_and_codes(codec, codec.reference_mel, waves)
    for wave, mel, own in zip(waves, mels, codes):
        assert torch.equal(own, codec.encode(wave[None])[0])
        alone = codec.reference_mel.clip_mel(wave, INPUT_RATE)
        assert mel.shape == alone.shape
        assert torch.allclose(mel[:, :-6], alone[:, :-6], atol=1e-4), "but where silence follows"


@pytest.mark.parametrize("with_state_inputs", [True, False])
@pytest.mark.parametrize(("start", "end"), [(0, 30), (31, 60), (45, 90), (89, 90)])
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


@pytest.mark.parametrize("at", range(30, 40))
@torch.no_grad()
def test_the_context_is_how_far_a_state_has_effect(codec, at):
    given = some_states(70)
    given["states"][:, at] = math.nan
    wave = codec.decode(some_codes(70), **given)[0]
    ends = torch.tensor([codec.samples(n + 1) for n in range(70)])
    affected = torch.searchsorted(ends, wave.isnan().nonzero()[:, 0], right=True)
    assert at - codec.vocoder.context <= affected.min() < at < affected.max()
    assert affected.max() <= at + codec.vocoder.context


@torch.no_grad()
def test_the_context_is_how_far_a_code_has_effect(codec):
    codes = some_codes(120)
    codec = xtts_codec(random_sound(), random_dvae(), settings())
    codec.dvae.codebook.embed[:, 5] = math.nan
    codes[codes == 5] = 6
    codes[:, 60] = 5
    frames = to_frames(codec.dvae.decode(codes)).isnan().any(1)[0].nonzero()[:, 0]
    frames = torch.arange(frames.min() - codec.griffin_lim.context, frames.max() + 1)
    first = next(n for n in range(120) if frames_of(n + 1) > frames[0])
    assert 60 - codec.context <= first <= 60 - codec.context + 3


def test_streamed_codes_are_the_whole(codec):
    codes = some_codes(150)[0]
    stream = AudioStream(codec, first=4, longest=30)
    pieces = [*map(stream.push, codes.split(3)), stream.finish()]
    whole = codec.decode(codes[None])[0]
    assert sum(1 for piece in pieces if len(piece)) > 3
    assert (torch.cat(pieces) - whole).abs().max() <= 1e-4 * whole.abs().max()


def test_a_flat_spectrum_keeps_its_loudness(codec):
    energy = 0.25 * codec.mel.scale.fb.sum(0)  # of bins of a magnitude of 0.5
    mel = energy.log() / codec.mel.mel_stats
    magnitude = codec.magnitude(mel[None, :, None].repeat(1, 1, 4))[0]
    assert magnitude.shape == (513, 4)
    assert (magnitude[10:330] - 0.5).abs().max() < 0.05, "from 0.2 to 7.7 kHz"
    assert not magnitude[345:].any(), "above 8 kHz there are no mels"


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


def test_codes_and_states_that_do_not_fit_are_reported(codec):
    with pytest.raises(KitError, match=r"must be in 0\.\.31"):
        codec.decode(torch.tensor([[3, 32]]))
    given = some_states(5)
    with pytest.raises(KitError, match=r"`speaker` must be \(1, 512\) .* it is missing"):
        codec.decode(some_codes(5), states=given["states"])
    with pytest.raises(KitError, match=r"`states` must be \(1, 5, 96\) .* it is missing"):
        codec.decode(some_codes(5), speaker=given["speaker"])
    with pytest.raises(KitError, match=r"`states` must be \(1, 4, 96\) .* it is \(1, 5, 96\)"):
        codec.decode(some_codes(4), **given)


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


def test_parts_of_two_releases_are_reported():
    sound = random_sound()
    for name in ("weight", "bias"):
        name = f"hifigan_decoder.speaker_encoder.fc.{name}"
        sound[name] = sound[name][:256]
    with pytest.raises(KitError, match=r"misshapen: speaker_encoder\.fc\.weight"):
        xtts_codec(sound, random_dvae(), settings())


def test_a_configuration_of_another_release_is_reported():
    with pytest.raises(KitError, match=r"`audio\.sample_rate` = 24000"):
        described = dict(settings(), audio={"sample_rate": 24_000})
        xtts_codec(random_sound(), random_dvae(), described)
    described = settings()
    described["model_args"]["gpt_start_audio_token"] = 1024
    with pytest.raises(KitError, match="The DVAE has 32 codes, the configuration's GPT 1024"):
        xtts_codec(random_sound(), random_dvae(), described)


def test_it_is_not_trained_here():
    small = {"channels": 16, "filters": [8, 8, 8, 8], "dvae_width": 8, "latent_width": 8}
    codec = codecs.make_codec(codecs.codec_config({"kind": "xtts", **small}))
    with pytest.raises(KitError, match="comes with a release"):
        codec.fit_schedule([])


def test_sizes_that_are_none_are_reported():
    for name, value in {"filters": (8, 8), "channels": 4, "codes": 1, "mel_stats": (1.0,)}.items():
        with pytest.raises(KitError, match=rf"{name} = .*: (give|must)"):
            XTTSCodec(dataclasses.replace(XTTSCodecConfig(), **{name: value}))
