"""A file read by byte offsets, with errors that name the file and the fix.

No file stays open between reads, so an unmounted disk or a truncated file is noticed at the next
one. A file that grows is read up to the size it had when it was opened.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from kit.base.errors import DatasetError
from kit.base.files import special_file_kind

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadRecord:
    """A record that cannot be used: its place in the file, and the reason."""

    file: str
    line: int | None  # of the record's first byte, from 1; None where counting would cost too much
    offset: int  # of the record's first byte
    reason: str

    def __str__(self):
        line = "" if self.line is None else f"line {self.line}, "
        return f"{self.file}, {line}byte {self.offset}: {self.reason}"


class ByteFile:
    """The first `size` bytes of a file; `size` is its size now. Raises DatasetError like `opened`.

    `fingerprint` is the size and a digest of the first, middle and last 64 KiB.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.size = 0
        with self._explain_errors(), open(self.path, "rb") as file:
            self.size = file.seek(0, 2)
        starts = (0, self.size // 2, max(0, self.size - SAMPLE_BYTES))
        with self.opened() as read:
            samples = b"".join(read(start, SAMPLE_BYTES) for start in starts)
        self.fingerprint = f"{self.size}-{hashlib.blake2b(samples, digest_size=6).hexdigest()}"

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[int, int], bytes]]:
        """Give `read(offset, count) -> bytes`; DatasetError for a missing or shorter file."""
        with self._explain_errors(), open(self.path, "rb") as file:
            if file.seek(0, 2) < self.size:
                raise DatasetError(
                    f"{self.path} became shorter while it was read: from {self.size} to "
                    f"{file.tell()} bytes. Restore the complete file, or start again with this one."
                )

            def read(offset: int, count: int) -> bytes:
                file.seek(offset)
                return file.read(max(0, min(count, self.size - offset)))

            yield read

    @contextlib.contextmanager
    def _explain_errors(self):
        try:
            kind = special_file_kind(self.path)
            if kind:
                raise DatasetError(
                    f"{self.path} is {kind}, not a regular file: copy its content into a file."
                )
            yield
        except OSError as error:
            raise DatasetError(
                f"{self.path} cannot be read: {error.strerror}. Check the path, and that its disk "
                "is mounted. A saved position stays valid: restore the file and resume."
            ) from error

    def text_start(self) -> int:
        """The offset behind a byte order mark. Raises DatasetError when this is not UTF-8 text."""
        with self.opened() as read:
            head = read(0, 4)
        for magic, kind in NOT_TEXT.items():
            if head.startswith(magic):
                raise DatasetError(f"{self.path} is not UTF-8 text but {kind}.")
        return len(BOM) if head.startswith(BOM) else 0

    def chunks(self, start: int, end: int, count: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The bytes from `start` to `end`, `count` at a time."""
        with self.opened() as read:
            for offset in range(start, end, count):
                yield read(offset, min(count, end - offset))

    def count_newlines(self, start: int, end: int) -> int:
        if start >= end:
            return 0
        return sum(chunk.count(b"\n") for chunk in self.chunks(start, end))
