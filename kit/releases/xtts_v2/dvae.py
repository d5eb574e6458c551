"""The log-mels that an XTTS-v2 was trained on, and the discrete VAE that makes its codes of them.

The DVAE and the speaker conditioning differ in `n_fft`. DVAE (Betker 2023; van den Oord et al.
2017): convolutions halve the frames twice, and the nearest entry of a codebook is the code. Layers
are named as in the release's files.

Shapes: B batch, L samples, M mels, T mel frames, N codes (T / 4), C channels, V vocabulary.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.spectrogram import Mel, MelConfig, triangles
from kit.base.config import require, require_within

DVAE_FFT = 1024  # samples
REFERENCE_FFT = 2048
N_MELS = 80
MIN_STAT = 1e-4  # log-mels are in -12 to 10, so a scale beyond these is damage
MAX_STAT = 1e4
RESIDUAL_BLOCKS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class XTTSMelConfig(MelConfig):
    """Settings of the log-mels; equal configurations give equal numbers."""

    kind: str = "xtts"
    win_length: int = 1024  # samples of the window, centred in n_fft
    top_hz: int = 8000  # of the highest mel
    mel_stats: tuple = ()  # each log-mel is divided by its own number of the release

    def __post_init__(self):
        super().__post_init__()
        require_within(self, 1, self.n_fft, "win_length")
        require_within(self, 100, self.sample_rate // 2, "top_hz")
        require_stats(self, self.n_mels)


def require_stats(config, n_mels: int) -> None:
    fix = f"give {n_mels} numbers, one for each mel, none of them 0: the release's own."
    require(len(config.mel_stats) == n_mels, config, "mel_stats", fix)
    for number in config.mel_stats:
        plausible = isinstance(number, int | float) and MIN_STAT <= abs(number) <= MAX_STAT
        require(plausible, config, "mel_stats", fix)


class XTTSMel(Mel):
    """Waveform (B, L) -> log-mel (B, M, T)."""

    config_class = XTTSMelConfig
    in_pieces = True

    def __init__(self, config: XTTSMelConfig):
        super().__init__(config)
        hz = htk_hz(config.n_mels, config.top_hz)
        self.spectrogram.window = nn.Buffer(torch.hann_window(config.win_length))
        self.scale.fb = nn.Buffer(triangles(hz, config.sample_rate, config.n_fft))
        self.mel_stats = nn.Buffer(torch.tensor(config.mel_stats), persistent=False)

    def log_scale(self, magnitude: Tensor) -> Tensor:
        mel = (magnitude.square().mT @ self.scale.fb).mT
        return mel.clamp(min=1e-5).log() / self.mel_stats[:, None]


def htk_hz(n_mels: int, top_hz: float) -> Tensor:
    """Return frequencies (M + 2,), equally spaced on HTK's mel scale, from 0 to `top_hz`."""
    top = 2595 * math.log10(1 + top_hz / 700)
    return 700 * (10 ** (torch.linspace(0, top, n_mels + 2) / 2595) - 1)


class DVAEBlock(nn.Module):
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


class UpsampleBlock(nn.Module):
    def __init__(self, width: int, out: int):
        super().__init__()
        self.conv = nn.Conv1d(width, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T) -> (B, C', 2 T)
        return self.conv(x.repeat_interleave(2, dim=-1))


class Codebook(nn.Module):
    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.embed = nn.Buffer(torch.randn(width, vocab_size))

    def nearest(self, x: Tensor) -> Tensor:
        """Vectors (B, N, C) -> codes (B, N)."""
        squares = x.square().sum(-1, keepdim=True)  # constant, but it rounds as in training
        return (squares - 2 * x @ self.embed + self.embed.square().sum(0)).argmin(-1)

    def forward(self, codes: Tensor) -> Tensor:
        """Codes (B, N) -> vectors (B, N, C)."""
        return F.embedding(codes, self.embed.T)


class DVAE(nn.Module):
    """Log-mel (B, M, T) <-> codes (B, N); the defaults are the sizes of the release."""

    reach = 2 * RESIDUAL_BLOCKS + 1  # codes to either side that a decoded frame depends on

    def __init__(self, vocab_size: int = 1024, width: int = 512, code_width: int = 512):
        super().__init__()
        wide = 2 * width
        self.encoder = nn.Sequential(
            nn.Sequential(nn.Conv1d(N_MELS, width, 3, stride=2, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv1d(width, wide, 3, stride=2, padding=1), nn.ReLU()),
            *(DVAEBlock(wide) for _ in range(RESIDUAL_BLOCKS)),
            nn.Conv1d(wide, code_width, 1),
        )
        self.codebook = Codebook(vocab_size, code_width)
        self.decoder = nn.Sequential(
            nn.Conv1d(code_width, wide, 1),
            *(DVAEBlock(wide) for _ in range(RESIDUAL_BLOCKS)),
            nn.Sequential(UpsampleBlock(wide, wide), nn.ReLU()),
            nn.Sequential(UpsampleBlock(wide, width), nn.ReLU()),
            nn.Conv1d(width, N_MELS, 1),
        )

    def encode(self, mel: Tensor) -> Tensor:
        """Log-mel (B, M, T) -> codes (B, N), one for every four frames, the last may have fewer."""
        return self.codebook.nearest(self.encoder(mel).mT)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes (B, N) -> log-mel (B, M, 4 N)."""
        return self.decoder(self.codebook(codes).mT)
