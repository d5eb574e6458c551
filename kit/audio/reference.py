"""Recordings of the voice to speak with: checked, and turned into log-mels.

Shapes: L samples, M mels, T frames.
"""

import math
import warnings

import torch
from torch import Tensor

from kit.audio.clip import load_wave, measure_clip, resampled
from kit.audio.spectrogram import Mel
from kit.base.errors import Note, SpeechError

# As XTTS-v2 takes them: its `gpt_cond_len` and `gpt_cond_chunk_len`.
LONGEST_S = 30.0
PIECE_S = 4.0
MIN_PIECE_S = 0.33  # shorter remainders are dropped
MIN_PEAK = 0.005  # of full scale


def load_reference(path: str, sample_rate: int) -> Tensor:
    """Return the first `LONGEST_S` seconds (L,) of a recording, mono, at `sample_rate`.

    Raises DatasetError for a file that cannot be read, and SpeechError as `require_reference` does.
    """
    if measure_clip(path, decode_s=math.inf).cancels:
        warnings.warn(
            f"The channels of {path} cancel each other: the loudest one is taken.",
            category=Note,
            stacklevel=2,
        )
    wave = load_wave(path, sample_rate)[: round(LONGEST_S * sample_rate)]
    require_reference(wave, sample_rate, str(path))
    return wave


def require_reference(wave: Tensor, sample_rate: int, name: str = "The reference") -> None:
    """Raise SpeechError for a waveform that is too short, silent, not mono or not finite."""
    if wave.ndim != 1:
        raise SpeechError(
            f"{name} has the shape {tuple(wave.shape)}: give one waveform (samples,), the mean of "
            "its channels."
        )
    seconds = len(wave) / sample_rate
    if seconds < MIN_PIECE_S:
        raise SpeechError(
            f"{name} lasts {seconds:.2f} s: at least {MIN_PIECE_S} s are needed, and 6 s or more "
            "of one person speaking are better."
        )
    if not bool(torch.isfinite(wave).all()):
        raise SpeechError(f"{name} has samples that are not finite: export it again.")
    peak = float(wave.abs().max())
    if peak < MIN_PEAK:
        raise SpeechError(
            f"{name} is silent (peak {peak:.4f} of full scale): choose a recording with speech in "
            "it, or record it louder."
        )


def reference_mels(wave: Tensor, sample_rate: int, front_end: Mel) -> list[Tensor]:
    """Return log-mels (M, T) of pieces of a reference (L,); raises as `require_reference` does."""
    require_reference(wave, sample_rate)
    rate = front_end.config.sample_rate
    wave = resampled(wave, sample_rate, rate)[: round(LONGEST_S * rate)]
    pieces = wave.split(round(PIECE_S * rate))
    return [front_end.clip_mel(piece, rate) for piece in pieces if len(piece) >= MIN_PIECE_S * rate]


def reference_mel(mel: Tensor, frames: int) -> Tensor:
    """Return the loudest `frames` in a row of a log-mel (M, T), which is repeated if shorter."""
    while mel.shape[-1] < frames:
        mel = torch.cat((mel, mel), dim=-1)
    loudness = mel.mean(dim=0).unfold(0, frames, 1).mean(dim=1)
    start = int(loudness.argmax())
    return mel[:, start : start + frames]
