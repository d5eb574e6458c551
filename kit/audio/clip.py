"""One recording: read it with every check, or measure it for the data report.

Libraries that read and resample are imported when they are first needed: a voice speaks without
them.

Shapes: L samples, C channels, F frames of 20 ms.
"""

import dataclasses
import hashlib
import math
from fractions import Fraction
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from kit.base.errors import DatasetError, KitError
from kit.base.formatting import shorten

if TYPE_CHECKING:
    from soundfile import SoundFile
    from torch import Tensor

FRAME_S = 0.02
KEPT_SILENCE_S = 0.1  # before and after speech; more is neither trained on nor generated
MAX_FILTER_TAPS = 2**21  # of resampling, 16 MB: 44,101 Hz to 22,050 Hz needs a thousand times it
MAX_CLIP_S = 3600.0
MAX_SAMPLES = 2**28  # of all channels of a clip, 1 GiB
MAX_SAMPLE = 2.0**31  # times full scale: larger floats are garbage
# Channels cancel if their mean has less than this of the power that unrelated channels would leave:
# two of equal level from a correlation of -0.75 on.
CANCELLING = 0.25
# Correlation of the loudness of two channels below which they hold different sound.
SAME_LEVELS = 0.2
MIN_FRAMES = 50  # to compare it
# Read as 16-bit integers, which they are, in a tenth of the time of floats.
_INT16_SUBTYPES = frozenset({"PCM_16", "PCM_S8", "PCM_U8", "ULAW", "ALAW"})
# Full scale of 8-bit codings, which end below 1.
_FULL_SCALE = {"PCM_S8": 0.98, "PCM_U8": 0.98, "ULAW": 0.97, "ALAW": 0.97}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipMeasure:
    """Figures of one recording; None if it was too long to decode. Full scale is 1."""

    rate_hz: int
    channels: int
    subtype: str  # soundfile's name of the coding: PCM_16, VORBIS ...; FLOAT of what PyAV decodes
    seconds: float
    peak: float | None = None  # of any channel
    mono_peak: float | None = None  # of `to_mono`, about its mean
    cancels: bool = False  # whether the channels do, so that one of them is taken
    differs: bool = False  # whether two channels are loud at different times
    rms_db: float | None = None  # of `to_mono`, relative to full scale; -120 is silence
    dc: float | None = None  # mean of `to_mono`
    clipped: float | None = None  # share of samples at full scale, 0 to 1
    leading_s: float | None = None  # silence before the first frame that is not silent
    trailing_s: float | None = None
    silence_s: float | None = None  # of all silent frames
    gap_s: float | None = None  # the longest silence between two that are not silent
    snr_db: float | None = None  # also None for fewer than ten frames
    digest: str | None = None  # of rate, channels and decoded samples: SHA-256, 16 hex digits


def load_wave(path: str, sample_rate: int) -> "Tensor":
    """Return the mono waveform (L,) of a recording at `sample_rate`; raises as `read_clip` does."""
    import torch

    wave, rate = read_clip(path)
    return resampled(torch.from_numpy(wave), rate, sample_rate)


def load_speech(path: str, sample_rate: int) -> "Tensor":
    """The recording (L,) at `path`, without the silence around its speech."""
    import torch

    # With half a second before every sentence, an unsure voice begins with silence and stays there.
    return torch.from_numpy(trim_silence(load_wave(path, sample_rate).numpy(), sample_rate))


def resampled(wave: "Tensor", rate: int, new_rate: int) -> "Tensor":
    """Resample a waveform (L,) with torchaudio; raises as `import_torchaudio` does."""
    if rate == new_rate:
        return wave
    return import_torchaudio().functional.resample(wave, *resampling_ratio(rate, new_rate))


def import_torchaudio() -> ModuleType:
    """Return the module torchaudio. Raises KitError if it is missing or this torch refuses it."""
    import torch

    try:
        import torchaudio
        import torchaudio.compliance.kaldi
        import torchaudio.functional
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        major, minor = map(int, torch.__version__.split(".")[:2])
        # One before 2.11 needs the torch of its own number, 2.11 any later torch of the same CUDA.
        major, minor = min((major, minor), (2, 11))
        build = "cu" + torch.version.cuda.replace(".", "") if torch.version.cuda else "cpu"
        raise KitError(
            f"torchaudio cannot be used with torch {torch.__version__} for {build} "
            f"({shorten(error)}). Install one that fits: pip install --force-reinstall --no-deps "
            f'"torchaudio=={major}.{minor}.*" --index-url https://download.pytorch.org/whl/{build}'
        ) from error
    return torchaudio


def read_clip(path: str) -> tuple[np.ndarray, int]:
    """Return mono samples (L,), scaled down to [-1, 1] if beyond, and the rate; DatasetError."""
    from kit.audio.container import open_audio

    with open_audio(path, MAX_CLIP_S) as (file, seconds):
        wave = _read_samples(file, seconds, path, "float32")
        rate_hz = file.samplerate
    peak = max(float(np.abs(wave).max()), 1.0)
    return to_mono(wave) / np.float32(peak), rate_hz


def to_mono(wave: np.ndarray) -> np.ndarray:
    """Return the mean (L,) of the channels of `wave` (L, C), or the loudest one if they cancel."""
    channel = 0 if wave.shape[1] == 1 else cancelling_channel(wave)
    return wave.mean(axis=1) if channel is None else wave[:, channel]


def cancelling_channel(wave: np.ndarray) -> int | None:
    """Return the loudest channel of samples (L, C) of which one is the other inverted, or None."""
    channels = wave.shape[1]
    if channels == 1 or len(wave) == 0:
        return None
    powers = wave.var(axis=0, dtype=np.float64)
    mean_power = wave.mean(axis=1, dtype=np.float64).var()
    return int(powers.argmax()) if mean_power < CANCELLING / channels * powers.mean() else None


def channels_differ(wave: np.ndarray, rate_hz: int) -> bool:
    """Whether the two channels of samples (L, 2) are loud at different times, as two people are.

    A much softer channel is noise, and not counted.
    """
    size = max(int(rate_hz * FRAME_S), 1)
    count = len(wave) // size
    if wave.shape[1] != 2 or count < MIN_FRAMES:
        return False
    frames = wave[: count * size].astype(np.float32).reshape(count, size, 2)
    levels = np.sqrt(np.einsum("flc,flc->cf", frames, frames))
    if not levels.std(axis=1).all() or levels.mean(axis=1).min() < levels.mean(axis=1).max() / 10:
        return False
    return bool(np.corrcoef(levels)[0, 1] < SAME_LEVELS)


def measure_clip(path: str, decode_s: float = 60.0) -> ClipMeasure:
    """Decode a recording once and return its figures, of one longer than `decode_s` the header's.

    Raises DatasetError as `read_clip` does; its cause is an OSError if it could not be opened.
    """
    from kit.audio.container import open_audio

    with open_audio(path, min(decode_s, MAX_CLIP_S)) as (file, seconds):
        header = {
            "rate_hz": file.samplerate,
            "channels": file.channels,
            "subtype": file.subtype,
            "seconds": seconds,
        }
        if seconds > decode_s:
            return ClipMeasure(**header)
        dtype = "int16" if file.subtype in _INT16_SUBTYPES else "float32"
        wave = _read_samples(file, seconds, path, dtype)
    scale = 1 / 32768 if wave.dtype == np.int16 else 1.0
    peak = max(float(wave.max()), -float(wave.min()))
    level = _FULL_SCALE.get(header["subtype"], 0.999) / scale
    clipped = ((wave >= level) | (wave <= -level)).mean() if peak >= level else 0.0
    mono = to_mono(wave).astype(np.float32) * np.float32(scale)
    digest = hashlib.sha256(f"{header['rate_hz']} {wave.shape[1]} {wave.dtype}".encode())
    digest.update(np.ascontiguousarray(wave).data)
    energy = float(mono @ mono) / len(mono)
    dc = float(mono.mean())
    return ClipMeasure(
        **header,
        peak=round(peak * scale, 6),
        mono_peak=round(max(float(mono.max()) - dc, dc - float(mono.min())), 6),
        cancels=cancelling_channel(wave) is not None,
        differs=channels_differ(wave, header["rate_hz"]),
        clipped=round(float(clipped), 6),
        dc=round(dc, 6),
        rms_db=round(10 * math.log10(max(energy, 1e-12)), 2),
        **_frame_figures(mono, header["rate_hz"]),
        digest=digest.hexdigest()[:16],
    )


def _read_samples(file: "SoundFile", seconds: float, path: str, dtype: str) -> np.ndarray:
    """Read all samples (L, C), which must be finite."""
    import soundfile

    if seconds > MAX_CLIP_S or seconds * file.samplerate * file.channels > MAX_SAMPLES:
        raise DatasetError(
            f"{path} is too long to be read at once ({seconds / 60:,.0f} minutes in "
            f"{file.channels} channels): split it"
        )
    try:
        wave = file.read(dtype=dtype, always_2d=True)
    except soundfile.LibsndfileError as error:
        raise DatasetError(f"{path} is damaged: {error.error_string}") from error
    if len(wave) < file.frames:
        raise DatasetError(f"{path} is damaged: {len(wave):,} of {file.frames:,} samples were read")
    peak = max(float(wave.max()), -float(wave.min()))
    if not peak <= MAX_SAMPLE:  # also true for NaN
        raise DatasetError(f"{path} has samples of {peak:.3g} times full scale")
    return wave


def resampling_ratio(rate_hz: int, new_rate_hz: int) -> tuple[int, int]:
    """Return (a, b), a : b within 0.07 % (a hundredth of a semitone) of rate_hz : new_rate_hz."""
    exact = Fraction(rate_hz, new_rate_hz)
    max_denominator = max(1, math.isqrt(int(MAX_FILTER_TAPS / exact)))
    return exact.limit_denominator(max_denominator).as_integer_ratio()


def _frame_figures(mono: np.ndarray, rate_hz: int) -> dict:
    """Return silence and signal-to-noise ratio from the energies of frames."""
    size = max(int(rate_hz * FRAME_S), 1)
    count = len(mono) // size
    if count == 0:
        return {"leading_s": 0.0, "trailing_s": 0.0, "silence_s": 0.0, "gap_s": 0.0}
    frames = mono[: count * size].reshape(count, size)
    energy = np.einsum("fl,fl->f", frames, frames) / size
    rising = np.sort(energy)
    # 40 dB below the 95th percentile of all frames, or below -60 dB.
    silent = energy < max(1e-6, 1e-4 * float(rising[int(0.95 * (count - 1))]))
    loud = np.flatnonzero(~silent)
    first, last = (int(loud[0]), int(loud[-1])) if len(loud) else (count, count - 1)
    # The 10th percentile is noise, the 90th speech and noise: too low for clips without a pause.
    noise = float(rising[int(0.1 * count)])
    ratio = (float(rising[int(0.9 * count)]) - noise) / max(noise, 1e-12)
    snr_db = 10 * math.log10(min(max(ratio, 1.0), 1e10))
    return {
        "leading_s": round(first * FRAME_S, 2),
        "trailing_s": round((count - 1 - last) * FRAME_S, 2),
        "silence_s": round(int(silent.sum()) * FRAME_S, 2),
        "gap_s": round(int(np.diff(loud).max(initial=1) - 1) * FRAME_S, 2),
        "snr_db": round(snr_db, 1) if count >= 10 else None,
    }


def trim_silence(wave: np.ndarray, rate_hz: int) -> np.ndarray:
    """Cut silence beyond `KEPT_SILENCE_S` at both ends of a clip (L,), unless all is silent."""
    figures = _frame_figures(wave, rate_hz)
    if figures["silence_s"] >= len(wave) / rate_hz - FRAME_S:
        return wave
    first = round(max(figures["leading_s"] - KEPT_SILENCE_S, 0.0) * rate_hz)
    last = round(max(figures["trailing_s"] - KEPT_SILENCE_S, 0.0) * rate_hz)
    return wave[first : len(wave) - last]
