"""Magnitude spectrogram -> waveform with fast Griffin-Lim (Perraudin et al. 2013).

Every step is local: a slice of an utterance with `context` frames around it gets the same samples
as in the full utterance, which is what makes streaming exact.

Shapes: B batch, T frames, F frequency bins, L samples.
"""

import math

import torch
from torch import Tensor, nn

NOISE_FRAMES = 128  # the random initial phase repeats after this many frames, inaudibly
MOMENTUM = 0.99


def overlap_add(frames: Tensor, hop: int) -> Tensor:
    """Sum frames (B, T, n), each `hop` samples after the last, to (B, (T - 1) * hop + n)."""
    parts = frames.unflatten(-1, (-1, hop)).unbind(2)  # n / hop times (B, T, hop)
    total = frames.new_zeros(len(frames), frames.shape[1] + len(parts) - 1, hop)
    for shift, part in enumerate(parts):
        total[:, shift : shift + frames.shape[1]] += part
    return total.flatten(1)


def windowed_sum(spectrum: Tensor, window: Tensor, hop: int) -> Tensor:
    """Inverse-transform a spectrum (B, T, F), window and overlap-add its frames."""
    return overlap_add(torch.fft.irfft(spectrum, len(window)).mul_(window), hop)


def window_envelope(window: Tensor, frames: int, hop: int) -> Tensor:
    """Return the sum of squared windows (1, L) that a `windowed_sum` must be divided by."""
    square = window.square().expand(1, frames, -1)
    return overlap_add(square, hop).clamp(min=1e-8)  # a Hann window starts at 0


def trim_centering(wave: Tensor, window: Tensor, frames: int, hop: int) -> Tensor:
    """Cut the padding of centred frames from a `windowed_sum`: (B, frames * hop)."""
    return wave[:, len(window) // 2 :][:, : frames * hop]


class GriffinLim(nn.Module):
    """Magnitude (B, F, T) -> waveform (B, T * hop); `n_fft` must be a multiple of `hop`."""

    def __init__(self, n_fft: int, hop: int, iters: int):
        super().__init__()
        self.n_fft = n_fft
        self.hop = hop
        self.iters = iters
        generator = torch.Generator().manual_seed(0)
        turn = torch.rand(NOISE_FRAMES, n_fft // 2 + 1, generator=generator) * 2 * math.pi
        phase = torch.polar(torch.ones_like(turn), turn)
        self.register_buffer("start", phase, persistent=False)  # (NOISE_FRAMES, F)
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)

    @property
    def context(self) -> int:
        """Frames on either side that can influence a frame's samples.

        Each iteration spreads the influence by the frames that a window overlaps.
        """
        overlap = self.n_fft // self.hop
        return (overlap - 1) * self.iters + math.ceil(overlap / 2)

    def forward(self, magnitude: Tensor, first: int = 0) -> Tensor:
        """Reconstruct the waveform; `first` is the index of the first frame in its utterance.

        The initial phase of a frame is noise that depends only on its index in the utterance.
        """
        magnitude, frames = magnitude.mT, magnitude.shape[-1]
        envelope = window_envelope(self.window, frames, self.hop)
        index = torch.arange(first, first + frames, device=self.window.device)
        spectrum = magnitude * self.start[index % NOISE_FRAMES]
        previous = torch.zeros_like(spectrum)
        magnitude = magnitude.to(spectrum.dtype)
        for _ in range(self.iters):  # in place: a fifth less time
            wave = windowed_sum(spectrum, self.window, self.hop).div_(envelope)
            rebuilt = torch.fft.rfft(wave.unfold(-1, self.n_fft, self.hop) * self.window)
            # rebuilt + MOMENTUM * (rebuilt - previous), up to a factor that does not change phases.
            angles = torch.sub(rebuilt, previous, alpha=MOMENTUM / (1 + MOMENTUM))
            spectrum = angles.sgn_().mul_(magnitude)
            previous = rebuilt
        wave = windowed_sum(spectrum, self.window, self.hop).div_(envelope)
        return trim_centering(wave, self.window, frames, self.hop)
