"""Log-magnitudes -> waveform by a network with an inverse Fourier head (Vocos: Siuzdak 2023).

It predicts each bin's phase and a correction of its magnitude, then takes one inverse transform: no
upsampling layers, and a third of Griffin-Lim's context. It learns from multi-resolution
spectrograms, first by L1 loss, then against critics (adversarial.py).

Shapes: B batch, F frequency bins, T frames, C channels, L samples.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.adversarial import Comparison, train_adversarial, train_generator
from kit.audio.griffin_lim import trim_centering, window_envelope, windowed_sum
from kit.audio.layers import ConvNeXtBlock
from kit.audio.spectrogram import Mel, squared_magnitude

KERNEL = 7  # frames
MAX_LOG_MAGNITUDE = 8.0  # so that no spectrum overflows
# Window and hop of the spectrograms it learns from, in samples: short enough for the pulses of a
# voice, long enough for its harmonics. Critics look at the first three.
RESOLUTIONS = ((256, 64), (512, 128), (1024, 256), (2048, 512))
CRITICS = 3
FLOOR = 1e-4  # of squared magnitudes: below it everything is silence
# Share of the steps trained by L1 loss alone: critics help only once phases fit.
L1_SHARE = 1 / 3

# Log-magnitudes (B, F, T) and the recordings (B, L) they belong to, of T frames or slightly less.
Pair = tuple[Tensor, Tensor]


class Vocoder(nn.Module):
    """Log-magnitude (B, F, T) -> waveform (B, T * hop); `n_fft` must be a multiple of `hop`.

    Frames are centred, under a Hann window of `n_fft` samples.
    """

    def __init__(self, width: int, blocks: int, n_fft: int, hop: int):
        super().__init__()
        bins = n_fft // 2 + 1
        self.n_fft = n_fft
        self.hop = hop
        self.from_magnitude = nn.Conv1d(bins, width, KERNEL, padding=KERNEL // 2)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(width) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.to_more = nn.Linear(width, bins)  # correction of the log-magnitude
        self.to_phase = nn.Linear(width, bins)
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        nn.init.zeros_(self.to_more.weight)  # magnitudes start out unchanged
        nn.init.zeros_(self.to_more.bias)

    @property
    def context(self) -> int:
        """Frames on either side that can influence a frame's samples."""
        frames = KERNEL // 2 + ConvNeXtBlock.reach * len(self.blocks)
        return frames + math.ceil(self.n_fft / self.hop / 2)

    def polar(self, log_magnitude: Tensor) -> tuple[Tensor, Tensor]:
        """Log-magnitude (B, F, T) -> the spectrum's magnitude and phase, (B, T, F) each."""
        h = self.from_magnitude((log_magnitude + 3) / 3)  # roughly zero mean, unit variance
        h = self.norm(self.blocks(h).mT)
        log_magnitude = log_magnitude.mT + self.to_more(h).float()
        return log_magnitude.clamp(max=MAX_LOG_MAGNITUDE).exp(), self.to_phase(h).float()

    def forward(self, log_magnitude: Tensor) -> Tensor:
        spectrum = torch.polar(*self.polar(log_magnitude))  # (B, T, F)
        frames = spectrum.shape[1]
        envelope = window_envelope(self.window, frames, self.hop)
        wave = windowed_sum(spectrum, self.window, self.hop) / envelope
        return trim_centering(wave, self.window, frames, self.hop)


def train_vocoder(
    vocoder: Vocoder, mel: Mel, pairs: Callable[[], Pair], steps: int, device: str, seed: int
) -> Iterator[tuple[int, float]]:
    """Train from scratch for `steps`, yielding (step, L1 loss).

    `pairs()` draws a batch. Raises TrainError when the loss is not finite.
    """
    l1_steps = math.ceil(L1_SHARE * steps)
    parameters = list(vocoder.parameters())
    yield from train_generator(parameters, comparison(vocoder, mel, pairs), l1_steps)
    for step, error in finetune_vocoder(vocoder, mel, pairs, steps - l1_steps, device, seed):
        yield l1_steps + step, error


def finetune_vocoder(
    vocoder: Vocoder, mel: Mel, pairs: Callable[[], Pair], steps: int, device: str, seed: int
) -> Iterator[tuple[int, float]]:
    """Continue training, against critics from the first step; yields (step, L1 loss)."""
    compare = comparison(vocoder, mel, pairs)
    parameters = list(vocoder.parameters())
    yield from train_adversarial(parameters, compare, steps, device, seed, alternate=True)


def comparison(vocoder: Vocoder, mel: Mel, pairs: Callable[[], Pair]) -> Callable[[], Comparison]:
    def compare() -> Comparison:
        log_magnitude, wave = pairs()
        return compare_waves(wave, vocoder(log_magnitude)[:, : wave.shape[1]], mel)

    return compare


def compare_waves(real: Tensor, generated: Tensor, mel: Mel) -> Comparison:
    """Return log-spectrograms of both waveforms (B, L) for the critics, and the L1 loss.

    The loss is that of all resolutions, each bin alike, plus that of the log-mels.
    """
    wanted, made = [
        [log_spectrogram(wave, *size) for size in RESOLUTIONS] for wave in (real, generated)
    ]
    error = sum(F.l1_loss(a, b) for a, b in zip(made, wanted)) / len(RESOLUTIONS)
    wanted_mel, made_mel = [
        mel.log_scale(log_spectrogram(wave, mel.n_fft, mel.hop).exp()) for wave in (real, generated)
    ]
    return wanted[:CRITICS], made[:CRITICS], error + F.l1_loss(made_mel, wanted_mel)


def log_spectrogram(wave: Tensor, size: int, hop: int) -> Tensor:
    """Waveform (B, L) -> log-magnitude (B, F, T) with windows of `size` samples."""
    window = torch.hann_window(size, device=wave.device)
    spectrum = torch.stft(wave, size, hop, size, window, return_complex=True)
    return squared_magnitude(spectrum).clamp(min=FLOOR).log() / 2
