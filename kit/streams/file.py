"""A file read by byte positions, whose every failure is a sentence.

Streams keep no file open between reads: a disk that was unmounted, a file that was cut or replaced
by another is noticed at the next read, and told with the path and the cure. The size is the one at
opening, so a file that grows meanwhile is read to there. Knows bytes alone, no records.
"""

import contextlib
import dataclasses
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

SAMPLE_BYTES = 65536
CHUNK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
# First bytes of files that people take for plain text, and what to do about them.
NOT_TEXT = {
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
    b"\x1f\x8b": "gzip; unpack it first",
    b"PK\x03\x04": "a ZIP archive or a spreadsheet; unpack it, or export it as CSV in UTF-8",
    b"PAR1": "Parquet; export it as JSON lines",
}


def special_file(path: Path) -> str:
    """What `path` is in words where opening it may wait for ever, or never come to an end.

    "" for a regular file, and for a folder, which the system itself refuses to read. Raises OSError
    where nothing is there.
    """
    mode = os.stat(path).st_mode
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    kinds[stat.S_IFSOCK] = "a socket"
    return kinds.get(stat.S_IFMT(mode), "")


class StreamError(ValueError):
    """Something that cannot be streamed; the message names file, place and cure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One record that cannot be used: where it stands, and why."""

    file: str
    line: int | None  # of the record's first byte, from 1; None where counting would cost too much
    offset: int  # of the record's first byte
    reason: str

    def __str__(self):
        line = "" if self.line is None else f"line {self.line}, "
        return f"{self.file}, {line}byte {self.offset}: {self.reason}"


class ByteFile:
    """The `size` bytes that `path` had when this was made. Raises StreamError like `opened`."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.size = 0
        with self._told(), open(self.path, "rb") as file:
            self.size = file.seek(0, 2)
        self.fingerprint = self._fingerprint()

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[int, int], bytes]]:
        """`read(offset, count) -> bytes`, never past `size`.

        Raises StreamError when the file is gone, cannot be read, or became shorter.
        """
        with self._told(), open(self.path, "rb") as file:
            if file.seek(0, 2) < self.size:
                raise StreamError(
                    f"{self.path} was cut while it was read: it had {self.size} bytes and has "
                    f"{file.tell()}. Put the whole file back, or start again with the shorter one."
                )

            def read(offset: int, count: int) -> bytes:
                file.seek(offset)
                return file.read(max(0, min(count, self.size - offset)))

            yield read

    @contextlib.contextmanager
    def _told(self):
        try:
            kind = special_file(self.path)
            if kind:
                raise StreamError(f"{self.path} is {kind}, no file: copy its content into a file.")
            yield
        except OSError as error:
            raise StreamError(
                f"{self.path} cannot be read: {error.strerror}. Is the path right, and the disk it "
                "lies on mounted? A saved position stays good: bring the file back and go on."
            ) from error

    def _fingerprint(self) -> str:
        """Size and a digest of the first, middle and last 64 KiB: another file shows by it."""
        starts = (0, self.size // 2, max(0, self.size - SAMPLE_BYTES))
        with self.opened() as read:
            samples = b"".join(read(start, SAMPLE_BYTES) for start in starts)
        return f"{self.size}-{hashlib.blake2b(samples, digest_size=6).hexdigest()}"

    def text_start(self) -> int:
        """Where the text begins, after a byte order mark; StreamError when this is no UTF-8."""
        with self.opened() as read:
            head = read(0, 4)
        for magic, kind in NOT_TEXT.items():
            if head.startswith(magic):
                raise StreamError(f"{self.path} is no UTF-8 text but {kind}.")
        return len(BOM) if head.startswith(BOM) else 0

    def chunks(self, start: int, end: int, count: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The bytes from `start` to `end`, `count` at a time."""
        with self.opened() as read:
            for offset in range(start, end, count):
                yield read(offset, min(count, end - offset))

    def newlines(self, start: int, end: int) -> int:
        """How many lines end between two offsets; reads all that lies between."""
        if start >= end:
            return 0
        return sum(chunk.count(b"\n") for chunk in self.chunks(start, end))

    def line_of(self, offset: int) -> int:
        """The number, from 1, of the line that holds byte `offset`."""
        return 1 + self.newlines(0, offset)
