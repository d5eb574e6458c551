"""How much sound a file holds, and how much its header promises.

libsndfile believes neither: it reads a WAV, RF64, W64, AIFF or Ogg that was cut in the middle as a
shorter recording, a FLAC only as far as its header says, and a FLAC whose header does not know its
length as 13 million years. So containers are looked at here. Knows bytes and frames; no figures.
"""

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import soundfile

MOST_FRAMES = 2**32  # a day at 48 kHz: longer recordings are not counted to their end
BLOCK_FRAMES = 2**14
HEAD_BYTES = 64  # in which every header is told apart
FLAC = b"fLaC"
FLAC_TOTAL = range(21, 26)  # bytes of its header with the frames in all: 36 bits, 0 is unknown
FLAC_FRAMES_A_BYTE = 8192  # no silence is packed tighter: 65,535 frames take 10 bytes at least
OGG_PAGE_BYTES = 65_307  # at most
OGG_LAST = 4  # flag of a stream's last page
DS64_SOUND = slice(
    28, 36
)  # of an RF64: the length of its sound, too long for the chunk's own field


class UnreadableError(RuntimeError):
    """A file whose length of sound cannot be known; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the chunks of a container stand, and how their lengths are written."""

    start: int = 12  # byte of the first chunk
    name_bytes: int = 4
    length_bytes: int = 4
    order: str = "little"  # of a length's bytes
    counts_head: bool = False  # whether a length counts the chunk's own name and length
    align: int = 2  # a chunk begins at a multiple of so many bytes
    sound: bytes = b"data"  # how the name of the chunk with the sound begins


LAYOUTS = {
    b"RIFF": Layout(),
    b"RF64": Layout(),
    b"BW64": Layout(),
    b"FORM": Layout(order="big", sound=b"SSND"),  # AIFF
    b"riff": Layout(start=40, name_bytes=16, length_bytes=8, counts_head=True, align=8),  # W64
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """Frames of sound in a file, one sample of each channel each."""

    frames: int  # that are there, as far as it was looked at
    promised: int  # by the header; where it knows none, what was counted
    problem: str = ""  # what is missing at the end, in words; "" where nothing is


@contextlib.contextmanager
def open_sound(path: str) -> Iterator[tuple[soundfile.SoundFile, Extent]]:
    """The recording at `path`, to be read from its start, and how much its header promises.

    A FLAC is read to its end, not to its header's; one whose header knows no length is counted.
    Raises soundfile.LibsndfileError, UnreadableError or OSError when it cannot be opened.
    """
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            raise UnreadableError("it is empty, the file has 0 bytes")
        head = file.read(HEAD_BYTES)
        missing, share = shortage(file, head, size_bytes)
    with _decoder(path, head) as sound:
        frames = sound.frames
        most = MOST_FRAMES
        if head.startswith(FLAC):
            frames = flac_total(head) or count(path)
            most = min(most, size_bytes * FLAC_FRAMES_A_BYTE)
        if frames > most:
            raise UnreadableError(f"its header tells of {frames:,} samples")
        problem = f"truncated: {missing}" if missing else ""
        yield sound, Extent(frames=frames, promised=round(frames / share), problem=problem)


def decoded_extent(path: str) -> Extent:
    """How much of a recording can be decoded, which no header of a FLAC or MP3 can show.

    Raises as `open_sound` does.
    """
    with open_sound(path) as (sound, told):
        whole = sound.format not in ("FLAC", "MP3")
    if told.problem or whole:
        return told
    frames = count(path)
    if frames >= told.promised:
        return Extent(frames=frames, promised=frames)
    problem = f"truncated: {frames:,} samples are there of {told.promised:,}"
    return Extent(frames=frames, promised=told.promised, problem=problem)


def read_part(path: str, first: int, stop: int, frames: int) -> np.ndarray:
    """Samples (L, C), fp32, from frame `first` to `stop` of a recording that holds `frames`."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    with contextlib.ExitStack() as stack:
        source = path
        if head.startswith(FLAC):
            source = stack.enter_context(FlacFile(path, frames))
        sound = stack.enter_context(soundfile.SoundFile(source))
        sound.seek(first)
        return sound.read(stop - first, dtype="float32", always_2d=True)


def count(path: str) -> int:
    """Frames that can be decoded, from the start to the end or the first damage."""
    frames = 0
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    with _decoder(path, head) as sound:
        while frames <= MOST_FRAMES:
            try:
                block = sound.read(BLOCK_FRAMES, dtype="int16", always_2d=True)
            except soundfile.LibsndfileError:
                return frames
            frames += len(block)
            if len(block) == 0:
                return frames
    raise UnreadableError(f"it holds more than {MOST_FRAMES:,} samples")


@contextlib.contextmanager
def _decoder(path: str, head: bytes) -> Iterator[soundfile.SoundFile]:
    """The file at `path`, whose first bytes are `head`; a FLAC knows no length and cannot seek."""
    if head.startswith(FLAC):
        with FlacFile(path, 0) as flac, _Forward(flac) as sound:
            yield sound
    else:
        with soundfile.SoundFile(path) as sound:
            yield sound


class _Forward(soundfile.SoundFile):
    """A file read from its start on: libsndfile cannot seek in a FLAC of unknown length."""

    def seekable(self) -> bool:
        return False


class FlacFile(io.FileIO):
    """A FLAC whose header tells of `total` frames, whatever is written there; 0: of no number."""

    def __init__(self, path: str, total: int):
        super().__init__(path)
        self.patch = total.to_bytes(len(FLAC_TOTAL), "big")

    def readinto(self, buffer) -> int:
        start = self.tell()
        read_bytes = super().readinto(buffer)
        view = memoryview(buffer).cast("B")
        for at in FLAC_TOTAL:
            if start <= at < start + read_bytes:
                kept = view[at - start] & 0xF0 if at == FLAC_TOTAL.start else 0
                view[at - start] = kept | self.patch[at - FLAC_TOTAL.start]
        return read_bytes


def flac_total(head: bytes) -> int:
    """Frames that a FLAC's header tells of; 0: it does not know."""
    return int.from_bytes(head[FLAC_TOTAL.start : FLAC_TOTAL.stop], "big") % 2**36


def shortage(file: BinaryIO, head: bytes, size_bytes: int) -> tuple[str, float]:
    """(what a container lacks at its end, in words or "", the share of its sound that is there)."""
    if head.startswith(b"OggS"):
        return ("" if ogg_is_whole(file, size_bytes) else "its last page is missing"), 1.0
    if head[:4] not in LAYOUTS:
        return "", 1.0
    start, length_bytes = sound_chunk(file, head)
    missing_bytes = start + length_bytes - size_bytes
    if missing_bytes <= 1:  # 1 is a missing pad byte
        return "", 1.0
    words = f"{missing_bytes:,} bytes of sound that its header promises are missing"
    return words, max(length_bytes - missing_bytes, 1) / length_bytes


def sound_chunk(file: BinaryIO, head: bytes) -> tuple[int, int]:
    """(first byte, length in bytes) of the chunk with the sound; (0, 0) where nobody knows."""
    layout = LAYOUTS[head[:4]]
    head_bytes = layout.name_bytes + layout.length_bytes
    file.seek(layout.start)
    chunk = file.read(head_bytes)
    while len(chunk) == head_bytes:
        length_bytes = int.from_bytes(chunk[layout.name_bytes :], layout.order)
        length_bytes -= head_bytes if layout.counts_head else 0
        if chunk.startswith(layout.sound):
            if head[:4] in (b"RF64", b"BW64"):
                length_bytes = int.from_bytes(head[DS64_SOUND], "little")
            unknown = length_bytes < 0 or length_bytes >= 2 ** (8 * layout.length_bytes) - 1
            return (0, 0) if unknown else (file.tell(), length_bytes)
        end = file.tell() + max(length_bytes, 0)
        file.seek(-(-end // layout.align) * layout.align)
        chunk = file.read(head_bytes)
    return 0, 0


def ogg_is_whole(file: BinaryIO, size_bytes: int) -> bool:
    """Whether an Ogg file ends with a whole page that says it is the last one."""
    file.seek(max(0, size_bytes - OGG_PAGE_BYTES))
    tail = file.read()
    page = tail[max(tail.rfind(b"OggS"), 0) :]
    if len(page) < 27 or not page.startswith(b"OggS"):
        return False
    lengths = page[27 : 27 + page[26]]  # of the pieces that the page holds
    return bool(page[5] & OGG_LAST) and 27 + page[26] + sum(lengths) <= len(page)
