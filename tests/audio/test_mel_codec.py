"""The codec keeps its contract: lengths, ranges, files, and codes that do not depend on a batch."""

import copy
import dataclasses
import math

import pytest
import torch
import torchaudio
from helpers import CODEC, RATE, speech, trained_codec, waves

from kit.audio.codec import ClipWithStates, load_codec, mels_and_codes, save_codec
from kit.audio.fitting import FSQ
from kit.audio.mel_codec import MelCodec
from kit.audio.spectrogram import Mel
from kit.base.errors import KitError
from kit.base.tensor_file import file_bytes
from kit.settings import MelCodecConfig, MelConfig

PER_CODE = CODEC.hop_length * CODEC.frames_per_code


@pytest.fixture(scope="module")
def codec() -> MelCodec:
    return trained_codec()[0]


@pytest.mark.parametrize("samples", [1, 256, 513, 1025, 30000])
def test_shapes_and_lengths_of_a_round_trip_also_of_very_short_clips(codec, samples):
    assert codec.vocab_size == 4 * 3 * 5 and codec.sample_rate == RATE
    assert codec.frame_rate == RATE / PER_CODE
    noise = torch.randn(samples)
    waves = torch.stack((noise * 0.1, noise.clamp(-1, 1), noise * 0, noise * 0 + 1))
    codes = codec.encode(waves)
    padded = max(samples, 4 * CODEC.hop_length)
    assert codes.shape[0] == 4 and codes.dtype == torch.int64
    assert abs(codes.shape[1] - padded / PER_CODE) <= 1
    assert codes.min() >= 0 and codes.max() < codec.vocab_size
    wave = codec.decode(codes)
    assert wave.shape[0] == 4 and abs(wave.shape[1] - padded) <= PER_CODE
    assert torch.isfinite(wave).all()
    (mel,), (codes,) = mels_and_codes(codec, Mel(), [waves[0]])
    assert mel.shape[1] == samples // CODEC.hop_length + 1 and len(codes) >= 1


@pytest.mark.parametrize("count", [0, 1, 3, 60])
def test_sound_is_as_long_as_its_codes_and_a_batch_is_each_row_alone(codec, count):
    codes = torch.randint(0, codec.vocab_size, (3, count))
    together = codec.decode(codes)
    assert together.shape == (3, count * PER_CODE) and torch.isfinite(together).all()
    alone = torch.cat([codec.decode(row[None]) for row in codes])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("levels", [(4, 3, 5), (2,), (8, 5, 5, 5)])
def test_every_code_survives_values_and_back(levels):
    fsq = FSQ(levels)
    codes = torch.arange(torch.tensor(levels).prod().item())[None]
    values = fsq.dequantize(codes).float()
    assert values.abs().max() <= 1
    value, again = fsq.quantize(torch.atanh(values.clamp(-1 + 1e-6, 1 - 1e-6)))
    assert torch.equal(again, codes) and torch.allclose(value, values, atol=1e-5)
    assert len(values[0].unique(dim=0)) == codes.numel()
    for column, k in zip(values[0].T, levels):
        assert torch.allclose(column.unique(), torch.linspace(-1, 1, k), atol=1e-6)


def test_rounding_passes_gradients_straight_through_and_half_of_the_clips_get_noise_instead():
    z = torch.randn(1, 50, 3, requires_grad=True)
    FSQ((4, 3, 5)).quantize(z)[0].sum().backward()
    assert torch.allclose(z.grad, 1 - torch.tanh(z.detach()) ** 2, atol=1e-5)
    torch.manual_seed(0)
    z = torch.randn(200, 5, 2)
    value, codes = FSQ((4, 5)).quantize(z, noise_share=0.5)
    rounded, same = FSQ((4, 5)).quantize(z)
    assert torch.equal(codes, same)
    noisy = (value != rounded).flatten(1).any(1)
    assert 0.4 < noisy.float().mean() < 0.6
    steps = torch.tensor([2 / 3, 2 / 4])  # from one level to the next
    assert ((value - rounded).abs() <= steps + 1e-6).all()


def test_however_far_the_encoder_drifts_the_quantiser_does_not_collapse():
    """A numb quantiser passes no gradient back: real recordings once trained one to two codes."""
    torch.manual_seed(0)
    codec = MelCodec(CODEC)
    with torch.no_grad():
        for weight in codec.encoder[-1].parameters():
            weight.mul_(1000)
    wave = torch.stack([w[:RATE] for w in waves()[:4]])
    values, _ = codec.quantized(codec.mel.log_mel(wave)[..., :80])
    outermost = values[..., (0, 2)].abs() > 0.99  # of 4 and 5 levels; of 3 they are two thirds
    assert outermost.float().mean() < 0.2
    values.sum().backward()
    assert codec.to_code.weight.grad.abs().max() > 1


def test_training_lowers_the_loss_and_takes_clips_shorter_than_a_crop():
    _, losses = trained_codec()
    assert len(losses) == CODEC.steps
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    codec = MelCodec(dataclasses.replace(CODEC, steps=2))
    assert dict(codec.fit([torch.randn(700) * 0.1], "cpu", "fp32")).keys() == {1, 2}


SOUNDS = {  # how sound is made or trained, and the settings for that
    "griffin_lim": {},
    "sharpened": {"sharpen_steps": 3},
    "vocoder": {"vocoder_steps": 3, "vocoder_width": 16, "vocoder_blocks": 1},
}


def with_sound(codec: MelCodec, sound: str) -> MelCodec:
    """The same codes; a vocoder has learnt nothing yet."""
    torch.manual_seed(0)
    made = MelCodec(dataclasses.replace(codec.config, **SOUNDS[sound]))
    made.load_state_dict(codec.state_dict(), strict=False)
    return made.eval()


@pytest.mark.parametrize("sound", ["sharpened", "vocoder"])
def test_training_the_sound_further_changes_no_code(codec, tmp_path, sound):
    wave = waves()[0][None]
    codes = codec.encode(wave)
    sounds = []
    for _ in range(2):
        made = with_sound(codec, sound)
        before = made.decode(codes)
        train = made.train_vocoder if sound == "vocoder" else made.train_adversarial
        assert list(train(waves(), "cpu")) == [(1, 3), (2, 3), (3, 3)]
        assert not made.training and torch.equal(made.encode(wave), codes)
        sounds.append(made.decode(codes))
        assert not torch.equal(sounds[-1], before)
    assert torch.equal(*sounds) and codec.decode(codes).shape == sounds[0].shape
    assert torch.equal(made.round_trip(wave[0]), sounds[0][0])
    save_codec(made, tmp_path / "codec.safetensors")
    again = load_codec(tmp_path / "codec.safetensors")
    assert torch.equal(again.decode(codes), sounds[0])
    states = torch.randn(1, codes.shape[1], 6)
    assert torch.equal(again.with_state_inputs(6).decode(codes, states=states), sounds[0])


def stated_clips(codec: MelCodec) -> list[ClipWithStates]:
    """Clips whose states tell how loud they are around each code."""
    clips = []
    for wave in waves():
        codes = codec.encode(wave[None])[0]
        loudness = codec.mel.log_mel(wave[None])[0].mean(0)[:: codec.config.frames_per_code]
        states = loudness[: len(codes), None].expand(-1, 6).half()
        clips.append(ClipWithStates(wave=wave, codes=codes, states=states))
    return clips


@pytest.mark.parametrize("sound", SOUNDS)
def test_states_change_the_sound_once_they_are_learnt_and_no_code(codec, sound):
    codec = with_sound(codec, sound)
    clips = stated_clips(codec)
    stated = codec.with_state_inputs(6)
    codes, states = clips[0].codes[None], clips[0].states[None].float()
    before = codec.decode(codes)
    assert codec.state_width == 0 and stated.state_width == 6 and stated.speaker_width == 0
    assert torch.equal(stated.decode(codes, states=states), before)

    error = stated.decoder_error(clips)
    count, total = {"griffin_lim": (12, 12), "sharpened": (3, 3), "vocoder": (3, 6)}[sound]
    steps = list(stated.finetune_decoder(clips, count, "cpu"))
    assert steps == [(step, total) for step in range(1, total + 1)] and not stated.training
    assert stated.decoder_error(clips) < error or sound != "griffin_lim"
    after = stated.decode(codes, states=states)
    assert not torch.equal(after, before) and torch.equal(codec.decode(codes), before)
    assert not torch.equal(stated.decode(codes, states=states + 1), after)
    assert torch.equal(stated.encode(clips[0].wave[None]), codec.encode(clips[0].wave[None]))

    # What was learnt stays; of another model nothing is known.
    assert torch.equal(stated.with_state_inputs(6).decode(codes, states=states), after)
    other = stated.with_state_inputs(8).decode(codes, states=torch.randn(1, codes.shape[1], 8))
    assert torch.equal(other, stated.decode(codes))


def counted(codes: int) -> ClipWithStates:
    """A clip whose every sample, code and state tells its place, 32 samples a code."""
    return ClipWithStates(
        wave=torch.arange(1.0, 32 * codes + 1),
        codes=torch.arange(codes),
        states=torch.arange(codes)[:, None].expand(codes, 3).half(),
    )


def test_sound_codes_and_states_are_of_the_same_moment():
    """Crops of 4 codes: 7 frames apart, and a margin of half a window, 32 samples."""
    codec = MelCodec(MelCodecConfig(n_fft=64, hop_length=16, n_mels=8, crop_frames=8))
    generator = torch.Generator().manual_seed(0)
    some = codec.state_crops([counted(9)], 200, generator, 0.0)
    starts = some.codes[:, :1]
    assert starts.unique().tolist() == [*range(6)]  # the first and the last, too
    assert torch.equal(some.codes, starts + torch.arange(4))
    assert torch.equal(some.states[..., 0], some.codes.float())
    assert torch.equal(some.wave[:, 32:-32], 32 * starts + torch.arange(1.0, 7 * 16 + 1))


@pytest.mark.parametrize("state_width", [0, 4])
def test_a_saved_codec_is_the_same_codec(codec, tmp_path, state_width):
    if state_width:
        codec = codec.with_state_inputs(state_width)
        torch.nn.init.normal_(codec.from_state.weight)
    save_codec(codec, tmp_path / "codec.safetensors")
    again = load_codec(tmp_path / "codec.safetensors")
    assert again.state_width == state_width
    assert again.config == codec.config and not again.training
    wave = waves()[0][None]
    assert torch.equal(again.encode(wave), codec.encode(wave))
    assert file_bytes(again.state_dict(), {}) == file_bytes(codec.state_dict(), {})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_codec_that_is_not_finite_is_neither_written_nor_loaded(tmp_path, codec, value):
    path, broken = tmp_path / "codec.safetensors", copy.deepcopy(codec)
    save_codec(codec, path)
    broken.mel_head.bias.data[3] = value
    with pytest.raises(KitError, match=r"codec\.safetensors is not written: mel_head\.bias"):
        save_codec(broken, path)
    load_codec(path)  # the one before stays
    header = {"config": dataclasses.asdict(codec.config)}
    path.write_bytes(file_bytes(broken.state_dict(), header))  # as earlier versions wrote it
    with pytest.raises(KitError, match=r"mel_head\.bias is not finite.*01_data_prep"):
        load_codec(path)


def test_a_file_that_is_no_codec_is_reported(codec, tmp_path):
    path = tmp_path / "codec.safetensors"
    with pytest.raises(KitError, match=r"codec\.safetensors.*01_data_prep"):
        load_codec(path)
    save_codec(codec, path)
    whole = path.read_bytes()
    for data in (b"", whole[:-100], whole.replace(b"mel_head.weight", b"mel_hand.weight")):
        path.write_bytes(data)
        with pytest.raises(KitError, match=r"codec\.safetensors is damaged"):
            load_codec(path)


def test_codes_of_a_clip_do_not_depend_on_its_batch(codec):
    clips = waves()[:12]
    mels, together = mels_and_codes(codec, Mel(), clips)
    alone = [codec.encode(clip[None])[0] for clip in clips]
    assert list(map(len, alone)) == list(map(len, together))
    assert [mel.shape[1] - 1 for mel in mels] == [len(clip) // CODEC.hop_length for clip in clips]
    same = torch.cat(alone) == torch.cat(together)
    assert same.float().mean() > 0.97  # the last codes see the neighbouring silence


def test_log_mel_is_that_of_slaneys_filters():
    wave = torch.from_numpy(speech())[None]
    bank = torchaudio.functional.melscale_fbanks(513, 0, RATE / 2, 80, RATE, "slaney", "slaney")
    window = torch.hann_window(1024)
    power = torch.stft(wave, 1024, 256, window=window, return_complex=True).abs()
    wanted = (bank.T @ power).clamp(min=5e-4).log()
    assert torch.allclose(Mel()(wave)[0], wanted, atol=1e-4)


def test_codes_outside_the_vocabulary_are_refused(codec):
    for code in (-1, 60):
        with pytest.raises(KitError, match=r"0\.\.59"):
            codec.decode(torch.tensor([[3, code]]))


OTHER_SIZES = [{"griffin_lim_iters": 0}, {"frames_per_code": 3}, {"blocks": 1}, {"n_fft": 768}]
OTHER_SIZES += [{"vocoder_steps": 1, "vocoder_width": 16, "vocoder_blocks": 2}]


@pytest.mark.parametrize("over", OTHER_SIZES, ids=str)
@torch.inference_mode()
def test_the_context_is_how_far_a_code_has_effect(over):
    """A NaN in a code reaches every sample that depends on it."""
    codec = MelCodec(MelCodecConfig(**{**vars(CODEC), "griffin_lim_iters": 1} | over)).eval()
    at, context = 60, codec.context
    values = codec.fsq.dequantize(torch.zeros(1, 2 * at, dtype=torch.long)).float()
    values[:, at] = math.nan
    log_magnitude = codec.decode_values(values)[1]
    sound = codec.vocoder(log_magnitude) if codec.vocoder else codec.by_griffin_lim(log_magnitude)
    first, *_, last = sound.isnan().view(2 * at, -1).any(1).nonzero()[:, 0].tolist()
    # Sound waits for exactly `context` codes; what came before may matter for one code less.
    assert first == at - context and at + context - 1 <= last <= at + context


@pytest.mark.parametrize("codes", [1, 3, 4])
def test_beyond_a_clip_shorter_than_a_crop_is_silence_and_its_last_code(codes):
    codec = MelCodec(MelCodecConfig(n_fft=64, hop_length=16, n_mels=8, crop_frames=8))
    some = codec.state_crops([counted(codes)], 1, torch.Generator().manual_seed(0), 0.0)
    place = torch.arange(1.0, 7 * 16 + 32 + 1)
    sound = torch.where(place <= 32 * codes, place, 0)
    assert torch.equal(some.wave[0], torch.cat((torch.zeros(32), sound)))
    assert some.codes[0].tolist() == [min(i, codes - 1) for i in range(4)]


def test_codes_do_not_depend_on_the_log_mels_of_the_references(codec):
    clips = waves()[:3]
    codes = mels_and_codes(codec, Mel(), clips)[1]
    mels, same = mels_and_codes(codec, Mel(MelConfig(sample_rate=16_000, n_mels=40)), clips)
    assert all(torch.equal(a, b) for a, b in zip(codes, same))
    frames = [math.ceil(len(clip) * 16_000 / RATE) // 256 + 1 for clip in clips]
    assert [mel.shape for mel in mels] == [(40, count) for count in frames]
