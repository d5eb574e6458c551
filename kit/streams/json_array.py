"""A JSON array of objects as a stream: never loaded whole, and any place in it is near.

One pass finds, for each block, where its first element begins; from there on it is read like any
other format. The pass looks at brackets, commas and quotes alone; whether what stands between them
is JSON shows when it is read. Knows nothing of what the objects are for.

Not ijson 3.6 (its C backend), once into JSON Lines: that and reading the lines took 2.2 times as
long, ends at the first broken element, and knows no line to name.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kit.streams.file import StreamError
from kit.streams.lines import objects, one_object
from kit.streams.position import StreamConfig
from kit.streams.source import Source

QUOTE = ord('"')
COMMA = ord(",")
# What each byte does to the depth of brackets; 0 for a comma, too.
STEP = np.zeros(256, dtype=np.int8)
STEP[[ord("["), ord("{")]] = 1
STEP[[ord("]"), ord("}")]] = -1
TELLING = STEP != 0
TELLING[[QUOTE, COMMA]] = True


class Brackets:
    """Follows depth and quotes through JSON text that comes in pieces."""

    def __init__(self, depth: int = 0):
        self.depth = depth
        self.inside = 0
        self.held = b""

    def feed(self, data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(offset, byte, depth after it) of brackets and commas outside strings.

        Offsets count from `data`; what a backslash at the end of a piece escapes is in the next.
        """
        late = len(self.held)
        data = self.held + data
        keep = len(data) - len(data.rstrip(b"\\"))
        self.held = data[len(data) - keep :]
        data = data[: len(data) - keep]
        # Escaped backslashes, then escaped quotes, give way to as many bytes that mean nothing.
        plain = data.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in data else data
        codes = np.frombuffer(plain, dtype=np.uint8)
        at = np.flatnonzero(TELLING[codes])
        codes = codes[at]
        quotes = np.cumsum(codes == QUOTE) + self.inside
        outside = (quotes % 2 == 0) & (codes != QUOTE)
        at = at[outside]
        codes = codes[outside]
        depths = np.cumsum(STEP[codes], dtype=np.int64) + self.depth
        self.inside = int(quotes[-1]) % 2 if len(quotes) else self.inside
        self.depth = int(depths[-1]) if len(depths) else self.depth
        return at - late, codes, depths


class JsonArray(Source):
    """The objects of a JSON array as `dict`.

    Raises StreamError for a file that is no array or goes on after it, and, without `bad`, for one
    that ends before the array does.
    """

    format = "JSON array"

    def __init__(self, path: Path, config: StreamConfig | None = None, **hooks):
        super().__init__(path, config, **hooks)
        self.begin = self._first_byte()
        self.closed = False
        self._index()
        if not self.closed and not self.bad:
            raise StreamError(
                f"{self.file.path}, byte {self.end}: the file ends before its array does. Get the "
                "whole file, or give the stream a `bad=` function to use what is there."
            )

    def _first_byte(self) -> int:
        """Where the first element may begin: after the "["."""
        for chunk in self.file.chunks(self.begin, self.end):
            if head := chunk.lstrip():
                if head[:1] != b"[":
                    raise self._no_array(f"it begins with {head[:20]!r}")
                return self.begin + len(chunk) - len(head) + 1
            self.begin += len(chunk)
        raise self._no_array("it is empty")

    def _no_array(self, why: str) -> StreamError:
        return StreamError(
            f"{self.file.path} is no JSON array: {why}. One object a line is JSON Lines: name that "
            "file .jsonl, or open it with JsonLines."
        )

    def _index(self) -> None:
        """Find where the array ends and, for each block, where its first element begins."""
        size = self.config.block_bytes
        brackets = Brackets(depth=1)
        offset = self.begin
        first = {0: self.begin}
        for chunk in self.file.chunks(self.begin, self.end):
            at, codes, depths = brackets.feed(chunk)
            if (over := np.flatnonzero(depths == 0)).size:
                self._close(offset + int(at[over[0]]))
                at = at[: over[0]]
                codes = codes[: over[0]]
                depths = depths[: over[0]]
            starts = offset + 1 + at[(codes == COMMA) & (depths == 1)]
            blocks, which = np.unique((starts - self.begin) // size, return_index=True)
            for block, start in zip(blocks.tolist(), starts[which].tolist()):
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
        most = self.config.block_bytes + self.config.longest_record_bytes + 2
        data = read(start, min(end - start, most))
        # An array that is not closed lacks a last element: the empty one that these commas make.
        return start, data if self.closed or end < self.end else data + b",,"

    def parse_all(self, data: bytes) -> list[dict]:
        return objects(b"[" + data.removesuffix(b",") + b"]")

    def cut(self, offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        data = data.removesuffix(b",")
        at, codes, depths = Brackets().feed(data)
        ends = [*at[(codes == COMMA) & (depths == 0)].tolist(), len(data)]
        start = 0
        for end in ends if data.strip() else ():
            raw = data[start:end]
            yield offset + start + len(raw) - len(raw.lstrip()), raw.strip()
            start = end + 1

    def parse(self, raw: bytes) -> dict:
        try:
            return one_object(raw)
        except ValueError as why:
            cut_short = "" if self.closed else ": the file ends before its array does"
            raise ValueError(f"{why}{cut_short}") from why
