"""Formats that libsndfile does not read (M4A, AAC, WMA, WebM), decoded by PyAV where installed."""

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

import soundfile

from kit.base.errors import DatasetError
from kit.base.files import disk_errors

# Names of formats by their first bytes; those of MP4 begin at its fifth byte.
FORMATS = {
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "WMA",
    b"\x1a\x45\xdf\xa3": "WebM or Matroska",
    b"#!AMR": "AMR",
    b"ADIF": "AAC",
}
MAX_MISSING_S = 0.25  # of the duration in the header: encoders pad, and round to frames
SAMPLE_BYTES = 4  # float32


def needs_av(head: bytes) -> str:
    """Return the name of a format that only PyAV reads, by a file's first bytes; "" for others."""
    if head[4:8] == b"ftyp":
        return "M4A"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:  # MP3 has a layer here
        return "AAC"
    return next((name for start, name in FORMATS.items() if head.startswith(start)), "")


@contextlib.contextmanager
def decoded_by_av(path: str, name: str) -> Iterator[soundfile.SoundFile]:
    """Decode a recording into a temporary file of float32, which can be read at any position.

    Raises DatasetError, because of an ImportError without PyAV.
    """
    try:
        import av
    except ImportError as error:
        raise DatasetError(
            f"{path} is {name}, which needs PyAV: `pip install av`, and run again"
        ) from error

    with tempfile.TemporaryFile() as samples:
        try:
            rate_hz, channels, declared_s = _decode(path, samples)
        except av.FFmpegError as error:
            reason = error.strerror or error
            raise DatasetError(
                f"{path} is {name} and truncated or damaged ({reason}): copy or export it again"
            ) from error
        seconds = samples.tell() / (SAMPLE_BYTES * channels * rate_hz)
        if declared_s - seconds > MAX_MISSING_S:
            raise DatasetError(
                f"{path} is truncated: it has {seconds:.1f} of {declared_s:.1f} s of sound"
            )
        samples.seek(0)
        options = {"samplerate": rate_hz, "channels": channels}
        with soundfile.SoundFile(
            samples, format="RAW", subtype="FLOAT", endian="LITTLE", **options
        ) as sound:
            yield sound


def _decode(path: str, samples: BinaryIO) -> tuple[int, int, float]:
    """Write the first audio stream to `samples`; return its rate, channels and declared seconds."""
    import av

    with av.open(str(path)) as container:
        if not container.streams.audio:
            raise DatasetError(f"{path} has no sound")
        stream = container.streams.audio[0]
        # A bare AAC or AMR stream has no duration: it is estimated there.
        has_duration = container.duration and container.format.name not in ("aac", "amr")
        declared_s = container.duration / av.time_base if has_duration else 0.0
        to_float = av.AudioResampler(format="flt")  # rate and channels are the first frame's
        rate_hz = 0
        for frame in itertools.chain(container.decode(stream), [None]):  # None: what it holds back
            if frame and not rate_hz:
                rate_hz = frame.sample_rate  # of HE-AAC, twice the rate in the header
                channels = frame.layout.nb_channels
            blocks = to_float.resample(frame) if rate_hz else []
            with disk_errors(tempfile.gettempdir()):
                for block in blocks:
                    samples.write(block.to_ndarray().astype("<f4").tobytes())
    if not rate_hz:
        raise DatasetError(f"{path} is truncated: it has a header and 0 samples")
    return rate_hz, channels, declared_s
