"""Waveform -> log-mel and log-magnitude spectrogram, by torch alone.

A voice is spoken from these long after it was trained, where torchaudio may not be: its last
release pairs with one release of torch. Knows nothing of codecs.

Shapes: B batch, L samples, T frames, F frequency bins, M mels.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Slaney's scale: 15 mels to 1000 Hz in equal steps, from there 27 to each factor of 6.4.
LINEAR_HZ = 1000.0
LINEAR_MELS = 15.0
LOG_STEP = math.log(6.4) / 27


class Mel(nn.Module):
    """Waveform (B, L) -> log-mel (B, M, T) and log-magnitude (B, F, T), natural logarithm.

    Frames are centred, `hop_length` samples apart, under a Hann window of `n_fft`.
    """

    def __init__(self, sample_rate: int, n_fft: int, hop_length: int, n_mels: int):
        super().__init__()
        self.n_fft = n_fft
        self.hop = hop_length
        self.spectrogram = nn.Module()
        self.scale = nn.Module()  # named as in files of codecs
        self.spectrogram.window = nn.Buffer(torch.hann_window(n_fft))
        self.scale.fb = nn.Buffer(filters(sample_rate, n_fft, n_mels))

    def forward(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        magnitude = self.magnitude(self.long_enough(wave))
        return self.log_scale(magnitude), magnitude.clamp(min=1e-2).log()

    def log_mel(self, wave: Tensor) -> Tensor:
        """Waveform (B, L) -> log-mel (B, M, T) alone, a row at a time: one stays in the caches."""
        rows = self.long_enough(wave).split(1)
        return torch.cat([self.log_scale(self.magnitude(row)) for row in rows])

    def long_enough(self, wave: Tensor) -> Tensor:
        least = max(4 * self.hop, self.n_fft // 2 + 1)  # what reflect padding needs
        return F.pad(wave, (0, max(0, least - wave.shape[-1])))

    def log_scale(self, magnitude: Tensor) -> Tensor:
        """Magnitudes (B, F, T) -> log-mel (B, M, T)."""
        return (magnitude.mT @ self.scale.fb).mT.clamp(min=5e-4).log()

    def magnitude(self, wave: Tensor) -> Tensor:
        """Waveform (B, L) -> magnitudes (B, F, T)."""
        window = self.spectrogram.window
        return torch.stft(wave, self.n_fft, self.hop, window=window, return_complex=True).abs()


def filters(sample_rate: int, n_fft: int, n_mels: int) -> Tensor:
    """Triangles (F, M), equally spaced on Slaney's scale and of equal area (Slaney 1998)."""
    top = LINEAR_MELS + math.log(sample_rate / 2 / LINEAR_HZ) / LOG_STEP
    mels = torch.linspace(0, top, n_mels + 2)
    logarithmic = LINEAR_HZ * torch.exp(LOG_STEP * (mels - LINEAR_MELS))
    hz = torch.where(mels < LINEAR_MELS, mels * (LINEAR_HZ / LINEAR_MELS), logarithmic)
    left = hz[:-2]
    middle = hz[1:-1]
    right = hz[2:]
    bins = torch.linspace(0, sample_rate / 2, n_fft // 2 + 1)[:, None]
    up = (bins - left) / (middle - left)
    down = (right - bins) / (right - middle)
    return torch.minimum(up, down).clamp(min=0) * 2 / (right - left)
