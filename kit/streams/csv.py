"""Tables of text (CSV, TSV, LJSpeech's "|") as streams of rows, every value a string.

"001" is no 1 and "NA" is not nothing. With quoting (RFC 4180) a field in double quotes may hold
newlines; whether a block begins inside quotes is known from one pass that counts them. A quote
where none may stand would shift all that follows, so it is a Fault and never guessed at.

Not the csv module on each block: with the same dicts at its end that took 1.9 times as long (1.5
times where a fifth is quoted), and it takes a stray quote for a letter.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from kit.base.files import digest
from kit.streams.file import StreamError
from kit.streams.lines import TAIL_BYTES, LineSource, as_text, bare, require_plain, unix_ends
from kit.streams.position import StreamConfig

DELIMITERS = {".csv": ",", ".tsv": "\t"}
NOT_CLOSED = "a double quote is never closed"
LONE_RETURN = "a carriage return that ends no line stands outside quotes"
STRAY = "a double quote stands inside a field that does not begin with one"


class Table(LineSource):
    """Rows of a table as `{column: value}`; empty lines are passed over.

    `columns=None` takes them from the first line. `delimiter=None`: a tab for .tsv, else a comma.
    With `quoting`, fields may stand in double quotes and hold delimiters, newlines and doubled
    quotes; LJSpeech and Common Voice tables have no quoting. Raises StreamError for an unusable
    header and, without `bad`, for quotes that are never closed.
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
        self.delimiter = delimiter or DELIMITERS.get(self.file.path.suffix.lower(), ",")
        self.quote = b'"' if quoting else b""
        self.columns = self._header() if columns is None else list(columns)
        self._check_settings()
        self.format = f"table {digest(self.columns, self.delimiter, quoting)}"
        if quoting:
            self.inside = self.open_quotes()
            if self.inside[-1] and not self.bad:
                raise StreamError(f"{self.file.path}: {self._advice(NOT_CLOSED)}.")

    def _header(self) -> list[str]:
        with self.file.opened() as read:
            raw = self._whole(read, self.begin, read(self.begin, TAIL_BYTES), 0, 0)
        self.begin += len(raw)
        try:
            return self._fields(bare(raw))
        except ValueError as why:
            raise StreamError(f"{self.file.path}, line 1, the header: {why}.") from why

    def _check_settings(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n\0':
            raise StreamError(
                f"{self.file.path}: delimiter must be one character that is neither a double quote "
                f"nor a line end, got {self.delimiter!r}."
            )
        if not all(self.columns) or len(set(self.columns)) < len(self.columns) or not self.columns:
            raise StreamError(
                f"{self.file.path} needs a header of different, non-empty column names in line 1, "
                f"got {self.columns}. If it has no header, pass columns=[...]."
            )

    def _advice(self, reason: str) -> str:
        return f"{reason}; if double quotes mean nothing in this table, pass quoting=False"

    def parse_all(self, data: bytes) -> list[dict[str, str]]:
        # Bytes are searched and replaced faster than text of two bytes a letter: decode last.
        require_plain(b"\0" not in data)
        data, quoted = self._lift(data)
        data = unix_ends(data)
        fields = self._split(data)
        if b"\0" in data:
            for i in [i for i, field in enumerate(fields) if field < "\1"]:
                fields[i] = put_back(fields[i], quoted)
            require_plain(next(quoted, None) is None, STRAY)  # some NUL stands inside a field
        return row_maker(tuple(self.columns))(zip(*[iter(fields)] * (len(self.columns) + 1)))

    def _split(self, data: bytes) -> list[str]:
        """All fields of all rows in one list, "\n" after each row; Doubt if one is no row."""
        mark = self.delimiter
        width = len(self.columns) + 1
        marked = data.replace(b"\n", f"{mark}\n{mark}".encode())
        fields = [*marked.decode().split(mark), "\n"]
        rows = data.count(b"\n") + 1
        require_plain(len(fields) == rows * width)
        require_plain(fields[width - 1 :: width].count("\n") == rows)
        require_plain(width > 2 or "" not in fields)  # an empty line is no row of one column
        return fields

    def _lift(self, data: bytes) -> tuple[bytes, Iterator[bytes]]:
        """`data` with a NUL for each stretch between quotes, and these stretches."""
        parts = data.split(self.quote) if self.quote and self.quote in data else [data]
        require_plain(len(parts) % 2 == 1, NOT_CLOSED)
        outside = b"\0".join(parts[::2])
        if self.quote and b"\r" in outside:
            require_plain(b"\r" not in outside.replace(b"\r\n", b""), LONE_RETURN)
        return outside, iter(parts[1::2])

    def parse(self, raw: bytes) -> dict[str, str]:
        values = self._fields(raw)
        expected = len(self.columns)
        if len(values) != expected:
            names = ", ".join(self.columns)
            raise ValueError(f"{expected} columns expected ({names}), got {len(values)}")
        return dict(zip(self.columns, values))

    def _fields(self, raw: bytes) -> list[str]:
        """The values of one row, of however many columns."""
        text = as_text(raw)
        if not self.quote:
            return text.split(self.delimiter)
        try:
            outside, quoted = self._lift(raw)
            fields = outside.decode().split(self.delimiter)
            return [put_back(field, quoted) if "\0" in field else field for field in fields]
        except ValueError as why:
            raise ValueError(self._advice(str(why))) from why


@cache
def row_maker(columns: tuple[str, ...]) -> Callable[[Iterator[tuple]], list[dict[str, str]]]:
    """A function from rows (values, then a line end) to dicts of `columns`.

    Compiled for them, as namedtuple's are: a written-out dict is made in a third of the time that
    `dict(zip(columns, row))` takes, which would be most of the time of reading a table.
    """
    names = [f"value{i}" for i in range(len(columns))]
    items = ", ".join(f"{column!r}: {name}" for column, name in zip(columns, names))
    return eval(f"lambda rows: [{{{items}}} for {', '.join(names)}, _ in rows]")


def put_back(field: str, quoted: Iterator[bytes]) -> str:
    """The value of a field in quotes; two stretches that touch were a doubled quote."""
    if field == "\0":
        return next(quoted).decode()
    require_plain(not field.strip("\0"), STRAY)
    return b'"'.join([next(quoted) for _ in field]).decode()
