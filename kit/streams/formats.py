"""Formats of records: plain text, JSON Lines, tables (CSV, TSV, LJSpeech's "|").

Lines end at "\\n" or "\\r\\n" and nowhere else: a lone "\\r" or U+2028 is an ordinary character.
"""

import csv
import sys
from pathlib import Path

from orjson import OPT_APPEND_NEWLINE, dumps, loads

from kit.base.errors import DatasetError
from kit.base.files import atomic_path, digest
from kit.streams.stream import LineStream, StreamConfig, unix_ends

QUOTED = (",", ";")  # delimiters of tables whose fields may be in double quotes


def as_text(raw: bytes) -> str:
    """`raw` decoded. Raises ValueError with what is wrong and where."""
    if b"\0" in raw:
        raise ValueError(f"a NUL byte at its byte {raw.index(0)}")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise ValueError(f"not valid UTF-8: 0x{byte:02x} at its byte {error.start}") from error


class TextLines(LineStream):
    """The lines of a text file as `str`, without their ends; an empty line is an empty string."""

    format = "text lines"
    parse = staticmethod(as_text)

    def parse_all(self, data: bytes) -> list[str]:
        return as_text(unix_ends(data)).split("\n")


class JsonLines(LineStream):
    """The objects of a JSON Lines file, one a line, as `dict`; blank lines are skipped."""

    format = "JSON lines"
    blank = b" \t\r\n"

    def parse(self, raw: bytes) -> dict:
        try:
            record = loads(raw)
        except ValueError as error:
            raise ValueError(f"broken JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"a JSON object expected, got {type(record).__name__}")
        return record

    def parse_all(self, data: bytes) -> list[dict]:
        records = [loads(line) for line in data.split(b"\n") if line.strip()]
        if not set(map(type, records)) <= {dict}:
            raise ValueError("a line is not an object")
        return records


class Table(LineStream):
    """Rows of a table as `{column: value}`, all strings, a line each; empty lines are skipped.

    `columns=None` takes them from the first line. `delimiter=None`: a tab for .tsv, else a comma.
    With a comma or semicolon, fields in double quotes may hold delimiters and doubled quotes, but
    no newlines; with a tab or |, a double quote is a letter, as LJSpeech and Common Voice have it.
    Raises DatasetError for an unusable header.
    """

    blank = b"\r\n"

    def __init__(
        self,
        path: Path,
        config: StreamConfig | None = None,
        *,
        columns: list[str] | None = None,
        delimiter: str | None = None,
        **hooks,
    ):
        super().__init__(path, config, **hooks)
        suffix = self.file.path.suffix.lower()
        self.delimiter = delimiter or ("\t" if suffix == ".tsv" else ",")
        self.columns = self._header() if columns is None else list(columns)
        if not all(self.columns) or len(set(self.columns)) < len(self.columns) or not self.columns:
            raise DatasetError(
                f"{self.file.path} needs a header of different, non-empty column names in line 1, "
                f"got {self.columns}. Name each column there, that of the text `text`; in Python, "
                "columns=[...] does as well."
            )
        self.format = f"table {digest(self.columns, self.delimiter, self.delimiter in QUOTED)}"

    def _header(self) -> list[str]:
        with self.file.opened() as read:
            raw = self.to_line_end(read, self.begin, b"", 0)
        self.begin += len(raw)
        try:
            return next(iter(self._fields(raw)), [])
        except ValueError as error:
            raise DatasetError(f"{self.file.path}, line 1, the header: {error}.") from error

    def parse(self, raw: bytes) -> dict[str, str]:
        (record,) = self.parse_all(raw)
        return record

    def parse_all(self, data: bytes) -> list[dict[str, str]]:
        records = []
        for row in self._fields(data):
            if len(row) != len(self.columns):
                wanted = f"{len(self.columns)} columns expected ({', '.join(self.columns)})"
                raise ValueError(f"{wanted}, got {len(row)}")
            records.append(dict(zip(self.columns, row)))
        return records

    def _fields(self, data: bytes) -> list[list[str]]:
        """Return the fields of each line. Raises ValueError with what is wrong."""
        lines = [line for line in as_text(unix_ends(data)).split("\n") if line]
        if self.delimiter not in QUOTED:
            return [line.split(self.delimiter) for line in lines]
        if any(line.count('"') % 2 for line in lines):
            raise ValueError(
                "a double quote is never closed in this line: a row is one line (JSON Lines hold "
                "texts with line ends)"
            )
        csv.field_size_limit(sys.maxsize)  # `longest_record_bytes` bounds what is read
        try:
            return list(csv.reader(lines, delimiter=self.delimiter, strict=True))
        except csv.Error as error:
            raise ValueError(str(error)) from error


# The class that reads files with this suffix; one more format is one more line.
FORMATS: dict[str, type[LineStream]] = {
    ".txt": TextLines,
    ".csv": Table,
    ".tsv": Table,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
}


def open_source(path: Path, config: StreamConfig | None = None, **settings) -> LineStream:
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


def array_to_lines(source: Path, target: Path) -> None:
    """Write the objects of a JSON array as JSON Lines, which is read without loading all of it.

    Raises DatasetError for a file that is not an array of objects.
    """
    try:
        records = loads(Path(source).read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        raise DatasetError(f"{source} is not JSON: {error}.") from error
    if not isinstance(records, list) or not set(map(type, records)) <= {dict}:
        raise DatasetError(f"{source} is not a JSON array of objects.")
    with atomic_path(Path(target)) as part, open(part, "wb") as file:
        for record in records:
            file.write(dumps(record, option=OPT_APPEND_NEWLINE))
