"""How many samples a file holds, and how many its header says.

libsndfile trusts both blindly: it reads a truncated WAV, RF64, W64, AIFF or Ogg as a shorter
recording, a FLAC only as far as its header says, and a FLAC of unknown length as 13 million years.
So containers are checked here.
"""

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import soundfile

from kit.base.errors import DatasetError

MAX_FRAMES = 2**32  # a day at 48 kHz
BLOCK_FRAMES = 2**14
HEAD_BYTES = 64  # enough to recognise every format
FLAC = b"fLaC"
FLAC_TOTAL = range(21, 26)  # bytes of its header with the total frames: 36 bits, 0 is unknown
FLAC_FRAMES_PER_BYTE = 8192  # at most, for silence: 65,535 frames take at least 10 bytes
OGG_PAGE_BYTES = 65_307  # at most
OGG_LAST_PAGE = 4  # flag
DS64_DATA_BYTES = slice(28, 36)  # of an RF64: the data length, too large for the chunk's own field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a container's chunks are, and how their lengths are written."""

    start: int = 12  # byte of the first chunk
    name_bytes: int = 4
    length_bytes: int = 4
    order: str = "little"  # byte order of a length
    counts_head: bool = False  # whether a length includes the chunk's own name and length
    align: int = 2  # bytes
    data: bytes = b"data"  # start of the name of the data chunk


LAYOUTS = {
    b"RIFF": Layout(),
    b"RF64": Layout(),
    b"BW64": Layout(),
    b"FORM": Layout(order="big", data=b"SSND"),  # AIFF
    b"riff": Layout(start=40, name_bytes=16, length_bytes=8, counts_head=True, align=8),  # W64
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AudioLength:
    """Length of a file in frames (one sample per channel each)."""

    frames: int  # found, as far as was checked
    expected: int  # by the header; those found when it is unknown there
    problem: str = ""  # what is missing at the end, as a phrase


@contextlib.contextmanager
def open_audio(path: str) -> Iterator[tuple[soundfile.SoundFile, AudioLength]]:
    """Open a recording for reading from its start, and return its length by the header.

    A FLAC is read to its end, whatever its header says; one of unknown length is counted. Raises
    soundfile.LibsndfileError, DatasetError or OSError when it cannot be opened.
    """
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            raise DatasetError(f"{path} is empty (0 bytes)")
        head = file.read(HEAD_BYTES)
        problem, share = truncation(file, head, size_bytes)
    with _decoder(path, head) as sound:
        frames = sound.frames
        max_frames = MAX_FRAMES
        if head.startswith(FLAC):
            frames = flac_total(head) or count_frames(path)
            max_frames = min(MAX_FRAMES, size_bytes * FLAC_FRAMES_PER_BYTE)
        if frames > max_frames:
            raise DatasetError(f"{path} has an impossible header: it says {frames:,} samples")
        yield sound, AudioLength(frames=frames, expected=round(frames / share), problem=problem)


def count_decodable(path: str) -> AudioLength:
    """Return how much of a recording can be decoded, which a FLAC or MP3 header cannot tell.

    Raises as `open_audio` does.
    """
    with open_audio(path) as (sound, length):
        must_decode = sound.format in ("FLAC", "MP3")
    if length.problem or not must_decode:
        return length
    frames = count_frames(path)
    if frames >= length.expected:
        return AudioLength(frames=frames, expected=frames)
    problem = f"truncated: it has {frames:,} of {length.expected:,} samples"
    return AudioLength(frames=frames, expected=length.expected, problem=problem)


def read_segment(path: str, first: int, stop: int, frames: int) -> np.ndarray:
    """Read fp32 samples (L, C) from frame `first` to `stop` of a recording of `frames` frames."""
    with open(path, "rb") as file:
        is_flac = file.read(HEAD_BYTES).startswith(FLAC)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(FlacFile(path, frames)) if is_flac else path
        sound = stack.enter_context(soundfile.SoundFile(source))
        sound.seek(first)
        return sound.read(stop - first, dtype="float32", always_2d=True)


def count_frames(path: str) -> int:
    """Count the frames that can be decoded, up to the end or the first damage."""
    frames = 0
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    with _decoder(path, head) as sound:
        while frames <= MAX_FRAMES:
            try:
                block = sound.read(BLOCK_FRAMES, dtype="int16", always_2d=True)
            except soundfile.LibsndfileError:
                return frames
            frames += len(block)
            if len(block) == 0:
                return frames
    raise DatasetError(f"{path} has more than {MAX_FRAMES:,} samples")


@contextlib.contextmanager
def _decoder(path: str, head: bytes) -> Iterator[soundfile.SoundFile]:
    """Open a file by its first bytes `head`; a FLAC as of unknown length."""
    if head.startswith(FLAC):
        with FlacFile(path, 0) as flac, _ForwardOnly(flac) as sound:
            yield sound
    else:
        with soundfile.SoundFile(path) as sound:
            yield sound


class _ForwardOnly(soundfile.SoundFile):
    """A file read from its start: libsndfile cannot seek in a FLAC of unknown length."""

    def seekable(self) -> bool:
        return False


class FlacFile(io.FileIO):
    """A FLAC whose header reads as if it had `total` frames; 0 means unknown."""

    def __init__(self, path: str, total: int):
        super().__init__(path)
        self.patch = total.to_bytes(len(FLAC_TOTAL), "big")

    def readinto(self, buffer) -> int:
        start = self.tell()
        read_bytes = super().readinto(buffer)
        view = memoryview(buffer).cast("B")
        for position in FLAC_TOTAL:
            if start <= position < start + read_bytes:
                # The first byte shares its upper half with the bits per sample.
                kept = view[position - start] & 0xF0 if position == FLAC_TOTAL.start else 0
                view[position - start] = kept | self.patch[position - FLAC_TOTAL.start]
        return read_bytes


def flac_total(head: bytes) -> int:
    """Return the total frames in a FLAC's header; 0 if unknown."""
    return int.from_bytes(head[FLAC_TOTAL.start : FLAC_TOTAL.stop], "big") % 2**36


def truncation(file: BinaryIO, head: bytes, size_bytes: int) -> tuple[str, float]:
    """Return what a container lacks at its end ("" for nothing) and the share that is there."""
    if head.startswith(b"OggS"):
        problem = "" if ogg_is_complete(file, size_bytes) else "truncated: its last page is missing"
        return problem, 1.0
    if head[:4] not in LAYOUTS:
        return "", 1.0
    start, length_bytes = data_chunk(file, head)
    missing_bytes = start + length_bytes - size_bytes
    if missing_bytes <= 1:  # 1 is a missing pad byte
        return "", 1.0
    problem = f"truncated: {missing_bytes:,} bytes of sound are missing, by its header"
    return problem, max(length_bytes - missing_bytes, 1) / length_bytes


def data_chunk(file: BinaryIO, head: bytes) -> tuple[int, int]:
    """Return first byte and length in bytes of the data chunk; (0, 0) if unknown."""
    layout = LAYOUTS[head[:4]]
    head_bytes = layout.name_bytes + layout.length_bytes
    file.seek(layout.start)
    chunk = file.read(head_bytes)
    while len(chunk) == head_bytes:
        length_bytes = int.from_bytes(chunk[layout.name_bytes :], layout.order)
        length_bytes -= head_bytes if layout.counts_head else 0
        if chunk.startswith(layout.data):
            if head[:4] in (b"RF64", b"BW64"):
                length_bytes = int.from_bytes(head[DS64_DATA_BYTES], "little")
            unknown = length_bytes < 0 or length_bytes >= 2 ** (8 * layout.length_bytes) - 1
            return (0, 0) if unknown else (file.tell(), length_bytes)
        end = file.tell() + max(length_bytes, 0)
        file.seek(-(-end // layout.align) * layout.align)
        chunk = file.read(head_bytes)
    return 0, 0


def ogg_is_complete(file: BinaryIO, size_bytes: int) -> bool:
    """Return whether an Ogg file ends with a complete page that is flagged as the last."""
    file.seek(max(0, size_bytes - OGG_PAGE_BYTES))
    tail = file.read()
    page = tail[max(tail.rfind(b"OggS"), 0) :]
    if len(page) < 27 or not page.startswith(b"OggS"):
        return False
    segment_bytes = page[27 : 27 + page[26]]
    return bool(page[5] & OGG_LAST_PAGE) and 27 + page[26] + sum(segment_bytes) <= len(page)
