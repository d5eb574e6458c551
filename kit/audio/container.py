"""How many samples a file holds, and how many its header says.

libsndfile trusts both blindly: it reads a truncated WAV, RF64, W64, AIFF or Ogg as a shorter
recording, a FLAC or MP3 only as far as its header says or an estimate goes, the first of two joined
Ogg files, and a FLAC of unknown length as 13 million years. So containers are checked here.
"""

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from typing import BinaryIO

import soundfile

from kit.audio.av_formats import decoded_by_av, needs_av
from kit.audio.mp3 import Mp3Scan, frame_header, scan_mp3
from kit.base.errors import DatasetError

# Of recordings; their content decides how they are read.
SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".aac", ".wma")
MAX_FRAMES = 2**32  # a day at 48 kHz
BLOCK_FRAMES = 2**14
HEAD_BYTES = 64  # enough to recognise every format
FLAC = b"fLaC"
FLAC_TOTAL = range(21, 26)  # bytes of its header with the total frames: 36 bits, 0 is unknown
FLAC_FRAMES_PER_BYTE = 8192  # at most, for silence: 65,535 frames take at least 10 bytes
OGG_PAGE_BYTES = 65_307  # at most
OGG_PAGE_HEAD_BYTES = 27
OGG_FIRST_PAGE = 2  # flag
OGG_LAST_PAGE = 4  # flag
APPARENT_SIZE = 1000  # of an MP3, times its size: no frame is so much larger than the mean
# Lengths that programs write into a pipe for "unknown": SoX, arecord, mplayer, FFmpeg, espeak-ng.
PLACEHOLDERS = (range(0x7F000000, 0x80000001), range(0xFFFF0000, 0x100000000))
UNKNOWN_LENGTH = b"\xff" * 4
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

    A FLAC or MP3 is read to its end, whatever its header says; one of unknown length is counted.
    Raises soundfile.LibsndfileError, DatasetError or OSError when it cannot be opened.
    """
    probe = _probe(path)
    with _decoder(probe) as sound:
        frames = sound.frames
        expected = round(frames / probe.share)
        max_frames = MAX_FRAMES
        if probe.head.startswith(FLAC):
            frames = expected = flac_total(probe.head) or count_frames(probe)
            max_frames = min(MAX_FRAMES, probe.size_bytes * FLAC_FRAMES_PER_BYTE)
        elif probe.whole_mp3:
            frames = probe.mp3.decodable
            expected = probe.mp3.samples
        if frames > max_frames:
            raise DatasetError(f"{path} has an impossible header: it says {frames:,} samples")
        yield sound, AudioLength(frames=frames, expected=expected, problem=probe.problem)


def count_decodable(path: str) -> AudioLength:
    """Return how much of a recording can be decoded, which a FLAC or MP3 header cannot tell.

    Raises as `open_audio` does.
    """
    with open_audio(path) as (sound, length):
        must_decode = sound.format in ("FLAC", "MP3")
    if length.problem or not must_decode:
        return length
    frames = count_frames(_probe(path))
    if frames >= length.expected:
        return AudioLength(frames=frames, expected=frames)
    problem = f"truncated: it has {frames:,} of {length.expected:,} samples"
    return AudioLength(frames=frames, expected=length.expected, problem=problem)


def duration_s(path: str) -> float:
    """Return the seconds of a recording by its header; raises as `open_audio` does."""
    with open_audio(path) as (sound, length):
        return length.expected / sound.samplerate


@contextlib.contextmanager
def open_seekable(path: str, frames: int) -> Iterator[soundfile.SoundFile]:
    """Open a recording of `frames` frames to read at any position."""
    probe = _probe(path)
    with contextlib.ExitStack() as stack:
        if probe.head.startswith(FLAC):
            flac = stack.enter_context(_flac_with_total(probe, frames))
            yield stack.enter_context(soundfile.SoundFile(flac))
        else:
            yield stack.enter_context(_decoder(probe))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Probe:
    """What the bytes of a file say of it, before it is decoded."""

    path: str
    head: bytes
    size_bytes: int
    problem: str  # what is missing at the end, as a phrase
    share: float  # of the sound that is there
    mp3: Mp3Scan | None
    zero_length_at: int  # as `_zero_length_at`

    @property
    def whole_mp3(self) -> bool:
        """Whether it is an MP3 that libsndfile would not read to its end."""
        return self.mp3 is not None and not self.mp3.header_is_right


def _probe(path: str) -> _Probe:
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            raise DatasetError(f"{path} is empty (0 bytes)")
        head = file.read(HEAD_BYTES)
        chunk = data_chunk(file, head)
        if is_joined(file, head, chunk):
            raise DatasetError(
                f"{path} is several recordings joined byte by byte, of which only the first would "
                "be read: split it, or convert each by itself and join their samples"
            )
        problem, share = truncation(file, head, chunk, size_bytes)
        mp3 = scan_mp3(file) if head.startswith(b"ID3") or frame_header(head, 0) else None
        if mp3 and not mp3.header_is_right:
            problem = mp3.problem
        return _Probe(
            path=path,
            head=head,
            size_bytes=size_bytes,
            problem=problem,
            share=share,
            mp3=mp3,
            zero_length_at=_zero_length_at(file, head, chunk, size_bytes),
        )


def count_frames(probe: _Probe) -> int:
    """Count the frames that can be decoded, up to the end or the first damage."""
    frames = 0
    with _decoder(probe) as sound:
        while frames <= MAX_FRAMES:
            try:
                block = sound.read(BLOCK_FRAMES, dtype="int16", always_2d=True)
            except soundfile.LibsndfileError:
                return frames
            frames += len(block)
            if len(block) == 0:
                return frames
    raise DatasetError(f"{probe.path} has more than {MAX_FRAMES:,} samples")


@contextlib.contextmanager
def _decoder(probe: _Probe) -> Iterator[soundfile.SoundFile]:
    """Open a file to be read to its end; a FLAC as of unknown length."""
    with contextlib.ExitStack() as stack:
        if probe.head.startswith(FLAC):
            flac = stack.enter_context(_flac_with_total(probe, 0))
            sound = _ForwardOnly(flac)
        elif probe.whole_mp3:
            sound = soundfile.SoundFile(stack.enter_context(WholeMp3(probe.path, probe.mp3)))
        elif format_name := needs_av(probe.head):
            sound = stack.enter_context(decoded_by_av(probe.path, format_name))
        elif probe.zero_length_at:
            wav = PatchedFile(probe.path, probe.zero_length_at, UNKNOWN_LENGTH)
            sound = soundfile.SoundFile(stack.enter_context(wav))
        else:
            sound = soundfile.SoundFile(probe.path)
        stack.enter_context(sound)
        if sound.subtype == "OPUS":
            sound.seek(0)  # else the encoder's delay is read, and as much of the end is not
        yield sound


class _ForwardOnly(soundfile.SoundFile):
    """A file read from its start: libsndfile cannot seek in a FLAC of unknown length."""

    def seekable(self) -> bool:
        return False


class PatchedFile(io.FileIO):
    """A file that reads as if it had the bytes `patch` at `position`."""

    def __init__(self, path: str, position: int, patch: bytes):
        super().__init__(path)
        self.position = position
        self.patch = patch

    def readinto(self, buffer) -> int:
        start = self.tell()
        read_bytes = super().readinto(buffer)
        view = memoryview(buffer).cast("B")
        for position, byte in enumerate(self.patch, self.position):
            if start <= position < start + read_bytes:
                view[position - start] = byte
        return read_bytes


def _flac_with_total(probe: _Probe, total: int) -> PatchedFile:
    """Return a FLAC whose header reads as if it had `total` frames; 0 means unknown."""
    patch = bytearray(total.to_bytes(len(FLAC_TOTAL), "big"))
    patch[0] |= probe.head[FLAC_TOTAL.start] & 0xF0  # the upper half has the bits per sample
    return PatchedFile(probe.path, FLAC_TOTAL.start, bytes(patch))


class WholeMp3(PatchedFile):
    """An MP3 without its Xing header, that seems so long that any estimate is long enough."""

    def __init__(self, path: str, scan: Mp3Scan):
        super().__init__(path, scan.xing_at, bytes(4) if scan.xing_at else b"")
        self.end = scan.end

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            return super().seek(APPARENT_SIZE * self.end + offset)
        return super().seek(offset, whence)

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")
        left = self.end - self.tell()
        if left < -self.end:  # an ID3 tag is looked for at the apparent end
            view[:] = bytes(len(view))
            return len(view)
        return super().readinto(view[: max(left, 0)])


def flac_total(head: bytes) -> int:
    """Return the total frames in a FLAC's header; 0 if unknown."""
    return int.from_bytes(head[FLAC_TOTAL.start : FLAC_TOTAL.stop], "big") % 2**36


def truncation(
    file: BinaryIO, head: bytes, chunk: tuple[int, int], size_bytes: int
) -> tuple[str, float]:
    """Return what a container lacks at its end ("" for nothing) and the share that is there."""
    if head.startswith(b"OggS"):
        problem = "" if ogg_is_complete(file, size_bytes) else "truncated: its last page is missing"
        return problem, 1.0
    start, length_bytes = chunk
    missing_bytes = start + length_bytes - size_bytes
    # 1 is a missing pad byte. A pipe's writer puts a placeholder where it cannot return.
    if missing_bytes <= 1 or any(length_bytes in lengths for lengths in PLACEHOLDERS):
        return "", 1.0
    problem = f"truncated: {missing_bytes:,} bytes of sound are missing, by its header"
    return problem, max(length_bytes - missing_bytes, 1) / length_bytes


def data_chunk(file: BinaryIO, head: bytes) -> tuple[int, int]:
    """Return first byte and length in bytes of the data chunk; (0, 0) if unknown."""
    if head[:4] not in LAYOUTS:
        return 0, 0
    layout = LAYOUTS[head[:4]]
    for name, start, length_bytes in _chunks(file, layout, layout.start):
        if name.startswith(layout.data):
            if head[:4] in (b"RF64", b"BW64"):
                length_bytes = int.from_bytes(head[DS64_DATA_BYTES], "little")
            unknown = length_bytes < 0 or length_bytes >= 2 ** (8 * layout.length_bytes) - 1
            return (0, 0) if unknown else (start, length_bytes)
    return 0, 0


def _chunks(file: BinaryIO, layout: Layout, position: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, first byte, length in bytes) of each chunk from byte `position` on."""
    head_bytes = layout.name_bytes + layout.length_bytes
    size_bytes = os.fstat(file.fileno()).st_size
    file.seek(position)
    chunk = file.read(head_bytes)
    while len(chunk) == head_bytes:
        length_bytes = int.from_bytes(chunk[layout.name_bytes :], layout.order)
        length_bytes -= head_bytes if layout.counts_head else 0
        start = file.tell()
        yield chunk[: layout.name_bytes], start, length_bytes
        end = start + max(length_bytes, 0)
        if end > size_bytes:
            return
        file.seek(-(-end // layout.align) * layout.align)
        chunk = file.read(head_bytes)


def _zero_length_at(file: BinaryIO, head: bytes, chunk: tuple[int, int], size_bytes: int) -> int:
    """Return the position of the length of a WAV's data chunk if it is 0 and sound follows.

    A writer that was killed, or wrote to a pipe, leaves it so; libsndfile would read nothing.
    """
    start, length_bytes = chunk
    if not head.startswith(b"RIFF") or start == 0 or length_bytes > 0:
        return 0
    layout = LAYOUTS[b"RIFF"]
    end = start  # of what follows and may be other chunks
    for name, chunk_start, chunk_bytes in _chunks(file, layout, start):
        if not (name.isascii() and name.decode("ascii").isprintable()):
            break
        end = chunk_start + chunk_bytes + chunk_bytes % layout.align
    has_sound = abs(size_bytes - end) > 1  # 1 is a missing pad byte
    return start - layout.length_bytes if has_sound else 0


def is_joined(file: BinaryIO, head: bytes, chunk: tuple[int, int]) -> bool:
    """Return whether another recording of the same format follows the first, byte by byte."""
    if head.startswith(b"OggS"):
        return _ogg_is_chained(file)
    start, length_bytes = chunk
    if start == 0:
        return False
    layout = LAYOUTS[head[:4]]
    end = start + length_bytes
    file.seek(end)
    if head[:4] in file.read(layout.align + 3):  # with or without padding
        return True
    end = -(-end // layout.align) * layout.align
    return any(name.startswith(head[:4]) for name, _, _ in _chunks(file, layout, end))


def _ogg_is_chained(file: BinaryIO) -> bool:
    """Return whether a second stream begins after pages of sound."""
    position = 0
    has_sound = False
    while True:
        file.seek(position)
        page = file.read(OGG_PAGE_HEAD_BYTES + 255)
        if len(page) < OGG_PAGE_HEAD_BYTES or not page.startswith(b"OggS"):
            return False
        is_first = bool(page[5] & OGG_FIRST_PAGE)
        if is_first and has_sound:
            return True
        has_sound = has_sound or not is_first
        segments = page[OGG_PAGE_HEAD_BYTES : OGG_PAGE_HEAD_BYTES + page[26]]
        position += OGG_PAGE_HEAD_BYTES + page[26] + sum(segments)


def ogg_is_complete(file: BinaryIO, size_bytes: int) -> bool:
    """Return whether an Ogg file ends with a complete page that is flagged as the last."""
    file.seek(max(0, size_bytes - OGG_PAGE_BYTES))
    tail = file.read()
    page = tail[max(tail.rfind(b"OggS"), 0) :]
    if len(page) < 27 or not page.startswith(b"OggS"):
        return False
    segment_bytes = page[27 : 27 + page[26]]
    return bool(page[5] & OGG_LAST_PAGE) and 27 + page[26] + sum(segment_bytes) <= len(page)
