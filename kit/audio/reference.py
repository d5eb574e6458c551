"""A recording of whoever is to be spoken like: checked, and cut into pieces to listen to.

Any recording will do whose length and loudness let a voice be heard: several channels become one,
any rate becomes the one asked for. Knows no model.

Shapes: L samples, M mels, T frames.
"""

import torch
from torch import Tensor

from kit.audio.spectrogram import Mel
from kit.audio.waveform import load_wave, resampled

LEAST_S = 0.33  # of a piece; what is left over and shorter is left out
SILENT = 0.005  # of full scale: quieter is no voice


class VoiceReferenceError(ValueError):
    """A reference that no voice can be heard in; the message says what to record instead."""


def load_reference(path: str, sample_rate: int, longest_s: float = 30.0) -> Tensor:
    """The first `longest_s` seconds (L,) of the recording at `path`, mono, at `sample_rate`.

    Raises DatasetError for a file that cannot be read, and VoiceReferenceError as
    `require_reference` does.
    """
    wave = load_wave(path, sample_rate)[: round(longest_s * sample_rate)]
    require_reference(wave, sample_rate, str(path))
    return wave


def require_reference(wave: Tensor, sample_rate: int, name: str = "The reference") -> None:
    """Raise VoiceReferenceError for a waveform (L,) that is too short, silent or no mono sound."""
    if wave.ndim != 1:
        raise VoiceReferenceError(
            f"{name} has the shape {tuple(wave.shape)}: give one waveform (samples,), the mean of "
            "its channels."
        )
    seconds = len(wave) / sample_rate
    if seconds < LEAST_S:
        raise VoiceReferenceError(
            f"{name} lasts {seconds:.2f} s: at least {LEAST_S} s are needed, and 6 s or more of "
            "one person speaking are better."
        )
    if not bool(torch.isfinite(wave).all()):
        raise VoiceReferenceError(f"{name} holds samples that are not finite: export it again.")
    peak = float(wave.abs().max())
    if peak < SILENT:
        raise VoiceReferenceError(
            f"{name} is silent (peak {peak:.4f} of full scale): choose a recording with speech in "
            "it, or record it louder."
        )


def reference_mels(
    wave: Tensor, sample_rate: int, front_end: Mel, longest_s: float = 30.0, piece_s: float = 4.0
) -> list[Tensor]:
    """Log-mels (M, T) of the pieces of a reference (L,), as a released XTTS-v2 listens to one.

    Of `longest_s` seconds, `piece_s` at a time; what becomes of the pieces is averaged. The
    defaults are those of the release's configuration (`gpt_cond_len`, `gpt_cond_chunk_len`).
    Raises VoiceReferenceError as `require_reference` does.
    """
    require_reference(wave, sample_rate)
    rate = front_end.config.sample_rate
    wave = resampled(wave, sample_rate, rate)[: round(longest_s * rate)]
    pieces = wave.split(round(piece_s * rate))
    long_enough = [piece for piece in pieces if len(piece) >= LEAST_S * rate]
    return [front_end.clip_mel(piece, rate) for piece in long_enough]


def reference_mel(mel: Tensor, frames: int) -> Tensor:
    """The loudest `frames` in a row of a log-mel (M, T), repeated first when there are too few.

    Not the middle: in one of ten recordings of a person that is a pause, which has no voice in it.
    """
    while mel.shape[-1] < frames:
        mel = torch.cat((mel, mel), dim=-1)
    loudness = mel.mean(dim=0).unfold(0, frames, 1).mean(dim=1)
    start = int(loudness.argmax())
    return mel[:, start : start + frames]
