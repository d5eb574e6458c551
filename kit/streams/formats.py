"""Formats of records: plain text, JSON Lines, tables (CSV, TSV, LJSpeech's "|").

Lines end at "\\n" or "\\r\\n" and nowhere else: a lone "\\r" or U+2028 is an ordinary character. A
line belongs to the block that holds its first byte, so it is located by the newline before it.
"""

import contextlib
import csv
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from orjson import OPT_APPEND_NEWLINE, dumps, loads

from kit.base.errors import DatasetError
from kit.base.files import atomic_path, digest
from kit.streams.stream import BadRecord, FileStream, StreamConfig

TAIL_BYTES = 4096  # first read past a block: where its last record usually ends
PLAIN_QUOTES = "if double quotes are plain characters here, pass quoting=False"
NOT_CLOSED = f"a double quote is never closed; {PLAIN_QUOTES}"
LONE_RETURN = "there is a carriage return outside quotes that ends no line"
STRAY = f"there is a double quote inside a field that does not begin with one; {PLAIN_QUOTES}"


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
        """For each block whether the byte before it is inside quotes (0 or 1), and for the end."""
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

    parse = staticmethod(as_text)


def parse_array(array: bytes) -> list[dict]:
    """The elements of a JSON array, all of them objects; ValueError if one is not."""
    records = loads(array)
    require_valid(isinstance(records, list) and set(map(type, records)) <= {dict})
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


class JsonLines(LineStream):
    """The objects of a JSON Lines file, one a line, as `dict`; blank lines are skipped."""

    format = "JSON lines"
    blank = b" \t\r\n"
    parse = staticmethod(parse_object)

    def parse_all(self, data: bytes) -> list[dict]:
        data = unix_ends(data)
        # One call for all: the lines become elements of an array, of which there may be no fewer.
        records = parse_array(b"[" + data.replace(b"\n", b",") + b"]")
        require_valid(len(records) == data.count(b"\n") + 1)
        return records


class Table(LineStream):
    """Rows of a table as `{column: value}`, all strings; empty lines are skipped.

    `columns=None` takes them from the first line. `delimiter=None`: a tab for .tsv, else a comma.
    With `quoting` (RFC 4180), fields in double quotes may hold delimiters, newlines and doubled
    quotes; LJSpeech and Common Voice tables have none. Raises DatasetError for an unusable header
    or quotes never closed.
    """

    blank = b"\r\n"

    def __init__(
        self,
        path: Path,
        config: StreamConfig | None = None,
        *,
        columns: list[str] | None = None,
        delimiter: str | None = None,
        quoting: bool = True,
        **hooks,
    ):
        super().__init__(path, config, **hooks)
        suffix = self.file.path.suffix.lower()
        self.delimiter = delimiter or ("\t" if suffix == ".tsv" else ",")
        self.quote = b'"' if quoting else b""
        self.columns = self._header() if columns is None else list(columns)
        if not all(self.columns) or len(set(self.columns)) < len(self.columns) or not self.columns:
            raise DatasetError(
                f"{self.file.path} needs a header of different, non-empty column names in line 1, "
                f"got {self.columns}. Name each column there, that of the text `text`; in Python, "
                "columns=[...] does as well."
            )
        self.format = f"table {digest(self.columns, self.delimiter, quoting)}"
        if quoting:
            self.open_quotes = self.find_open_quotes()
            if self.open_quotes[-1] and not self.on_bad_record:
                raise DatasetError(f"{self.file.path}: {NOT_CLOSED}.")

    def _header(self) -> list[str]:
        with self.file.opened() as read:
            raw = self._complete(read, self.begin, read(self.begin, TAIL_BYTES), 0, 0)
        self.begin += len(raw)
        try:
            return next(iter(self._rows(raw)), [])
        except ValueError as error:
            raise DatasetError(f"{self.file.path}, line 1, the header: {error}.") from error

    def parse_all(self, data: bytes) -> list[dict[str, str]]:
        rows = self._rows(data)
        require_valid(all(len(row) == len(self.columns) for row in rows))
        return [dict(zip(self.columns, row)) for row in rows]

    def parse(self, raw: bytes) -> dict[str, str]:
        (row,) = self._rows(raw)
        if len(row) != len(self.columns):
            wanted = f"{len(self.columns)} columns expected ({', '.join(self.columns)})"
            raise ValueError(f"{wanted}, got {len(row)}")
        return dict(zip(self.columns, row))

    def _rows(self, data: bytes) -> list[list[str]]:
        """The fields of each row, however many. Raises ValueError with what is wrong."""
        text = as_text(data)
        if not self.quote or self.quote not in data:
            text = text.replace("\r\n", "\n")
            require_valid(not self.quote or "\r" not in text, LONE_RETURN)
            return [line.split(self.delimiter) for line in text.split("\n") if line]
        outside = data.split(self.quote)[::2]  # of quotes; csv accepts one in the middle of a field
        before_a_field = (self.delimiter.encode(), b"\n")
        require_valid(all(part.endswith(before_a_field) for part in outside[:-1] if part), STRAY)
        require_valid(not any(b"\r" in p.replace(b"\r\n", b"") for p in outside), LONE_RETURN)
        csv.field_size_limit(sys.maxsize)  # `longest_record_bytes` bounds what is read
        lines = io.StringIO(text, newline="\n")
        try:
            return list(filter(None, csv.reader(lines, delimiter=self.delimiter, strict=True)))
        except csv.Error as error:
            raise ValueError(f"{error}; {PLAIN_QUOTES}") from error


# The class that reads files with this suffix; one more format is one more line.
FORMATS: dict[str, type[FileStream]] = {
    ".txt": TextLines,
    ".csv": Table,
    ".tsv": Table,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
}


def open_source(path: Path, config: StreamConfig | None = None, **settings) -> FileStream:
    """The stream for `path`, chosen by its suffix; with a `delimiter`, any file is a table."""
    if settings.get("delimiter"):
        return Table(path, config, **settings)
    require_known_format(path)
    return FORMATS[Path(path).suffix.lower()](path, config, **settings)


def require_known_format(path: Path) -> None:
    """Raise DatasetError for a file whose suffix has no format."""
    suffix = Path(path).suffix.lower()
    if suffix == ".json":
        lines = Path(path).with_suffix(".jsonl").name
        raise DatasetError(
            f"{path}: JSON is read with one object a line, as {lines}. An array is converted once: "
            f'python -c "from kit.streams.formats import array_to_lines as convert; convert('
            f"'{path}', '{lines}')\""
        )
    if suffix not in FORMATS:
        raise DatasetError(
            f"{path}: unknown format `{suffix}`. Known: {' '.join(FORMATS)}. Save the file as one "
            "of these, pass a `delimiter` if it is a table, or add a format (docs/extending.md)."
        )


def rows(path: Path) -> Iterator[tuple[int, dict | str | BadRecord]]:
    """(line number, record or BadRecord) in the order of the file, in constant memory."""
    return open_source(path, on_bad_record=lambda record: None).rows()


def array_to_lines(source: Path, target: Path) -> None:
    """Write the objects of a JSON array as JSON Lines, which is read without loading all of it.

    Raises DatasetError for a file that is not an array of objects.
    """
    try:
        records = parse_array(Path(source).read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        raise DatasetError(f"{source} is not a JSON array of objects: {error}.") from error
    with atomic_path(Path(target)) as part, open(part, "wb") as file:
        for record in records:
            file.write(dumps(record, option=OPT_APPEND_NEWLINE))
