"""Layers of the small networks (codec, vocoder, recogniser).

Shapes: B batch, C channels, T frames, N codes, Q quantised values per code.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNeXtBlock(nn.Module):
    """Residual block: depthwise convolution over time, then a two-layer MLP (Liu et al. 2022)."""

    reach = 3  # frames of context on either side

    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Conv1d(width, width, 2 * self.reach + 1, padding=self.reach, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T)
        h = self.norm(self.mix(x).mT)
        return x + self.down(F.gelu(self.up(h))).mT


class FSQ(nn.Module):
    """Finite scalar quantisation (Mentzer et al. 2023): real values (B, N, Q) <-> codes (B, N).

    Each of the Q values is rounded to one of a few levels. The codebook is the fixed grid of all
    combinations, so it cannot collapse.
    """

    def __init__(self, levels: tuple):
        super().__init__()
        self.register_buffer("levels", torch.tensor(levels), persistent=False)
        basis = torch.cumprod(torch.tensor((1, *levels[:-1])), 0)
        self.register_buffer("basis", basis, persistent=False)

    def quantize(self, z: Tensor, noise_share: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return values in [-1, 1] with a straight-through gradient, and their codes.

        A random `noise_share` of the rows get uniform noise one level wide instead of rounding,
        whose gradient is exact (Balle et al. 2017; half of the rows: Parker et al. 2024).
        """
        top = (self.levels - 1) / 2
        bounded = (torch.tanh(z) + 1) * top  # 0 .. levels - 1
        rounded = bounded.round()
        value = bounded + (rounded - bounded).detach()
        if noise_share:
            noisy = torch.rand(len(z), 1, 1, device=z.device) < noise_share
            value = torch.where(noisy, bounded + torch.rand_like(bounded) - 0.5, value)
        return value / top - 1, (rounded.long() * self.basis).sum(-1)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the quantised values (B, N, Q) of codes (B, N)."""
        digits = codes[..., None] // self.basis % self.levels
        return digits / ((self.levels - 1) / 2) - 1
