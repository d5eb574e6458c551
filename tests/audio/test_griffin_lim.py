"""Griffin-Lim finds a phase as good as torchaudio's, and a part sounds as it does in the whole."""

import pytest
import torch
import torch.nn.functional as F
import torchaudio
from helpers import speech, waves

from kit.audio.griffin_lim import NOISE_FRAMES, GriffinLim, overlap_add


def magnitude_of(wave: torch.Tensor, hop: int = 256) -> torch.Tensor:
    return torchaudio.transforms.Spectrogram(n_fft=1024, hop_length=hop, power=1)(wave)


def error(wave: torch.Tensor, magnitude: torch.Tensor) -> float:
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
        ours += error(GriffinLim(1024, 256, iters)(magnitude), magnitude)
        theirs += error(peer(magnitude), magnitude)
    assert ours < 1.05 * theirs


def test_more_iterations_come_closer():
    magnitude = magnitude_of(torch.from_numpy(speech())[None])
    errors = [error(GriffinLim(1024, 256, n)(magnitude), magnitude) for n in (0, 4, 16)]
    assert errors[0] > 1.3 * errors[1] > 1.3 * errors[2]


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 50])
def test_any_number_of_frames_has_its_sound(frames):
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
