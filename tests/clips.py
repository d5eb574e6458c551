"""Recordings as bytes, sound and broken, for the tests of what reads and judges them."""

import io
import struct
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
from helpers import RATE, speech

TEXT = "ሰላም ለሁሉ ሰው"


def encoded(wave: np.ndarray, rate: int = RATE, **how) -> bytes:
    """`wave` as a file: 16-bit WAV unless `how` (soundfile's words) says otherwise."""
    file = io.BytesIO()
    soundfile.write(file, wave, rate, **{"format": "WAV"} | how)
    return file.getvalue()


def written(folder: Path, data: bytes, name: str = "a.wav") -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


def voice(seconds: float = 1.0, seed: int = 0) -> np.ndarray:
    """Syllables and pauses in a little noise, another recording for every seed."""
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * RATE)) / RATE
    tone = np.sin(2 * np.pi * (110 + 7 * (seed % 13)) * t) * (np.sin(2 * np.pi * 2 * t) > -0.2)
    return (0.3 * tone + 1e-3 * rng.standard_normal(len(t))).astype(np.float32)


def wav_with_comment(comment: bytes) -> bytes:
    """A sound WAV whose LIST chunk is before its data chunk, as ffmpeg and DAWs write it."""
    whole = encoded(speech())
    info = b"INFO" + b"ICMT" + struct.pack("<I", len(comment)) + comment
    chunk = b"LIST" + struct.pack("<I", len(info)) + info
    size = struct.unpack("<I", whole[4:8])[0] + len(chunk)
    return whole[:4] + struct.pack("<I", size) + whole[8:36] + chunk + whole[36:]


def flac_telling(frames: int, seconds: float = 1.0) -> bytes:
    """A sound FLAC whose header names `frames`, whatever it holds; 0: it does not know."""
    whole = bytearray(encoded(speech(seconds), format="FLAC"))
    whole[21:26] = ((whole[21] >> 4 << 36) + frames).to_bytes(5, "big")
    return bytes(whole)


def with_spikes(level: float) -> bytes:
    """A voice in floats, two of its samples `level` times full scale."""
    wave = speech()
    wave[100:102] = level
    return encoded(wave, subtype="FLOAT")


def cut_short(**how) -> bytes:
    """A file that ends at 55 % of its bytes."""
    whole = encoded(speech(), **how)
    return whole[: int(0.55 * len(whole))]


LIMITED = np.clip(9 * speech(), -1, 1)


def hour() -> bytes:
    """An hour of silence: 8-bit, 8 kHz, in FLAC a few kilobytes."""
    return encoded(np.zeros(3600 * 8000, np.int16), 8000, format="FLAC")


SUBTYPES = {"8 bit": "PCM_U8", "24 bit": "PCM_24", "32 bit": "PCM_32"}
SUBTYPES |= {"float": "FLOAT", "double": "DOUBLE", "mu-law": "ULAW"}
FORMATS = {"extensible": "WAVEX", "RF64": "RF64", "W64": "W64", "AIFF": "AIFF", "FLAC": "FLAC"}
GOOD = {name: partial(encoded, speech(), subtype=kind) for name, kind in SUBTYPES.items()}
GOOD |= {name: partial(encoded, speech(), format=kind) for name, kind in FORMATS.items()}
GOOD |= {
    "16 bit": lambda: encoded(speech()),
    "stereo": lambda: encoded(np.stack([speech(), 0.3 * speech()], axis=1)),
    "96 kHz": lambda: encoded(speech(rate=96_000), 96_000),
    "8 kHz": lambda: encoded(speech(rate=8000), 8000),
    "a comment": lambda: wav_with_comment(b"take 3 of data set"),
    "FLAC of unknown length": lambda: flac_telling(0),
}

# name: (bytes, the kind in the data report, words of its reason)
BAD = {
    "zero bytes": (lambda: b"", "unreadable", "0 bytes"),
    "text": (lambda: b"this is no audio at all" * 99, "unreadable", "cannot be read as audio"),
    "web page": (lambda: b"<!doctype html><title>404</title>", "unreadable", "cannot be read"),
    "truncated": (lambda: encoded(speech())[:20_000], "unreadable", "9,978 of 22,050 samples"),
    "header only": (lambda: encoded(speech())[:44], "unreadable", "truncated"),
    "half a header": (lambda: encoded(speech())[:30], "unreadable", "cannot be read"),
    "no samples": (lambda: encoded(speech()[:0]), "unreadable", "0 samples"),
    "truncated FLAC": (lambda: encoded(speech(), format="FLAC")[:9000], "unreadable", ""),
    "NaN": (lambda: encoded(speech() * np.nan, subtype="FLOAT"), "unreadable", "of nan times"),
    "infinite": (lambda: encoded(np.full(RATE, np.inf), subtype="FLOAT"), "unreadable", "of inf"),
    "truncated MP3": (lambda: cut_short(format="MP3"), "unreadable", "of 22,050 samples"),
    "FLAC that claims more": (lambda: flac_telling(RATE * 2), "unreadable", "of 44,100"),
    "FLAC that claims years": (lambda: flac_telling(2**35), "unreadable", "34,359,738,368"),
    "two samples beyond all": (lambda: with_spikes(3e38), "unreadable", "3e+38 times full scale"),
    "two loud samples": (lambda: with_spikes(300.0), "too loud", "reach 300 times full scale"),
    "silent": (lambda: encoded(np.zeros(RATE, np.float32)), "silent", "silent (peak 0.0000"),
    "nearly silent": (lambda: encoded(0.002 * speech()), "silent", "silent"),
    "clipped": (lambda: encoded(LIMITED), "clipped", "clipped ("),
    "clipped 8 bit": (lambda: encoded(LIMITED, subtype="PCM_U8"), "clipped", "clipped"),
    "float, not scaled": (lambda: encoded(speech() * 3e4, subtype="FLOAT"), "clipped", "clipped"),
    "off centre": (lambda: encoded(0.4 * speech() + 0.3), "dc offset", "its mean is +0.30"),
    "too long": (lambda: encoded(speech(14.5)), "too long", "longer than 14.0 s"),
    "an hour": (hour, "too long", "3600.0 s, longer than 14.0 s"),
    "too short": (lambda: encoded(speech(0.1)), "too short", "shorter than 0.2"),
    "far too slow": (lambda: encoded(speech(12)), "pace", "characters a second"),
    "far too fast": (lambda: encoded(speech(0.21)), "pace", "characters a second"),
}
