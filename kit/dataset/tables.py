"""Read a dataset's table whatever tool wrote it: encoding, separator and quoting are recognised.

LJSpeech's tables are not quoted and their texts have double quotes in them; pandas, Excel and the
Hugging Face hub quote fields that hold a separator or a line end. A table is only taken for a
quoted one if that gives more rows of equal length.
"""

import collections
import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path

from kit.base.errors import DatasetError
from kit.dataset.columns import names_columns
from kit.streams.file import special_file_kind

SEPARATORS = ("|", "\t", ";", ",")
NAMES = {"|": "|", "\t": "a tab", ";": "a semicolon", ",": "a comma"}
QUOTED = (";", ",")  # separators with which texts are always quoted
SAMPLE_ROWS = 400  # a table's rows that are looked at, from its beginning to its end
CORRECT_ENCODING = "save the table as UTF-8 (in Excel: CSV UTF-8)"
UNIX_ENDS = "save the table with the line ends of Unix, or of Windows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row: its cells, or the reason why it cannot be used."""

    line: int  # its first, from 1
    cells: list[str]
    problem: str = ""
    cure: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawTable:
    """A table split into rows; `width` is the number of columns that most of them have."""

    path: Path
    separator: str
    rows: list[TableRow]
    width: int

    @property
    def good(self) -> list[TableRow]:
        """The rows that have all columns, and no others."""
        return [row for row in self.rows if not row.problem and len(row.cells) == self.width]

    def sample(self) -> list[list[str]]:
        """Return the cells of some good rows, spread over the table."""
        good = self.good
        step = max(1, len(good) // SAMPLE_ROWS)
        return [row.cells for row in good[::step]]


def read_table(
    path: Path, found: Callable[[str], bool], width: int = 0, max_bytes: int = -1
) -> RawTable:
    """Return the table at `path`, split by the separator that makes most sense of it.

    That is the one that gives a header with known names, or most rows of equal length of which a
    column names recordings; `found` tells whether a value does. With a `width` only ways that give
    so many columns are tried, if there are any; with `max_bytes` only its beginning is read. Raises
    DatasetError for a file that is no text.
    """
    lines = read_lines(path, max_bytes)
    ways = [split_table(path, lines, separator, found) for separator in SEPARATORS]
    if width and any(way.width == width for way in ways):
        ways = [way for way in ways if way.width == width]
    rates = [_rate(way, found) if way.width > 1 else 0.0 for way in ways]
    if max(rates) > 0:
        return ways[rates.index(max(rates))]
    several = [way for way in ways if way.width > 1 and len(way.good) == len(way.rows)]
    return (several or ways)[0]


def _rate(table: RawTable, found: Callable[[str], bool]) -> float:
    sample = table.sample()
    if not sample:
        return 0.0
    named = names_columns(table.good[0].cells)
    share = max(hits(table, sample, found)) / len(sample)
    return (named + share) * len(table.good) / len(table.rows)


def hits(table: RawTable, sample: list[list[str]], found: Callable[[str], bool]) -> list[int]:
    """Return for each column how many of its values name a recording."""
    return [sum(found(cells[i]) for cells in sample) for i in range(table.width)]


def read_lines(path: Path, max_bytes: int = -1) -> list[str]:
    """Return the lines of a text file with their ends; bytes that are not UTF-8 as surrogates.

    UTF-16 is known by its byte order mark, as Excel and Windows write it.
    """
    kind = special_file_kind(path)
    if kind:
        raise DatasetError(f"{path} is {kind}, not a file: copy its content into a file.")
    with open(path, "rb") as file:
        data = file.read(max_bytes)
    if data.startswith(b"PK\x03\x04"):
        raise DatasetError(f"{path} is a spreadsheet or an archive: export it as CSV UTF-8.")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = data.decode("utf-16", errors="replace")
    else:
        text = data.decode("utf-8", errors="surrogateescape")
    # Only \n ends a line: str.splitlines would also end one at U+2028 and others in a text.
    lines = [f"{line}\n" for line in text.split("\n")]
    if len(data) == max_bytes:
        lines.pop()  # it may continue
    return [line.removeprefix("\ufeff") for line in lines]


def split_table(
    path: Path, lines: list[str], separator: str, found: Callable[[str], bool]
) -> RawTable:
    """Split lines into rows, as quoted fields where the rows then fit together better."""
    if separator in QUOTED:
        return _counted(path, separator, _quoted_rows(lines, separator))
    literal = _counted(path, separator, _literal_rows(lines, separator))
    if not any('"' in line for line in lines):
        return literal
    quoted = _counted(path, separator, _quoted_rows(lines, separator))
    odd = len(literal.rows) - len(literal.good)
    firsts = [row.cells[0] for row in literal.good]
    all_quoted = bool(firsts) and all(len(c) > 2 and c[0] == c[-1] == '"' for c in firsts)
    # Lines that continue a quoted text name no recordings; those of a quotation in two texts do.
    starts = {row.line for row in quoted.rows}
    inner = [row.cells for row in literal.rows if row.line not in starts]
    continued = bool(inner) and not any(found(cell) for cells in inner for cell in cells)
    odd += all_quoted + continued
    if quoted.width > 1 and len(quoted.rows) - len(quoted.good) < odd and (continued or not inner):
        return quoted
    return literal


def _counted(path: Path, separator: str, rows: list[TableRow]) -> RawTable:
    """Find the usual number of columns; remove empty cells behind it."""
    counts = collections.Counter(len(row.cells) for row in rows if not row.problem)
    most = max(counts.values(), default=0)
    width = max((count for count, n in counts.items() if n == most), default=0)
    trimmed = []
    for row in rows:
        if len(row.cells) > width and not any(row.cells[width:]):
            row = dataclasses.replace(row, cells=row.cells[:width])
        trimmed.append(row)
    return RawTable(path=path, separator=separator, rows=trimmed, width=width)


def _literal_rows(lines: list[str], separator: str) -> list[TableRow]:
    rows = []
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        cells = [cell.strip() for cell in text.split(separator)]
        reason, cure = _encoding_problem(line)
        # Else one row would get another's text.
        if not reason and sum(separator in part for part in text.split("\r")) > 1:
            reason = "a carriage return between what looks like two rows"
            cure = UNIX_ENDS
        rows.append(TableRow(line=number, cells=cells, problem=reason, cure=cure))
    return rows


def _quoted_rows(lines: list[str], separator: str) -> list[TableRow]:
    reader = csv.reader(lines, delimiter=separator, strict=True, skipinitialspace=True)
    rows = []
    while True:
        line = reader.line_num + 1
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            return rows
        except csv.Error as error:
            last = reader.line_num
            reason = f"broken quotes ({error})"
            if last > line:
                reason += f": a double quote opens in line {line} and the row ends in line {last}"
            cure = 'write a double quote inside a quoted field twice: ""'
            rows.append(TableRow(line=line, cells=[], problem=reason, cure=cure))
            continue
        if any(cells):
            reason, cure = _encoding_problem("".join(cells))
            rows.append(TableRow(line=line, cells=cells, problem=reason, cure=cure))


def _encoding_problem(text: str) -> tuple[str, str]:
    """Return (reason, fix) for bytes that are not UTF-8 and for NULs, else empty strings."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            text.encode(errors="surrogateescape").decode()
        except UnicodeDecodeError as error:
            reason = f"not valid UTF-8: {error.reason} at byte {error.start}"
            return reason, CORRECT_ENCODING
    if "\0" in text:
        return "a NUL byte", CORRECT_ENCODING
    return "", ""
