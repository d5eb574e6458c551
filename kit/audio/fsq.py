"""Finite scalar quantisation (Mentzer et al. 2023): some numbers, each rounded to a few levels.

The grid of all that can be said is the codebook; none is learnt, so none collapses. Knows numbers;
nothing of sound.

Shapes: B batch, N codes, Q numbers a code.
"""

import torch
from torch import Tensor, nn


class FSQ(nn.Module):
    """Finite scalar quantisation: (B, N, Q) real numbers <-> integer codes (B, N)."""

    def __init__(self, levels: tuple):
        super().__init__()
        self.register_buffer("levels", torch.tensor(levels), persistent=False)
        basis = torch.cumprod(torch.tensor((1, *levels[:-1])), 0)
        self.register_buffer("basis", basis, persistent=False)

    def quantize(self, z: Tensor, noise_share: float = 0.0) -> tuple[Tensor, Tensor]:
        """Values in [-1, 1] with a straight-through gradient, and the codes they stand for.

        `noise_share` of the rows, drawn by chance, get noise as wide as a level in place of
        rounding: its gradient is true, where the straight-through one is a guess (Balle et al.
        2017; half of each: Parker et al. 2024).
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
        digits = codes[..., None] // self.basis % self.levels
        return digits / ((self.levels - 1) / 2) - 1
