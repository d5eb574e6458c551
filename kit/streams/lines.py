"""Files whose records are lines: plain text and JSON Lines, and what they share with tables.

Lines end at "\\n" or "\\r\\n" and nowhere else: a lone "\\r" or U+2028 is an ordinary character. A
line belongs to the block that holds its first byte, so it is located by the newline before it.
"""

import contextlib
from collections.abc import Callable, Iterator

from orjson import loads

from kit.streams.stream import FileStream

TAIL_BYTES = 4096  # first read past a block: where its last record usually ends


def require_valid(ok: bool, reason: str = "not that simple: parse each record alone") -> None:
    if not ok:
        raise ValueError(reason)


def as_text(raw: bytes) -> str:
    """`raw` decoded. Raises ValueError with what is wrong and where."""
    if b"\0" in raw:
        raise ValueError(f"a NUL byte at its byte {raw.index(0)}")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise ValueError(f"not valid UTF-8: 0x{byte:02x} at its byte {error.start}") from error


def strip_line_end(raw: bytes) -> bytes:
    return raw[:-1].removesuffix(b"\r") if raw.endswith(b"\n") else raw


def unix_ends(data: bytes) -> bytes:
    """Lines that end in "\\n" alone, the last one without."""
    return (data.replace(b"\r\n", b"\n") if b"\r" in data else data).removesuffix(b"\n")


class LineStream(FileStream):
    """Records that are lines, or, in a table with quoting, lines that continue inside quotes."""

    quote = b""  # the byte between two of which a newline ends no record
    blank: bytes | None = None  # a line of such bytes alone is no record; None: it is one
    open_quotes = b""  # see `find_open_quotes`; only with `quote`

    def find_open_quotes(self) -> bytes:
        """For each block whether the byte before it is inside quotes (0 or 1); last, for the end.

        One pass over the file that counts quotes; one byte for each block is kept.
        """
        size = self.config.block_bytes
        odd = 0
        flags = bytearray(1)
        first = min(self.begin + size - 1, self.end)
        for start, end in ((self.begin, first), (first, self.end)):
            for chunk in self.file.chunks(start, end, size):
                odd ^= chunk.count(self.quote) & 1
                flags.append(odd)
        return bytes(flags)

    def span(self, read: Callable, block: int) -> tuple[int, bytes]:
        start = self.begin + block * self.config.block_bytes
        end = min(start + self.config.block_bytes, self.end)
        offset = start - 1 if block else start  # a newline there begins a record in this block
        data = read(offset, end - offset + TAIL_BYTES)
        last = end - offset - 1
        first = self._next_record(data, 0, last, self._in_quotes(block)) if block else 0
        if first < 0:
            return start, b""
        if end < self.end:
            data = self._complete(read, offset, data, last, self._in_quotes(block + 1))
        return offset + first, data[first:]

    def _in_quotes(self, block: int) -> int:
        return self.open_quotes[block] if self.quote else 0

    def _complete(self, read: Callable, offset: int, data: bytes, index: int, quoted: int) -> bytes:
        """`data` to the end of the record that holds its byte `index`; reads on where needed."""
        max_bytes = index + self.config.longest_record_bytes + 2
        while (end := self._next_record(data, index, len(data), quoted)) < 0:
            if len(data) >= max_bytes or offset + len(data) >= self.end:
                return data
            data += read(offset + len(data), min(len(data), max_bytes - len(data)))
        return data[:end]

    def _next_record(self, data: bytes, start: int, end: int, quoted: int) -> int:
        """Where the next record begins whose newline before it is in data[start:end]; else -1."""
        while (newline := data.find(b"\n", start, end)) >= 0:
            if self.quote:
                quoted ^= data.count(self.quote, start, newline) & 1
            if not quoted:
                return newline + 1
            start = newline + 1
        return -1

    def split_records(self, offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        start = 0
        while start < len(data):
            end = self._next_record(data, start, len(data), 0)
            end = len(data) if end < 0 else end
            if self.blank is None or data[start:end].strip(self.blank):
                yield offset + start, strip_line_end(data[start:end])
            start = end

    def numbered(self, offset: int, data: bytes, line: int) -> Iterator[tuple[int, object]]:
        """Parses all lines at once where each is a record, as nearly always."""
        has_quotes = bool(self.quote) and self.quote in data
        if not has_quotes and len(data) <= self.config.longest_record_bytes:
            with contextlib.suppress(ValueError):  # some record is bad: each is parsed alone
                records = self.parse_all(data)
                if len(records) == data.count(b"\n") + (not data.endswith(b"\n")):
                    return enumerate(records, line)
        return super().numbered(offset, data, line)


class TextLines(LineStream):
    """The lines of a text file as `str`, without their ends; an empty line is an empty string."""

    format = "text lines"

    def parse_all(self, data: bytes) -> list[str]:
        return as_text(unix_ends(data)).split("\n")

    def parse(self, raw: bytes) -> str:
        return as_text(raw)


class JsonLines(LineStream):
    """The objects of a JSON Lines file, one a line, as `dict`; blank lines are skipped."""

    format = "JSON lines"
    blank = b" \t\r\n"

    def parse_all(self, data: bytes) -> list[dict]:
        data = unix_ends(data)
        lines = data.count(b"\n") + 1
        # One call for all: the lines become elements of an array. Two halves of an object on two
        # lines would pass for one object, and several objects on one line, but the count shows it.
        records = parse_array(b"[" + data.replace(b"\n", b",") + b"]")
        require_valid(len(records) == lines)
        return records

    def parse(self, raw: bytes) -> dict:
        return parse_object(raw)


def parse_array(array: bytes) -> list[dict]:
    """The elements of a JSON array, all of them objects; ValueError if one is not."""
    records = loads(array)
    require_valid(set(map(type, records)) <= {dict})
    return records


def parse_object(raw: bytes) -> dict:
    """The JSON object `raw`. Raises ValueError with what is wrong."""
    try:
        record = loads(raw)
    except ValueError as error:
        raise ValueError(f"broken JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object expected, got {type(record).__name__}")
    return record
