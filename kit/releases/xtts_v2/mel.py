"""The log-mels that an XTTS-v2 was trained on: what its DVAE and its conditioning listen to.

Frames of power under a Hann window of 1024 samples, 80 mels to 8 kHz on the logarithmic scale of
O'Shaughnessy (1987), as HTK has it, each divided by a number of its own (`mel_stats`). The two
differ in the length of the transform alone.

Shapes: T frames, F frequency bins, M mels.
"""

import dataclasses
import math

import torch
from torch import Tensor, nn

from kit.audio.spectrogram import Mel, MelConfig, triangles
from kit.base.config import require, require_within

DVAE_FFT = 1024  # samples
REFERENCE_FFT = 2048
N_MELS = 80
# A log-mel lies between -12 and 10: by less or more than these nobody has divided one.
LEAST_STAT = 1e-4
MOST_STAT = 1e4


@dataclasses.dataclass(frozen=True, kw_only=True)
class XTTSMelConfig(MelConfig):
    """All that such a log-mel is made with: two of one configuration are the same numbers."""

    kind: str = "xtts"
    win_length: int = 1024  # samples of the window, in the middle of n_fft
    top_hz: int = 8000  # of the highest mel
    mel_stats: tuple = ()  # what each of the mels is divided by: a release's own numbers

    def __post_init__(self):
        super().__post_init__()
        require_within(self, 1, self.n_fft, "win_length")
        require_within(self, 100, self.sample_rate // 2, "top_hz")
        require_stats(self, self.n_mels)


def require_stats(config, n_mels: int) -> None:
    """Raise KitError unless `config.mel_stats` are numbers that so many mels can have."""
    fix = f"give {n_mels} numbers, one for each mel, none of them 0: the release's own."
    require(len(config.mel_stats) == n_mels, config, "mel_stats", fix)
    for number in config.mel_stats:
        divides = isinstance(number, int | float) and LEAST_STAT <= abs(number) <= MOST_STAT
        require(divides, config, "mel_stats", fix)


class XTTSMel(Mel):
    """Waveform (B, L) -> log-mel (B, M, T), as `Mel` does."""

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
    """Frequencies (M + 2,), equally spaced on HTK's scale of mels, from 0 to `top_hz`."""
    top = 2595 * math.log10(1 + top_hz / 700)
    return 700 * (10 ** (torch.linspace(0, top, n_mels + 2) / 2595) - 1)
