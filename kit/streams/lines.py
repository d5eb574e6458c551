"""Files whose records are lines: plain text and JSON Lines, and what they share with tables.

Lines end at "\\n" or "\\r\\n" and nowhere else: a lone "\\r" or U+2028 is a letter like another.
A line belongs to the block that holds its first byte, so it is found by the newline before it.
Order, sharding and place are kit.streams.source's. Knows nothing of what texts are for.
"""

import contextlib
from collections.abc import Callable, Iterator

from orjson import loads

from kit.streams.source import Source

TAIL_BYTES = 4096  # read past a block at first: where its last record usually ends


class Doubt(ValueError):
    """The quick way does not fit these bytes; the careful way will say what is wrong, if anything.

    Its text is for the careful way, which may end in it, too.
    """


def require_plain(plain: bool, reason: str = "not as plain as it looked") -> None:
    if not plain:
        raise Doubt(reason)


def as_text(raw: bytes) -> str:
    """`raw` decoded. ValueError says what is wrong with it."""
    if b"\0" in raw:
        raise ValueError(f"a NUL byte stands in it, at its byte {raw.index(0)}")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise ValueError(f"not valid UTF-8: 0x{byte:02x} at its byte {error.start}") from error


def bare(raw: bytes) -> bytes:
    """A line without its end."""
    return raw[:-1].removesuffix(b"\r") if raw.endswith(b"\n") else raw


def unix_ends(data: bytes) -> bytes:
    """Lines that end in "\\n" alone, the last one without."""
    return (data.replace(b"\r\n", b"\n") if b"\r" in data else data).removesuffix(b"\n")


class LineSource(Source):
    """Records that are lines; of a table with quoting, lines that may go on inside quotes."""

    quote = b""  # the byte between two of which a newline ends nothing
    blank: bytes | None = None  # a line of such bytes alone is no record; None: it is one
    inside = b""  # see `open_quotes`; only with `quote`

    def open_quotes(self) -> bytes:
        """For each block whether the byte before it begins inside quotes (0 or 1); last, the end.

        One pass over the file that counts quotes; one byte for each block is kept.
        """
        size = self.config.block_bytes
        odd = 0
        found = bytearray(1)
        first = min(self.begin + size - 1, self.end)
        for start, end in ((self.begin, first), (first, self.end)):
            for chunk in self.file.chunks(start, end, size):
                odd ^= chunk.count(self.quote) & 1
                found.append(odd)
        return bytes(found)

    def span(self, read: Callable, block: int) -> tuple[int, bytes]:
        start = self.begin + block * self.config.block_bytes
        end = min(start + self.config.block_bytes, self.end)
        offset = start - 1 if block else start  # a newline there begins a record in this block
        data = read(offset, end - offset + TAIL_BYTES)
        last = end - offset - 1
        first = self._next(data, 0, last, self._inside(block)) if block else 0
        if first < 0:
            return start, b""
        if end < self.end:
            data = self._whole(read, offset, data, last, self._inside(block + 1))
        return offset + first, data[first:]

    def _inside(self, block: int) -> int:
        return self.inside[block] if self.quote else 0

    def _whole(self, read: Callable, offset: int, data: bytes, at: int, inside: int) -> bytes:
        """`data` up to the end of the record that holds its byte `at`, read on where needed."""
        most = at + self.config.longest_record_bytes + 2
        while (end := self._next(data, at, len(data), inside)) < 0:
            if len(data) >= most or offset + len(data) >= self.end:
                return data
            data += read(offset + len(data), min(len(data), most - len(data)))
        return data[:end]

    def _next(self, data: bytes, at: int, end: int, inside: int) -> int:
        """Where the next record begins whose newline before it is in data[at:end]; else -1."""
        while (newline := data.find(b"\n", at, end)) >= 0:
            if self.quote:
                inside ^= data.count(self.quote, at, newline) & 1
            if not inside:
                return newline + 1
            at = newline + 1
        return -1

    def cut(self, offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        at = 0
        while at < len(data):
            end = self._next(data, at, len(data), 0)
            end = len(data) if end < 0 else end
            if self.blank is None or data[at:end].strip(self.blank):
                yield offset + at, bare(data[at:end])
            at = end

    def numbered(self, offset: int, data: bytes, line: int) -> Iterator[tuple[int, object]]:
        """Where each line is a record, as nearly always, all of them are parsed at once."""
        may_go_on = bool(self.quote) and self.quote in data
        if not may_go_on and len(data) <= self.config.longest_record_bytes:
            with contextlib.suppress(ValueError):  # some record of it: each is looked at
                records = self.parse_all(data)
                if len(records) == data.count(b"\n") + (not data.endswith(b"\n")):
                    return enumerate(records, line)
        return super().numbered(offset, data, line)


class TextLines(LineSource):
    """The lines of a text file as `str`, without their ends; an empty line is an empty string."""

    format = "text lines"

    def parse_all(self, data: bytes) -> list[str]:
        return as_text(unix_ends(data)).split("\n")

    def parse(self, raw: bytes) -> str:
        return as_text(raw)


class JsonLines(LineSource):
    """The objects of a JSON Lines file, one a line, as `dict`; blank lines are passed over."""

    format = "JSON lines"
    blank = b" \t\r\n"

    def parse_all(self, data: bytes) -> list[dict]:
        data = unix_ends(data)
        lines = data.count(b"\n") + 1
        # One call for all: the lines become elements of an array. Two halves of an object on two
        # lines would pass for a whole one there, and several on one line, but their number tells.
        records = objects(b"[" + data.replace(b"\n", b",") + b"]")
        require_plain(len(records) == lines)
        return records

    def parse(self, raw: bytes) -> dict:
        return one_object(raw)


def objects(array: bytes) -> list[dict]:
    """The elements of a JSON array, all of them objects; ValueError if one is not."""
    records = loads(array)
    require_plain(set(map(type, records)) <= {dict})
    return records


def one_object(raw: bytes) -> dict:
    """The JSON object `raw`. ValueError says what is wrong with it."""
    try:
        record = loads(raw)
    except ValueError as why:
        raise ValueError(f"broken JSON: {why}") from why
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object expected, got {type(record).__name__}")
    return record
