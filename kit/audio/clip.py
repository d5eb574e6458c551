"""One recording: read it whole and checked, or measure it in one pass.

libsndfile reads truncated files, bare headers and NaN samples in silence, so every read here is
checked against the header and the file's size (container.py). `measure_clip` gives the figures the
ledger judges by. Knows no manifest, no text, no rule: what is too loud or too long is decided
elsewhere.

Shapes: L samples, C channels, F frames of 20 ms.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from kit.base.notes import Note
from kit.streams.file import special_file

if TYPE_CHECKING:
    from soundfile import SoundFile

    from kit.audio.container import Extent

FRAME_S = 0.02
KEPT_SILENCE_S = 0.1  # before and after speech: more of it is neither learnt nor spoken
# Numbers in a table of filters for resampling: 16 MB. Usual rates need a tenth of it, 44,101 Hz to
# 22,050 Hz a thousand times as much.
MOST_TAPS = 2**21
# Codings whose every sample is a 16-bit number: read as such, a tenth of the time of floats.
_WHOLE = frozenset({"PCM_16", "PCM_S8", "PCM_U8", "ULAW", "ALAW"})
LARGEST_SAMPLE = 2.0**31  # times full scale: floats beyond it are no sound, whatever was meant
_FULL_SCALE = {"PCM_S8": 0.98, "PCM_U8": 0.98, "ULAW": 0.97, "ALAW": 0.97}  # 8 bits end below 1


class DatasetError(ValueError):
    """A folder or file that is no usable dataset; the message says what was expected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipMeasure:
    """Figures of one recording; None where it was too long to be decoded. Full scale is 1."""

    rate_hz: int
    channels: int
    subtype: str  # libsndfile's word for the coding: PCM_16, PCM_24, FLOAT, VORBIS ...
    seconds: float
    peak: float | None = None  # of any channel
    rms_db: float | None = None  # of the channels' mean, against full scale; -120 is silence
    dc: float | None = None  # mean of all samples
    clipped: float | None = None  # share of samples at full scale, 0 to 1
    leading_s: float | None = None  # silence before the first frame that is not silent
    trailing_s: float | None = None
    silence_s: float | None = None  # of all silent frames
    snr_db: float | None = None  # None also when it is shorter than ten frames
    digest: str | None = None  # of rate, channels and decoded samples


def read_clip(path: str) -> tuple[np.ndarray, int]:
    """Mono float32 samples (L,) in [-1, 1], the mean of all channels, and the sample rate.

    Float audio that goes beyond full scale is scaled down to it. Raises DatasetError with the path
    for a file that cannot be decoded, holds fewer or more samples than its header says, or samples
    that are no numbers.
    """
    with _opened(path) as (file, told):
        wave = _samples(file, told, path, "float32")
        rate_hz = file.samplerate
    loudest = max(float(np.abs(wave).max()), 1.0)
    return wave.mean(axis=1) / np.float32(loudest), rate_hz


def measure_clip(path: str, decode_s: float = 60.0) -> ClipMeasure:
    """The figures of one recording, decoded once.

    A frame of 20 ms is silent when its RMS lies 40 dB below the 95th percentile of all frames, or
    below -60 dB. The signal-to-noise ratio takes the 10th percentile of the frames' energies for
    the noise and the 90th for speech and noise: too low for clips without any pause, and at most
    100 dB. A clip whose header says more than `decode_s` seconds is not decoded. Raises
    DatasetError as `read_clip` does; its cause is an OSError when the file could not be reached.
    """
    with _opened(path) as (file, told):
        header = {
            "rate_hz": file.samplerate,
            "channels": file.channels,
            "subtype": file.subtype,
            "seconds": told.promised / file.samplerate,
        }
        if header["seconds"] > decode_s:
            return ClipMeasure(**header)
        wave = _samples(file, told, path, "int16" if file.subtype in _WHOLE else "float32")
    scale = 1 / 32768 if wave.dtype == np.int16 else 1.0
    loudest = max(int(wave.max()), -int(wave.min())) if scale < 1 else float(np.abs(wave).max())
    full = _FULL_SCALE.get(header["subtype"], 0.999)
    mono = wave[:, 0].astype(np.float32) if wave.shape[1] == 1 else wave.mean(1, dtype=np.float32)
    mono *= np.float32(scale)
    return ClipMeasure(
        **header,
        peak=round(loudest * scale, 6),
        clipped=_share_above(wave, full / scale) if loudest * scale >= full else 0.0,
        dc=round(float(mono.mean()), 6),
        rms_db=_decibel(float(mono @ mono) / len(mono)),
        **_frame_figures(mono, header["rate_hz"]),
        digest=_digest(wave, header["rate_hz"]),
    )


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple["SoundFile", "Extent"]]:
    """The file, decodable and whole as far as its header tells; errors carry the path."""
    # Imported here: training from codes on disk works without an audio library.
    import soundfile

    from kit.audio.container import open_sound

    try:
        kind = special_file(path)
        if kind:
            raise DatasetError(f"{path} is {kind}, no recording")
        with open_sound(path) as (file, told):
            if told.problem:
                raise DatasetError(f"{path} is {told.problem}")
            yield file, told
    except (soundfile.LibsndfileError, OSError, RuntimeError) as error:
        raise DatasetError(f"{path} cannot be read as audio: {_plain(error)}") from error


def _plain(error: Exception) -> str:
    """What libsndfile or the system says, without the path it repeats."""
    return getattr(error, "error_string", None) or getattr(error, "strerror", None) or str(error)


def _samples(file: "SoundFile", told: "Extent", path: str, dtype: str) -> np.ndarray:
    """All samples (L, C) of an open file: as many as its header tells, and finite."""
    wave = file.read(told.promised + 1, dtype=dtype, always_2d=True)
    if len(wave) == 0:
        raise DatasetError(f"{path} is truncated: a header and no sound, 0 samples are there")
    if len(wave) < told.promised:
        raise DatasetError(
            f"{path} is truncated: {len(wave):,} samples are there of {told.promised:,}"
        )
    if len(wave) > told.promised:
        raise DatasetError(
            f"{path} has a damaged header: it tells of {told.promised:,} samples, and more follow"
        )
    if dtype == "float32":
        loudest = max(float(wave.max()), -float(wave.min()))
        if not math.isfinite(loudest):
            raise DatasetError(f"{path} holds samples that are not finite numbers")
        if loudest > LARGEST_SAMPLE:
            raise DatasetError(f"{path} holds samples of {loudest:.3g} times full scale: no sound")
    return wave


@functools.cache
def resampling(rate_hz: int, wanted_hz: int) -> tuple[int, int]:
    """Whole numbers (a, b), a : b nearly rate_hz : wanted_hz, whose table of filters stays small.

    Warns, once for each rate, where they are not quite that. The error is below 1 / sqrt(MOST_TAPS)
    whatever the rates: 0.07 %, an eightieth of a semitone, which nobody hears.
    """
    exact = Fraction(rate_hz, wanted_hz)
    if exact.numerator * exact.denominator <= MOST_TAPS:
        return exact.numerator, exact.denominator
    near = exact.limit_denominator(max(1, math.isqrt(int(MOST_TAPS / exact))))
    error = abs(float(near / exact) - 1)
    warnings.warn(
        f"Recordings at {rate_hz:,} Hz, an unusual rate, are resampled to {wanted_hz:,} Hz as "
        f"{near.numerator} : {near.denominator}, {error:.1g} off, which nobody hears.",
        category=Note,
        stacklevel=2,
    )
    return near.numerator, near.denominator


def _share_above(wave: np.ndarray, level: float) -> float:
    return round(float(((wave >= level) | (wave <= -level)).mean()), 6)


def _digest(wave: np.ndarray, rate_hz: int) -> str:
    """16 hex digits; SHA-256 has instructions of its own in most processors of today."""
    name = f"{rate_hz} {wave.shape[1]} {wave.dtype}".encode()
    found = hashlib.sha256(name)
    found.update(np.ascontiguousarray(wave).data)
    return found.hexdigest()[:16]


def _frame_figures(mono: np.ndarray, rate_hz: int) -> dict:
    """Silence and signal-to-noise from the energies of frames (F,)."""
    size = max(int(rate_hz * FRAME_S), 1)
    count = len(mono) // size
    if count == 0:
        return {"leading_s": 0.0, "trailing_s": 0.0, "silence_s": 0.0}
    frames = mono[: count * size].reshape(count, size)
    energy = np.einsum("fl,fl->f", frames, frames) / size
    order = np.sort(energy)
    silent = energy < max(1e-6, 1e-4 * float(order[int(0.95 * (count - 1))]))
    loud = np.flatnonzero(~silent)
    first, last = (int(loud[0]), int(loud[-1])) if len(loud) else (count, count - 1)
    return {
        "leading_s": round(first * FRAME_S, 2),
        "trailing_s": round((count - 1 - last) * FRAME_S, 2),
        "silence_s": round(int(silent.sum()) * FRAME_S, 2),
        "snr_db": _snr_db(order) if count >= 10 else None,
    }


def without_edges(wave: np.ndarray, rate_hz: int) -> np.ndarray:
    """A clip (L,) with no more than `KEPT_SILENCE_S` of silence before and after its speech.

    One that is silent throughout stays as it is.
    """
    found = _frame_figures(wave, rate_hz)
    if found["silence_s"] >= len(wave) / rate_hz - FRAME_S:
        return wave
    first, last = (
        round(max(found[name] - KEPT_SILENCE_S, 0.0) * rate_hz)
        for name in ("leading_s", "trailing_s")
    )
    return wave[first : len(wave) - last]


def _snr_db(order: np.ndarray) -> float:
    """From energies in rising order (F,)."""
    noise = float(order[int(0.1 * len(order))])
    speech = float(order[int(0.9 * len(order))]) - noise
    if speech <= 0:
        return 0.0
    return round(min(max(10 * math.log10(speech / max(noise, 1e-12)), 0.0), 100.0), 1)


def _decibel(energy: float) -> float:
    return round(10 * math.log10(max(energy, 1e-12)), 2)
