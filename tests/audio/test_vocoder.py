"""The neural vocoder: torch's inverse transform, local in time, better for what it has learnt."""

import pytest
import torch
from helpers import speech

from kit.audio.mel_codec import MelCodecConfig
from kit.audio.spectrogram import Mel
from kit.audio.vocoder import (
    RESOLUTIONS,
    Vocoder,
    compare_waves,
    log_spectrogram,
    train_vocoder,
)
from kit.base.errors import KitError, TrainError


def small(blocks: int = 1) -> Vocoder:
    torch.manual_seed(0)
    return Vocoder(width=32, blocks=blocks, n_fft=1024, hop=256)


@pytest.fixture(scope="module")
def recording() -> torch.Tensor:
    return torch.from_numpy(speech())[None, : 100 * 256]


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
    log_magnitude = ear(recording)[1][..., :100]

    def pairs():
        return log_magnitude, recording

    @torch.no_grad()
    def error() -> float:
        made = vocoder(log_magnitude)[:, : recording.shape[1]]
        return compare_waves(recording, made, ear)[2].item()

    before = error()
    steps = list(train_vocoder(vocoder, ear, pairs, 60, "cpu", 0))
    assert [step for step, _ in steps] == list(range(1, 61))
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
    broken = torch.full((1, 513, 100), torch.nan)
    with pytest.raises(TrainError, match="nan at step 1"):
        next(train_vocoder(vocoder, Mel(), lambda: (broken, recording), 3, "cpu", 0))


@pytest.mark.parametrize(
    "over", [{"vocoder_steps": -1}, {"vocoder_width": 0}, {"vocoder_blocks": 0}]
)
def test_sizes_that_cannot_be_are_reported(over):
    with pytest.raises(KitError, match=next(iter(over))):
        MelCodecConfig(**over)
