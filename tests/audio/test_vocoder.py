"""Griffin-Lim is as good as torchaudio's, the neural vocoder learns, and both are local in time."""

import pytest
import torch
import torch.nn.functional as F
import torchaudio
from helpers import speech, waves

from kit.audio.spectrogram import Mel
from kit.audio.vocoder import (
    NOISE_FRAMES,
    RESOLUTIONS,
    GriffinLim,
    Vocoder,
    compare_waves,
    log_spectrogram,
    overlap_add,
    train_vocoder,
)
from kit.base.errors import KitError


def magnitude_of(wave: torch.Tensor, hop: int = 256) -> torch.Tensor:
    return torchaudio.transforms.Spectrogram(n_fft=1024, hop_length=hop, power=1)(wave)


def convergence(wave: torch.Tensor, magnitude: torch.Tensor) -> float:
    """Spectral convergence, but for the ends, where torch mirrors a sound and the kit does not."""
    frames = magnitude.shape[-1] - 4
    again, magnitude = magnitude_of(wave)[..., 4:frames], magnitude[..., 4:frames]
    return float((again - magnitude).norm() / magnitude.norm())


@pytest.mark.parametrize(("n", "hop", "count"), [(8, 2, 5), (6, 2, 1), (4, 4, 3), (1024, 256, 9)])
def test_overlap_add_is_torchs_fold(n, hop, count):
    frames = torch.randn(2, count, n)
    length = (count - 1) * hop + n
    wanted = F.fold(frames.mT, (1, length), (1, n), stride=(1, hop)).view(2, length)
    assert torch.allclose(overlap_add(frames, hop), wanted, atol=1e-5)


@pytest.mark.parametrize("iters", [4, 24])
def test_the_phase_is_as_good_as_torchaudios(iters):
    peer = torchaudio.transforms.GriffinLim(
        n_fft=1024, hop_length=256, power=1, n_iter=iters, rand_init=True
    )
    torch.manual_seed(0)
    ours = theirs = 0.0
    for wave in waves()[:8]:
        magnitude = magnitude_of(wave[None])
        ours += convergence(GriffinLim(1024, 256, iters)(magnitude), magnitude)
        theirs += convergence(peer(magnitude), magnitude)
    assert ours < 1.05 * theirs


def test_more_iterations_come_closer():
    magnitude = magnitude_of(torch.from_numpy(speech())[None])
    errors = [convergence(GriffinLim(1024, 256, n)(magnitude), magnitude) for n in (0, 4, 16)]
    assert errors[0] > 1.3 * errors[1] > 1.3 * errors[2]


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 50])
def test_any_number_of_frames_has_a_phase(frames):
    wave = GriffinLim(1024, 256, 3)(torch.rand(2, 513, frames))
    assert wave.shape == (2, 256 * frames) and torch.isfinite(wave).all()


def test_silence_stays_silent():
    assert not GriffinLim(1024, 256, 3)(torch.zeros(1, 513, 20)).any()


def test_parts_meet_also_where_the_noise_begins_again():
    vocoder = GriffinLim(1024, 256, 2)
    magnitude = torch.rand(1, 513, 2 * NOISE_FRAMES)
    first, context = NOISE_FRAMES - 10, vocoder.context
    part = vocoder(magnitude[..., first:], first)[:, context * 256 :]
    assert torch.allclose(part, vocoder(magnitude)[:, (first + context) * 256 :], atol=1e-6)


def test_the_same_sound_each_time_and_the_global_generator_left_alone():
    before = torch.get_rng_state()
    magnitude = torch.ones(1, 513, 9)
    assert torch.equal(GriffinLim(1024, 256, 2)(magnitude), GriffinLim(1024, 256, 2)(magnitude))
    assert torch.equal(torch.get_rng_state(), before)


def test_it_saves_no_tensors():
    assert not GriffinLim(1024, 256, 2).state_dict()


# --- the neural vocoder ---------------------------------------------------------------------


def small(blocks: int = 1) -> Vocoder:
    torch.manual_seed(0)
    return Vocoder(width=32, blocks=blocks, n_fft=1024, hop=256)


@pytest.fixture(scope="module")
def recording() -> torch.Tensor:
    return torch.from_numpy(speech())[None, : 50 * 256]


@torch.inference_mode()
def test_it_ends_in_torchs_inverse_transform():
    vocoder = small()
    vocoder.to_phase.weight.zero_()
    vocoder.to_phase.bias.fill_(0.7)
    magnitude = torch.rand(2, 513, 20) + 0.1
    spectrum = torch.polar(magnitude, torch.full_like(magnitude, 0.7))
    wanted = torch.istft(spectrum, 1024, 256, window=torch.hann_window(1024))
    made = vocoder(magnitude.log())
    assert made.shape == (2, 20 * 256)
    assert torch.allclose(made[:, : wanted.shape[1]], wanted, atol=1e-5)


@pytest.mark.parametrize("frames", [1, 2, 3, 50])
def test_any_number_of_frames_has_its_sound(frames):
    wave = small()(torch.randn(2, 513, frames))
    assert wave.shape == (2, 256 * frames) and torch.isfinite(wave).all()


@pytest.mark.parametrize("blocks", [1, 3])
@torch.inference_mode()
def test_a_frame_has_effect_within_the_context_only(blocks):
    vocoder = small(blocks=blocks)
    frames = torch.randn(1, 513, 100)
    other = frames.clone()
    other[..., 50] += 1
    changed = (vocoder(other) != vocoder(frames)).view(100, 256).any(1).nonzero()[:, 0]
    assert changed.min() == 50 - vocoder.context
    assert 50 + vocoder.context - 1 <= changed.max() <= 50 + vocoder.context


def test_what_it_has_learnt_from_it_says_better(recording):
    vocoder = small()
    ear = Mel()
    log_magnitude = ear(recording)[1][..., :50]

    def pairs():
        return log_magnitude, recording

    @torch.no_grad()
    def error() -> float:
        made = vocoder(log_magnitude)[:, : recording.shape[1]]
        return compare_waves(recording, made, ear)[2].item()

    before = error()
    steps = list(train_vocoder(vocoder, ear, pairs, 30))
    assert [step for step, _ in steps] == list(range(1, 31))
    assert error() < 0.9 * before


def test_silence_has_a_gradient(recording):
    silence = torch.zeros_like(recording, requires_grad=True)
    compare_waves(recording, silence, Mel())[2].backward()
    assert torch.isfinite(silence.grad).all()


@pytest.mark.parametrize("size, hop", RESOLUTIONS)
def test_spectrograms_are_torchs(recording, size, hop):
    window = torch.hann_window(size)
    wanted = torch.stft(recording, size, hop, window=window, return_complex=True).abs()
    loud = wanted > 0.02
    assert torch.allclose(
        log_spectrogram(recording, size, hop).exp()[loud], wanted[loud], rtol=1e-4
    )


def test_where_the_error_is_no_number_it_ends(recording):
    vocoder = small()
    broken = torch.full((1, 513, 50), torch.nan)
    with pytest.raises(KitError, match="nan at step 1"):
        next(train_vocoder(vocoder, Mel(), lambda: (broken, recording), 3))
