"""Log-mels <-> codes: the discrete VAE that gives an XTTS-v2 its codes (Betker 2023).

Two convolutions halve the frames each, residual blocks follow, and the nearest entry of a codebook
is the code (van den Oord et al. 2017). The way back to log-mels was trained with it; a release
speaks from its GPT's states instead (xtts_vocoder.py). Layers are named as in a release's files.
Knows no waveform.

Shapes: B batch, M mels, T mel frames, N codes (a quarter of T), C channels, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RESIDUAL_BLOCKS = 3
FRAMES_PER_CODE = 4


class DVAEBlock(nn.Module):
    """Residual block of three convolutions over time."""

    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T)
        return x + self.net(x)


class TwiceAsLong(nn.Module):
    """Every frame twice, then a convolution."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.conv = nn.Conv1d(width, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T) -> (B, C', 2 T)
        return self.conv(x.repeat_interleave(2, dim=-1))


class Codebook(nn.Module):
    """V vectors; the code of any other is the number of the nearest."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.embed = nn.Buffer(torch.randn(width, vocab_size))

    def nearest(self, x: Tensor) -> Tensor:
        """Vectors (B, N, C) -> codes (B, N)."""
        squares = x.square().sum(-1, keepdim=True)  # alike for all, and rounded as in training
        return (squares - 2 * x @ self.embed + self.embed.square().sum(0)).argmin(-1)

    def forward(self, codes: Tensor) -> Tensor:
        """Codes (B, N) -> vectors (B, N, C)."""
        return F.embedding(codes, self.embed.T)


class DVAE(nn.Module):
    """Log-mel (B, M, T) <-> codes (B, N); the defaults are the sizes of the release."""

    reach = 2 * RESIDUAL_BLOCKS + 1  # codes to either side that a decoded frame depends on

    def __init__(
        self, vocab_size: int = 1024, width: int = 512, code_width: int = 512, n_mels: int = 80
    ):
        super().__init__()
        wide = 2 * width
        self.encoder = nn.Sequential(
            nn.Sequential(nn.Conv1d(n_mels, width, 3, stride=2, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv1d(width, wide, 3, stride=2, padding=1), nn.ReLU()),
            *(DVAEBlock(wide) for _ in range(RESIDUAL_BLOCKS)),
            nn.Conv1d(wide, code_width, 1),
        )
        self.codebook = Codebook(vocab_size, code_width)
        self.decoder = nn.Sequential(
            nn.Conv1d(code_width, wide, 1),
            *(DVAEBlock(wide) for _ in range(RESIDUAL_BLOCKS)),
            nn.Sequential(TwiceAsLong(wide, wide), nn.ReLU()),
            nn.Sequential(TwiceAsLong(wide, width), nn.ReLU()),
            nn.Conv1d(width, n_mels, 1),
        )

    def encode(self, mel: Tensor) -> Tensor:
        """Log-mel (B, M, T) -> codes (B, N), one for every four frames begun."""
        return self.codebook.nearest(self.encoder(mel).mT)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes (B, N) -> log-mel (B, M, 4 N)."""
        return self.decoder(self.codebook(codes).mT)
