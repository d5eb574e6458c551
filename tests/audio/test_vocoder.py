"""Griffin-Lim is as good as torchaudio's, the neural vocoder learns, and both are local in time."""

import pytest
import torch
import torchaudio
from helpers import waves
from torch import nn

from kit.audio import vocoder
from kit.audio.spectrogram import Mel
from kit.audio.vocoder import Vocoder
from kit.base.errors import KitError


def magnitude_of(wave: torch.Tensor) -> torch.Tensor:
    return torchaudio.transforms.Spectrogram(n_fft=1024, hop_length=256, power=1)(wave)


def convergence(wave: torch.Tensor, magnitude: torch.Tensor) -> float:
    """Spectral convergence, but for the ends, where torch mirrors a sound and the kit does not."""
    frames = magnitude.shape[-1] - 4
    again, magnitude = magnitude_of(wave)[..., 4:frames], magnitude[..., 4:frames]
    return float((again - magnitude).norm() / magnitude.norm())


@pytest.mark.parametrize("iters", [4, 24])
def test_the_phase_is_as_good_as_torchaudios(iters):
    sizes = {"n_fft": 1024, "hop_length": 256, "power": 1}
    peer = torchaudio.transforms.GriffinLim(n_iter=iters, rand_init=True, **sizes)
    torch.manual_seed(0)
    ours = theirs = 0.0
    for wave in waves()[:8]:
        magnitude = magnitude_of(wave[None])
        ours += convergence(vocoder.GriffinLim(1024, 256, iters)(magnitude), magnitude)
        theirs += convergence(peer(magnitude), magnitude)
    assert ours < 1.05 * theirs


def test_parts_meet_also_where_the_noise_begins_again():
    network = vocoder.GriffinLim(1024, 256, 2)
    magnitude = torch.rand(1, 513, 2 * vocoder.NOISE_FRAMES)
    first, context = vocoder.NOISE_FRAMES - 10, network.context
    part = network(magnitude[..., first:], first)[:, context * 256 :]
    assert torch.allclose(part, network(magnitude)[:, (first + context) * 256 :], atol=1e-6)


@torch.inference_mode()
def test_it_ends_in_torchs_inverse_transform():
    network = Vocoder(width=32, blocks=1, n_fft=1024, hop=256)
    network.to_phase.weight.zero_()
    network.to_phase.bias.fill_(0.7)
    magnitude = torch.rand(2, 513, 20) + 0.1
    spectrum = torch.polar(magnitude, torch.full_like(magnitude, 0.7))
    wanted = torch.istft(spectrum, 1024, 256, window=torch.hann_window(1024))
    made = network(magnitude.log())
    assert made.shape == (2, 20 * 256)
    assert torch.allclose(made[:, : wanted.shape[1]], wanted, atol=1e-5)


def test_a_loss_of_critics_that_is_no_number_ends_the_training():
    depth = nn.Parameter(torch.tensor(float("nan")))
    with pytest.raises(KitError, match=r"nan at step 1 .*sharpen_steps=0"):
        next(vocoder.train_generator([depth], lambda: ([], [], depth.sum()), 5, adversarial=True))


def test_silence_has_a_gradient():
    silence = torch.zeros(1, 50 * 256, requires_grad=True)
    vocoder.compare_waves(waves()[0][None, : 50 * 256], silence, Mel())[2].backward()
    assert torch.isfinite(silence.grad).all()


def wavy(depth) -> torch.Tensor:
    """Log-spectrograms (4, 40, 8) with harmonics of this depth, each at another place."""
    at = 10 * torch.rand(4, 1, 1)
    return depth * torch.sin(torch.arange(40)[:, None] + at).expand(-1, -1, 8) - 3


def test_critics_teach_a_maker_of_shallow_harmonics_to_make_them_deep():
    torch.manual_seed(0)
    depth = nn.Parameter(torch.tensor(0.2))

    def views() -> vocoder.Comparison:
        return [wavy(2.0)], [wavy(depth)], 0 * depth.square()

    steps = list(vocoder.train_generator([depth], views, 120, adversarial=True))
    assert len(steps) == 120 and depth > 0.21  # 4e-4 a step at most
