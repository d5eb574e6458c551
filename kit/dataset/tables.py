"""Read a dataset's tables: LJSpeech's, those with names for their columns, and JSON Lines.

Commas and semicolons separate fields that may be in double quotes (the csv module); in tables
separated by | or tabs a double quote is a letter, as LJSpeech and Common Voice have it. Text is
UTF-8, or UTF-16 with its byte order mark. A line that cannot be used says why.
"""

import collections
import csv
import dataclasses
import io
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from kit.audio.container import SUFFIXES
from kit.base.errors import DatasetError
from kit.base.formatting import shorten
from kit.dataset.columns import (
    Columns,
    Form,
    columns_in_order,
    named_columns,
    parse_setting,
    roles_of,
    shown_row,
    unclear_table,
)
from kit.settings import ManifestConfig
from kit.streams.formats import QUOTED, JsonLines
from kit.streams.stream import UTF_16, BadRecord, require_text
from kit.text.normalize import letters

JSON_SUFFIXES = (".jsonl", ".ndjson")
SEPARATORS = {"|": "|", "\t": "a tab", ";": "a semicolon", ",": "a comma"}  # and their names
SAMPLE_ROWS = 400  # rows that are looked at, at most
CORRECT_ENCODING = "save the table as UTF-8 (in Excel: CSV UTF-8)"
Cells = tuple[int, list[str], tuple[str, str]]  # first line of a row, its cells, (reason, fix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row: {column: value}, or the reason why it cannot be used."""

    line: int  # its first, from 1
    values: dict
    problem: str = ""
    fix: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    path: Path
    columns: Columns
    separator: str = ""  # "": an object a line
    quoted: bool = False
    has_header: bool = False

    def rows(self) -> Iterator[Row]:
        if not self.separator:
            for line, record in JsonLines(self.path).rows():
                yield self._json_row(line, record)
            return
        split = _quoted_rows if self.quoted else _plain_rows
        rows = itertools.islice(split(self.path, self.separator), self.has_header, None)
        for row, following in itertools.pairwise(itertools.chain(rows, [None])):
            yield self._row(*row, following)

    def _row(
        self, line: int, cells: list[str], problem: tuple[str, str], following: Cells | None
    ) -> Row:
        names = self.columns.names
        if not any(cells[len(names) :]):
            cells = cells[: len(names)]
        reason, fix = problem
        if not reason and len(cells) != len(names):
            reason = f"{len(names)} columns expected ({self.columns}), got {len(cells)}"
            mark = SEPARATORS[self.separator]
            fix = f"is there {mark} or a line end in its text? Take it out, or quote it"
        elif not reason and not self.quoted and following and len(following[1]) == 1:
            reason = f"line {following[0]} looks like the rest of its text"
            fix = "write the text in one line"
        return Row(line=line, values=dict(zip(names, cells)), problem=reason, fix=fix)

    def _json_row(self, line: int, record: dict | BadRecord) -> Row:
        if isinstance(record, BadRecord):
            return Row(line=line, values={}, problem=record.reason)
        audio = self.columns.value(record, "audio") or self.columns.value(record, "id")
        text = self.columns.value(record, "text")
        reason = ""
        if "rejected" in record and not audio:  # by what wrote the table from Parquet files
            reason = str(record["rejected"])
        elif not (audio and text and isinstance(audio, str | int) and isinstance(text, str)):
            types = ", ".join(f"{key}: {type(value).__name__}" for key, value in record.items())
            reason = f"`audio` and `text`, both strings, expected; got {types or 'nothing'}"
        return Row(line=line, values=record, problem=reason)


def open_table(path: Path, config: ManifestConfig) -> Table:
    """Find out how a table is written, by its first line or `config.columns`.

    Raises DatasetError for a file that is no table, and where that does not say it: with three rows
    and the setting to write.
    """
    form = parse_setting(config.columns)
    if form.json or path.suffix.lower() in JSON_SUFFIXES:
        return _open_json(path, form, config.columns)
    lines = filter(str.strip, iter_lines(path))
    # Of a line with carriage returns alone inside, the first part is looked at.
    head = [line.rstrip("\r\n").split("\r")[0] for line in itertools.islice(lines, SAMPLE_ROWS)]
    if not head:
        raise _no_rows(path)
    if form.roles:
        return _open_by_setting(path, head, form, config.columns)
    reasons = {}
    for separator in SEPARATORS:
        names = _split_line(head[0], separator)
        columns, reasons[separator] = named_columns(names)
        if columns:
            quoted = separator in QUOTED
            how = {"separator": separator, "quoted": quoted, "has_header": True}
            return Table(path=path, columns=columns, **how)
    likely = max(SEPARATORS, key=lambda separator: len(_split_line(head[0], separator)))
    if "|" in head[0]:  # the others are signs of a text, too
        likely = "|"
    rows = [_split_line(line, likely) for line in head]
    if "|" in head[0] and _is_ljspeech(path, Path(config.audio_root or path.parent)):
        return _open_ljspeech(path, rows)
    raise unclear_table(path, rows, reasons[likely])


def _is_ljspeech(path: Path, root: Path) -> bool:
    """Tell whether a table is beside wavs/, or is a metadata.csv beside its recordings."""
    if root.name == "wavs" or (root / "wavs").is_dir():
        return True
    names = os.listdir(root) if root.is_dir() else []
    has_recordings = any(Path(name).suffix.lower() in SUFFIXES for name in names)
    return path.stem.lower().startswith("metadata") and has_recordings


def _open_by_setting(path: Path, head: list[str], form: Form, setting: str) -> Table:
    wanted = len(form.roles)
    widest = []
    for separator in [form.separator] if form.separator else SEPARATORS:
        quoted = form.quoted or separator in QUOTED
        cells = _split_line(head[0], separator, quoted)
        if len(cells) >= wanted and not any(cells[wanted:]):
            return Table(
                path=path,
                columns=columns_in_order(form.roles, list(map(str, range(1, wanted + 1)))),
                separator=separator,
                quoted=quoted,
                has_header=any(roles_of(cells)[role] for role in ("audio", "text", "id")),
            )
        widest = max(widest, cells, key=len)
    raise DatasetError(
        f"{path} has {len(widest)} columns, but columns is {setting!r}, which names {wanted}. Its "
        f"first row: {shown_row(widest)}. Name each column; - leaves one out."
    )


def _open_ljspeech(path: Path, rows: list[list[str]]) -> Table:
    """The table of an LJSpeech folder: id|text or id|text|normalised in most rows."""
    widths = collections.Counter(max(2, len("|".join(row).rstrip("|").split("|"))) for row in rows)
    width = widths.most_common(1)[0][0]
    if width > 3:
        raise unclear_table(path, rows, f"{width} columns without names; LJSpeech has 2 or 3")
    pairs = [row[1:] for row in rows if len(row) == 3 and row[2]]
    if width == 3 and 2 * sum(_share_words(*pair) for pair in pairs) < len(pairs):
        raise unclear_table(path, rows, "the third is not the second one normalised")
    names = ["id", "text", "normalised"][:width]
    columns = columns_in_order(["id", "text", "text"][:width], names)
    return Table(path=path, columns=columns, separator="|")


def _share_words(one: str, other: str) -> bool:
    words = [set(letters(text.lower()).split()) for text in (one, other)]
    fewest = min(map(len, words))
    return one == other or (fewest > 0 and 3 * len(words[0] & words[1]) >= fewest)


def _open_json(path: Path, form: Form, setting: str) -> Table:
    sample = list(itertools.islice(JsonLines(path).rows(), SAMPLE_ROWS))
    records = [record for _, record in sample if not isinstance(record, BadRecord)]
    if not sample:
        raise _no_rows(path)
    if not records:
        raise DatasetError(
            f"{path} has no object with audio and text in its first lines: {sample[0][1].reason}. "
            'Expected a line such as {"audio": "a.wav", "text": "..."} for each recording.'
        )
    names = list(dict.fromkeys(name for record in records for name in record))
    if form.roles and len(form.roles) != len(names):
        raise DatasetError(
            f"{path} has {len(names)} keys ({', '.join(names)}), but columns is {setting!r}, which "
            f"names {len(form.roles)}. Name each, in this order; - leaves one out."
        )
    if form.roles:
        return Table(path=path, columns=columns_in_order(form.roles, names))
    columns, reason = named_columns(names)
    if columns is None:
        rows = [[f"{name}: {record.get(name)}" for name in names] for record in records]
        raise unclear_table(path, rows, reason)
    return Table(path=path, columns=columns)


def _no_rows(path: Path) -> DatasetError:
    return DatasetError(
        f"{path} has {path.stat().st_size:,} bytes and no rows: expected id|text, or a first line "
        "with names such as audio and text, then a line for each recording."
    )


# --- from bytes to rows -------------------------------------------------------------------------


def iter_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file with their ends; bytes that are not UTF-8 as surrogates.

    UTF-16 is known by its byte order mark, as Excel and Windows write it.
    """
    with open(path, "rb") as file:
        first_bytes = file.read(32)
        require_text(path, first_bytes)
        file.seek(0)
        is_utf16 = first_bytes.startswith(UTF_16)
        encoding, errors = ("utf-16", "replace") if is_utf16 else ("utf-8", "surrogateescape")
        # Only \n ends a line: others, such as U+2028, may be in a text.
        for line in io.TextIOWrapper(file, encoding, errors, newline="\n"):
            yield line.removeprefix("\ufeff").removesuffix("\n") + "\n"


def read_texts(folder: Path) -> dict[str, str]:
    """Return {id: text} of metadata.csv in a folder that the kit made. Raises DatasetError."""
    path = Path(folder) / "metadata.csv"
    texts: dict[str, str] = {}
    for number, cells, (reason, _) in _plain_rows(path, "|") if path.is_file() else ():
        if reason or len(cells) < 2 or not cells[0]:
            problem = reason or f"got {shorten('|'.join(cells), 60)}"
            raise DatasetError(f"{path}, line {number}: expected `id|text` in UTF-8, {problem}.")
        texts[cells[0]] = "|".join(cells[1:])
    return texts


def _split_line(line: str, separator: str, quoted: bool = False) -> list[str]:
    """Split the first line of a table; a line with broken quotes is one cell."""
    if quoted or separator in QUOTED:
        try:
            cells = next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])
        except csv.Error:
            cells = [line]
    else:
        cells = line.split(separator)
    return [cell.strip() for cell in cells]


def _plain_rows(path: Path, separator: str) -> Iterator[Cells]:
    for number, line in enumerate(iter_lines(path), 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        problem = encoding_problem(line)
        # Else one row would get another's text.
        if not problem[0] and sum(separator in part for part in text.split("\r")) > 1:
            reason = "a carriage return between what looks like two rows"
            problem = reason, "save the table with the line ends of Unix, or of Windows"
        yield number, [cell.strip() for cell in text.split(separator)], problem


def _quoted_rows(path: Path, separator: str) -> Iterator[Cells]:
    lines = iter_lines(path)
    reader = csv.reader(lines, delimiter=separator, strict=True, skipinitialspace=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            return
        except csv.Error as error:
            reason = f"broken quotes ({error})"
            if reader.line_num > line:
                reason += f": a double quote opens in line {line} and the row ends in line "
                reason += str(reader.line_num)
            yield line, [], (reason, 'write a double quote inside a quoted field twice: ""')
            continue
        if any(cells):
            yield line, cells, encoding_problem("".join(cells))


def encoding_problem(text: str) -> tuple[str, str]:
    """Return (reason, fix) for bytes that are not UTF-8 and for NULs, else empty strings."""
    try:
        text.encode(errors="surrogateescape").decode()
    except UnicodeDecodeError as error:
        return f"not valid UTF-8: {error.reason} at byte {error.start}", CORRECT_ENCODING
    return ("a NUL byte", CORRECT_ENCODING) if "\0" in text else ("", "")
