"""The block that the small networks are made of: codec and recogniser.

Shapes: B batch, C channels, T steps of time.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Residual block after ConvNeXt: depthwise convolution over time, then a two-layer MLP."""

    reach = 3  # steps of time to either side

    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Conv1d(width, width, 2 * self.reach + 1, padding=self.reach, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T)
        h = self.norm(self.mix(x).mT)
        return x + self.down(F.gelu(self.up(h))).mT
