"""Samples as the bytes of a WAV file, without a sound library: a voice speaks without one."""

import io
import wave

import numpy as np


def encode_wav(samples: np.ndarray, sample_rate_hz: int) -> bytes:
    """`samples` (L,) in -1 to 1 as a mono 16-bit WAV file; values outside are clipped."""
    pcm = (np.clip(samples, -1, 1) * 32767).round().astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(sample_rate_hz)
        out.writeframes(pcm.tobytes())
    return file.getvalue()
