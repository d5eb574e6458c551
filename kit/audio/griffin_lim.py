"""A phase for magnitudes: fast Griffin-Lim (Perraudin et al. 2013).

Back and forth between spectrum and sound, keeping the wanted magnitudes and the phases that came
out. Everything in it is local: a part of an utterance, with `context` frames around it, gets the
sound it has in the whole. Knows frames and samples; nothing of codes or mels.

Shapes: B batch, T frames, F frequency bins, L samples.
"""

import math

import torch
from torch import Tensor, nn

NOISE_FRAMES = 128  # the starting phase repeats after so many frames, too late to be heard
MOMENTUM = 0.99


def overlap_add(frames: Tensor, hop: int) -> Tensor:
    """Frames (B, T, n), each `hop` samples after the last -> their sum (B, (T - 1) * hop + n)."""
    parts = frames.unflatten(-1, (-1, hop)).unbind(2)  # n / hop times (B, T, hop)
    total = frames.new_zeros(len(frames), frames.shape[1] + len(parts) - 1, hop)
    for late, part in enumerate(parts):
        total[:, late : late + frames.shape[1]] += part
    return total.flatten(1)


def windowed_sum(spectrum: Tensor, window: Tensor, hop: int) -> Tensor:
    """Spectrum (B, T, F) -> its windowed frames, added up (B, (T - 1) * hop + n_fft)."""
    return overlap_add(torch.fft.irfft(spectrum, len(window)).mul_(window), hop)


def window_weight(window: Tensor, frames: int, hop: int) -> Tensor:
    """What each sample of a `windowed_sum` of so many frames is to be divided by (1, ...)."""
    square = window.square().expand(1, frames, -1)
    return overlap_add(square, hop).clamp(min=1e-8)  # a window begins with 0


def uncentred(wave: Tensor, window: Tensor, frames: int, hop: int) -> Tensor:
    """The samples (B, frames * hop) of a `windowed_sum` whose frames are centred."""
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
        """Frames to either side that a frame's samples can depend on, and none further.

        A frame hears those its window overlaps, one more ring of them in every iteration.
        """
        overlap = self.n_fft // self.hop
        return (overlap - 1) * self.iters + math.ceil(overlap / 2)

    def forward(self, magnitude: Tensor, first: int = 0) -> Tensor:
        """The sound of frames `first`, `first` + 1 ... of an utterance.

        Their phase starts from noise that follows from a frame's number alone.
        """
        magnitude, frames = magnitude.mT, magnitude.shape[-1]
        weight = window_weight(self.window, frames, self.hop)
        number = torch.arange(first, first + frames, device=self.window.device)
        spectrum = magnitude * self.start[number % NOISE_FRAMES]
        before = torch.zeros_like(spectrum)
        magnitude = magnitude.to(spectrum.dtype)
        for _ in range(self.iters):  # in place: a fifth less time
            wave = windowed_sum(spectrum, self.window, self.hop).div_(weight)
            rebuilt = torch.fft.rfft(wave.unfold(-1, self.n_fft, self.hop) * self.window)
            # rebuilt + MOMENTUM * (rebuilt - before), but for a factor that turns no phase.
            angles = torch.sub(rebuilt, before, alpha=MOMENTUM / (1 + MOMENTUM))
            spectrum = angles.sgn_().mul_(magnitude)
            before = rebuilt
        wave = windowed_sum(spectrum, self.window, self.hop).div_(weight)
        return uncentred(wave, self.window, frames, self.hop)
