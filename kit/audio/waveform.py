"""Recordings as waveforms at the rate that is asked for.

What reads files and resamples is loaded when it is first needed: a voice speaks without it.

Shapes: L samples.
"""

import torch
from torch import Tensor


def load_wave(path: str, sample_rate: int) -> Tensor:
    """Mono waveform (L,) at `sample_rate`. Raises DatasetError as `read_clip` does."""
    from kit.audio.clip import read_clip

    wave, rate = read_clip(path)
    return resampled(torch.from_numpy(wave), rate, sample_rate)


def resampled(wave: Tensor, rate: int, wanted: int) -> Tensor:
    """`wave` (L,) of `rate` Hz at `wanted` Hz."""
    if rate == wanted:
        return wave
    from torchaudio.functional import resample

    from kit.audio.clip import resampling

    return resample(wave, *resampling(rate, wanted))
