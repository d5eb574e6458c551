"""A JSON array of objects as a stream, never loaded as a whole.

One pass over brackets, commas and quotes finds where the first element of each block begins. ijson
3.6 took 2.2 times as long, ended at the first broken element and gave no line numbers.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kit.base.errors import DatasetError
from kit.streams.lines import parse_array, parse_object
from kit.streams.stream import FileStream, StreamConfig

QUOTE = ord('"')
COMMA = ord(",")
# The change of depth at each byte; 0 for a comma, too.
STEP = np.zeros(256, dtype=np.int8)
STEP[[ord("["), ord("{")]] = 1
STEP[[ord("]"), ord("}")]] = -1
STRUCTURAL = STEP != 0
STRUCTURAL[[QUOTE, COMMA]] = True


class BracketScanner:
    """Tracks depth and quotes through JSON text that comes in pieces."""

    def __init__(self, depth: int = 0):
        self.depth = depth
        self.in_string = 0
        self.held = b""

    def feed(self, data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(offset, byte, depth after it) of brackets and commas outside strings.

        Offsets count from `data`. A backslash at the end is held back until the next piece.
        """
        held_bytes = len(self.held)
        data = self.held + data
        keep = len(data) - len(data.rstrip(b"\\"))
        self.held = data[len(data) - keep :]
        data = data[: len(data) - keep]
        # Escaped backslashes, then escaped quotes, become as many bytes without a meaning.
        plain = data.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in data else data
        codes = np.frombuffer(plain, dtype=np.uint8)
        offsets = np.flatnonzero(STRUCTURAL[codes])
        codes = codes[offsets]
        quotes = np.cumsum(codes == QUOTE) + self.in_string
        outside = (quotes % 2 == 0) & (codes != QUOTE)
        offsets = offsets[outside]
        codes = codes[outside]
        depths = np.cumsum(STEP[codes], dtype=np.int64) + self.depth
        self.in_string = int(quotes[-1]) % 2 if len(quotes) else self.in_string
        self.depth = int(depths[-1]) if len(depths) else self.depth
        return offsets - held_bytes, codes, depths


class JsonArray(FileStream):
    """The objects of a JSON array as `dict`; DatasetError for a file that is not one array."""

    format = "JSON array"

    def __init__(self, path: Path, config: StreamConfig | None = None, **hooks):
        super().__init__(path, config, **hooks)
        self.begin = self._first_byte()
        self.closed = False
        self._index()
        if not self.closed and not self.on_bad_record:
            raise DatasetError(
                f"{self.file.path}, byte {self.end}: the file ends before its array does. Get the "
                "complete file, or pass an `on_bad_record=` function to use what is there."
            )

    def _first_byte(self) -> int:
        """The offset behind the "["."""
        for chunk in self.file.chunks(self.begin, self.end):
            content = chunk.lstrip()
            if content:
                if content[:1] != b"[":
                    raise self._no_array(f"it begins with {content[:20]!r}")
                return self.begin + len(chunk) - len(content) + 1
            self.begin += len(chunk)
        raise self._no_array("it is empty")

    def _no_array(self, reason: str) -> DatasetError:
        return DatasetError(
            f"{self.file.path} is not a JSON array: {reason}. If it has one object a line, it is "
            "JSON Lines: name it .jsonl, or open it with JsonLines."
        )

    def _index(self) -> None:
        """Find where the array ends and, for each block, where its first element begins."""
        size = self.config.block_bytes
        scanner = BracketScanner(depth=1)
        offset = self.begin
        first = {0: self.begin}
        for chunk in self.file.chunks(self.begin, self.end):
            offsets, codes, depths = scanner.feed(chunk)
            ends = np.flatnonzero(depths == 0)
            if ends.size:
                end = ends[0]
                self._close(offset + int(offsets[end]))
                offsets = offsets[:end]
                codes = codes[:end]
                depths = depths[:end]
            starts = offset + 1 + offsets[(codes == COMMA) & (depths == 1)]
            blocks, indices = np.unique((starts - self.begin) // size, return_index=True)
            for block, start in zip(blocks.tolist(), starts[indices].tolist()):
                first.setdefault(block, start)
            if self.closed:
                break
            offset += len(chunk)
        self._blocks = np.array(list(first))
        self._starts = np.array([*first.values(), self.end])

    def _close(self, end: int) -> None:
        self.closed = True
        for chunk in self.file.chunks(end + 1, self.end):
            if chunk.strip():
                raise self._no_array(f"something follows its end at byte {end}")
        self.end = end

    def span(self, read: Callable, block: int) -> tuple[int, bytes]:
        i = int(np.searchsorted(self._blocks, block))
        if i == len(self._blocks) or self._blocks[i] != block:
            return self.begin, b""
        start, end = self._starts[i : i + 2].tolist()
        max_bytes = self.config.block_bytes + self.config.longest_record_bytes + 2
        data = read(start, min(end - start, max_bytes))
        # An array that is not closed lacks a last element: these commas make an empty, bad one.
        return start, data if self.closed or end < self.end else data + b",,"

    def parse_all(self, data: bytes) -> list[dict]:
        return parse_array(b"[" + data.removesuffix(b",") + b"]")

    def split_records(self, offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        data = data.removesuffix(b",")
        offsets, codes, depths = BracketScanner().feed(data)
        ends = [*offsets[(codes == COMMA) & (depths == 0)].tolist(), len(data)]
        start = 0
        for end in ends if data.strip() else ():
            raw = data[start:end]
            yield offset + start + len(raw) - len(raw.lstrip()), raw.strip()
            start = end + 1

    def parse(self, raw: bytes) -> dict:
        try:
            return parse_object(raw)
        except ValueError as error:
            truncated = "" if self.closed else ": the file ends before its array does"
            raise ValueError(f"{error}{truncated}") from error
