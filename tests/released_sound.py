"""Sound for the encoders of an XTTS-v2: syllables and pauses, the same every time."""

import math

import torch
from torch import Tensor

from kit.extras.xtts_v2.codec import DVAE_FFT, REFERENCE_FFT, XTTSMel, XTTSMelConfig, mel_stats_of


def spoken(samples: int, seed: int = 0, rate: int = 22_050) -> Tensor:
    """A voice of harmonics (L,) that rises and falls four times a second, over a little noise."""
    random = torch.Generator().manual_seed(seed)
    t = torch.arange(samples) / rate
    pitch = 2 * math.pi * (110 + 40 * seed) * (t + 0.01 * torch.sin(5 * t))
    voice = sum(torch.sin(k * pitch) / k for k in range(1, 20))
    loudness = (0.5 + 0.5 * torch.sin(2 * math.pi * 4 * t)).square()
    return 0.2 * loudness * voice + 0.003 * torch.randn(samples, generator=random)


def xtts_mels(sound: dict[str, Tensor]) -> list[XTTSMel]:
    """The log-mels of a release's DVAE, and those of its speaker conditioning."""
    stats = mel_stats_of(sound)
    sizes = (DVAE_FFT, REFERENCE_FFT)
    return [XTTSMel(XTTSMelConfig(n_fft=size, mel_stats=stats)) for size in sizes]
