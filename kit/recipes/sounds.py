"""Waveforms as pictures and players.

Shapes: L samples.
"""

from torch import Tensor

from kit.audio.spectrogram import Mel
from kit.notebook.plots import Figure, spectrograms
from kit.notebook.result import Sound


def mel_picture(waves: dict[str, Tensor], sample_rate: int, front_end: Mel) -> Figure:
    """Log-mel spectrograms of `waves` (L,) by name, side by side."""
    mels = {name: front_end.clip_mel(wave, sample_rate).numpy() for name, wave in waves.items()}
    return spectrograms(mels, front_end.config.frames_per_s)


def players_of(waves: dict[str, Tensor], sample_rate: int) -> list[Sound]:
    """Players for `waves` (L,) by caption."""
    return [
        Sound(caption=caption, wave=wave.numpy(), sample_rate_hz=sample_rate)
        for caption, wave in waves.items()
    ]
