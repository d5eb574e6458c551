"""Read a dataset's table: encoding, separator, quoting, header and columns are recognised.

LJSpeech's tables are not quoted, with double quotes in their texts; pandas, Excel and the Hugging
Face hub quote fields that hold a separator or a line end. A table is only taken for a quoted one if
that gives more rows of equal length.
"""

import collections
import csv
import dataclasses
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path

from kit.base.errors import DatasetError, KitError
from kit.base.files import special_file_kind
from kit.base.formatting import non_utf8_problem
from kit.dataset.columns import Columns, IsRecording, find_columns, is_header, parse_roles, role_of
from kit.dataset.data_report import Finding, Spool
from kit.dataset.recordings import (
    Record,
    Recordings,
    bad_row,
    canonical_split,
    choose_base,
    known_split,
    label_of,
    split_of,
    stays_inside,
)
from kit.settings import ManifestConfig
from kit.streams.formats import JsonLines, rows
from kit.streams.stream import BadRecord

TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".psv", ".list", ".lst", ".tab")
SEPARATORS = {"|": "|", "\t": "a tab", ";": "a semicolon", ",": "a comma"}  # and their names
QUOTED = (";", ",")  # separators with which texts are always quoted
SAMPLE_ROWS = 400  # a table's rows that are looked at, from its beginning to its end
HEAD_BYTES = 65536  # looked at, to see whether a file is a table of recordings
NO_TEXT = re.compile(r"[\d.,:\s-]*|\w+://\S*")
CORRECT_ENCODING = "save the table as UTF-8 (in Excel: CSV UTF-8)"
Lines = Callable[[], Iterator[str]]  # each call reads the file again


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row: its cells, or the reason why it cannot be used."""

    line: int  # its first, from 1
    cells: list[str]
    problem: str = ""
    fix: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawTable:
    """A table split into rows; `width` is the number of columns that most of them have."""

    path: Path
    separator: str
    width: int
    count: int  # of rows
    is_recording: IsRecording
    split: Callable[[], Iterator[TableRow]]  # reads the file again: rows may be millions

    def rows(self) -> Iterator[TableRow]:
        """Yield every row, without empty cells behind the last column."""
        for row in self.split():
            if len(row.cells) > self.width and not any(row.cells[self.width :]):
                row = dataclasses.replace(row, cells=row.cells[: self.width])
            yield row

    def good(self) -> Iterator[TableRow]:
        return (row for row in self.rows() if not row.problem and len(row.cells) == self.width)

    @cached_property
    def good_count(self) -> int:
        return sum(1 for _ in self.good())

    @cached_property
    def sample(self) -> list[list[str]]:
        """The cells of some good rows, spread over the table."""
        step = max(1, self.good_count // SAMPLE_ROWS)
        return [row.cells for row in itertools.islice(self.good(), None, None, step)]

    def most_recordings(self, sample: list[list[str]]) -> int:
        """Return how many values name a recording, in the column with the most of them."""
        counts = (sum(map(self.is_recording, column)) for column in zip(*sample, strict=True))
        return max(counts, default=0)

    @cached_property
    def rating(self) -> float:
        """How much sense this way to split a table makes, 0 to 2.

        One for a header with known names, and one for rows of equal length of which a column names
        recordings.
        """
        if self.width < 2 or not self.sample:
            return 0.0
        share = self.most_recordings(self.sample) / len(self.sample)
        return (is_header(self.sample[0]) + share) * self.good_count / self.count


def read_tables(tables: list[Path], config: ManifestConfig) -> Iterator[Record | Finding | str]:
    """Read tables with any separator, with or without a header, once their columns are known.

    Tables of the same shape are looked at together: a small one tells too little.
    """
    groups: dict[tuple, list[RawTable]] = {}
    checks = {}
    for path in tables:
        folders = _folders(path, config)
        is_recording = checks.setdefault(folders, _recording_check(*folders))
        raw = read_table(path, is_recording, len(parse_roles(config.columns)))
        first = [cell.lower() for row in itertools.islice(raw.rows(), 1) for cell in row.cells]
        header = first if is_header(first) else []
        groups.setdefault((raw.separator, raw.width, *header), []).append(raw)
    for group in groups.values():
        columns = None
        usable = [raw for raw in group if raw.width > 1 and raw.good_count]
        if usable:
            example = usable[0]
            first = next(example.good()).cells
            sample = [cells for raw in usable for cells in raw.sample]
            check = example.is_recording
            columns = find_columns(example.path, sample, first, config.columns, check)
            plain = example.separator == "|" and columns.audio == 0 and not columns.header
            if not (plain and columns.texts in ((1,), (2, 1)) and columns.speaker in (None, 3)):
                header = ", with a header" if columns.header else ""  # not as LJSpeech has it
                yield f"columns {columns} separated by {SEPARATORS[example.separator]}{header}"
        for raw in group:
            if columns is None:
                for row in raw.rows():
                    yield _wrong_width(row, raw, None, label_of(raw.path, tables))
            else:
                yield from _records(raw, columns, tables, config)


def _folders(table: Path, config: ManifestConfig) -> tuple[Path, Path]:
    """Return the folder that recordings must be in, and the one that paths usually start from."""
    folder = Path(config.audio_root) if config.audio_root else table.parent
    usual = [folder / name for name in ("wavs", "clips") if (folder / name).is_dir()]
    return folder, usual[0] if usual else folder


def _recording_check(folder: Path, usual: Path) -> IsRecording:
    places = [Recordings(base) for base in dict.fromkeys((usual, folder))]
    return lambda value: any(place.lists(value) for place in places)


def _records(
    raw: RawTable, columns: Columns, tables: list[Path], config: ManifestConfig
) -> Iterator[Record | Finding]:
    label = label_of(raw.path, tables)
    split = split_of(raw.path, tables)
    folder, usual = _folders(raw.path, config)
    names = [cells[columns.audio] for cells in raw.sample]
    base, in_subfolders = choose_base(usual, folder, names)
    prefix = label[: label.rfind("/") + 1]

    def cell(row: TableRow, index: int | None) -> str:
        return "" if index is None else row.cells[index]

    has_header = bool(columns.header) and tuple(next(raw.rows()).cells) == columns.header
    audio_folder = has_header and columns.header[columns.audio].lower() == "file_name"
    rows = itertools.chain(itertools.islice(raw.rows(), has_header, None), [None])
    for row, following in itertools.pairwise(rows):
        if not row.problem and following and _continues(row, following, raw):
            reason = f"line {following.line} looks like the rest of its text"
            fix = "write the text in one line, or in double quotes"
            yield bad_row(label, row.line, row.cells[columns.audio], reason, fix)
            continue
        if row.problem or len(row.cells) != raw.width:
            yield _wrong_width(row, raw, columns, label)
            continue
        audio = row.cells[columns.audio]
        own_split = cell(row, columns.split)
        if audio_folder and not own_split and known_split(audio.split("/")[0]):
            own_split = audio.split("/")[0]  # as the Hugging Face hub reads its AudioFolder
        name = cell(row, columns.id) or (audio if stays_inside(audio) else "")
        yield Record(
            file=label,
            line=row.line,
            id=prefix + name if name and "\\" not in name else "",
            audio=audio,
            base=base,
            text=next((row.cells[i] for i in columns.texts if row.cells[i]), ""),
            speaker=cell(row, columns.speaker),
            split=canonical_split(own_split) or split,
            in_subfolders=in_subfolders,
        )


def _continues(row: TableRow, after: TableRow, raw: RawTable) -> bool:
    """Tell whether the line after a row is the rest of the row's text."""
    if after.problem or len(row.cells) != raw.width:
        return False
    opened = any(c.startswith('"') and c.count('"') % 2 for c in row.cells)
    if len(after.cells) < raw.width or (opened and raw.separator not in QUOTED):
        return not any(map(raw.is_recording, after.cells))
    return False


def _wrong_width(row: TableRow, raw: RawTable, columns: Columns | None, label: str) -> Finding:
    """Return the finding about a row that is broken, or has other columns than the others."""
    name = row.cells[0] if row.cells else ""
    if row.problem:
        return bad_row(label, row.line, name, row.problem, row.fix)
    if columns is None:
        reason = f"2 to 4 columns expected (id|text|normalised|speaker), got {len(row.cells)}"
        fix = "write id|text: no separator (| , ; or a tab) was found"
    else:
        reason = f"{raw.width} columns expected ({columns}), got {len(row.cells)}"
        mark = SEPARATORS[raw.separator]
        fix = f"is there {mark} or a line end in its text? Take it out, or quote it"
    return bad_row(label, row.line, name, reason, fix)


def tables_of_recordings(files: list[Path], audio_root: Path | None) -> list[Path]:
    """Return the files of which most rows name recordings, unlike a README's; by their beginning.

    All are in one folder. Where some have a text, those with figures and paths alone are left out.
    """
    if not files:
        return []
    root = str(audio_root) if audio_root else ""
    is_recording = _recording_check(*_folders(files[0], ManifestConfig(audio_root=root)))
    tables = []
    with_text = []  # those of which most rows have a text, too
    for path in files:
        try:
            raw = read_table(path, is_recording, max_bytes=HEAD_BYTES)
        except (DatasetError, OSError):
            continue
        sample = raw.sample[1:] or raw.sample  # without a header
        if raw.width > 1 and len(sample) > 0 and 2 * raw.most_recordings(sample) >= len(sample):
            tables.append(path)
            columns = zip(*sample, strict=True)
            spoken = [sum(not NO_TEXT.fullmatch(cell) for cell in column) for column in columns]
            if sum(2 * count > len(sample) for count in spoken) > 1:  # the recording, and its text
                with_text.append(path)
    return with_text or tables


# --- from bytes to rows -------------------------------------------------------------------------


def read_table(
    path: Path, is_recording: IsRecording, width: int = 0, max_bytes: int = -1
) -> RawTable:
    """Return the table at `path`, split by the separator that makes most sense of it.

    That is the one with the best `rating`. With a `width` only ways that give so many columns are
    tried, if there are any; with `max_bytes` only its beginning is read. Raises DatasetError for a
    file that cannot be a table.
    """
    lines = partial(iter_lines, path, max_bytes)
    ways = []
    for separator in SEPARATORS:
        way = _split_table(path, lines, separator, is_recording)
        if way.rating >= 1 and width in (0, way.width):
            return way  # every row has all columns, and names a recording
        ways.append(way)
    ways = [way for way in ways if way.width == width] or ways
    best = max(ways, key=lambda way: way.rating)
    if best.rating > 0:
        return best
    several = [way for way in ways if way.width > 1 and way.good_count == way.count]
    return (several or ways)[0]


def iter_lines(path: Path, max_bytes: int = -1) -> Iterator[str]:
    """Yield the lines of a text file with their ends; bytes that are not UTF-8 as surrogates.

    UTF-16 is known by its byte order mark, as Excel and Windows write it. Behind the last line end
    is an empty line; what `max_bytes` cuts off is left out.
    """
    kind = special_file_kind(path)
    if kind:
        raise DatasetError(f"{path} is {kind}, not a file: copy its content into a file.")
    with open(path, "rb") as file:
        mark = file.read(4)
        if mark.startswith(b"PK\x03\x04"):
            raise DatasetError(f"{path} is a spreadsheet or an archive: export it as CSV UTF-8.")
        wide = mark.startswith((b"\xff\xfe", b"\xfe\xff"))  # UTF-16
        file.seek(0)
        data = io.BytesIO(file.read(max_bytes)) if max_bytes >= 0 else file
        cut = max_bytes >= 0 and data.getbuffer().nbytes == max_bytes
        encoding, errors = ("utf-16", "replace") if wide else ("utf-8", "surrogateescape")
        # Only \n ends a line: others, such as U+2028, may be in a text.
        line = "\n"
        for line in io.TextIOWrapper(data, encoding, errors, newline="\n"):
            if line.endswith("\n"):
                yield line.removeprefix("\ufeff")
        if not cut:
            yield "\n" if line.endswith("\n") else f"{line}\n".removeprefix("\ufeff")


def _split_table(path: Path, lines: Lines, separator: str, is_recording: IsRecording) -> RawTable:
    """Split lines into rows, as quoted fields where the rows then fit together better."""
    raw_table = partial(_raw_table, path, separator, is_recording)
    if separator in QUOTED:
        return raw_table(partial(_quoted_rows, lines, separator))
    literal = raw_table(partial(_literal_rows, lines, separator))
    if not any('"' in line for line in lines()):
        return literal
    quoted = raw_table(partial(_quoted_rows, lines, separator))
    odd = literal.count - literal.good_count
    firsts = (row.cells[0] for row in literal.good())
    all_quoted = bool(literal.good_count) and all(
        len(cell) > 2 and cell[0] == cell[-1] == '"' for cell in firsts
    )
    # Lines that continue a quoted text name no recordings; those of a quotation in two texts do.
    starts = {row.line for row in quoted.split()}
    inner = [row.cells for row in literal.rows() if row.line not in starts]
    continued = bool(inner) and not any(is_recording(cell) for cells in inner for cell in cells)
    odd += all_quoted + continued
    if quoted.width > 1 and quoted.count - quoted.good_count < odd and (continued or not inner):
        return quoted
    return literal


def _raw_table(path: Path, separator: str, is_recording: IsRecording, split: Callable) -> RawTable:
    """Count the rows and columns: the usual number, or a header's, without empty ones behind."""
    first = None
    widths = collections.Counter()
    filled = 0  # columns, up to the last one that is not always empty
    for row in split():
        first = first or row
        widths[-1 if row.problem else len(row.cells)] += 1
        if any(row.cells[filled:]):
            filled = max(i for i, cell in enumerate(row.cells, 1) if cell)
    count = widths.total()
    del widths[-1]
    width = max(widths, key=lambda width: (widths[width], width), default=0)
    if first and is_header(first.cells):
        width = len(first.cells)
    if filled < width:
        width = max(filled, min(width, 2))
    return RawTable(
        path=path,
        separator=separator,
        width=width,
        count=count,
        is_recording=is_recording,
        split=split,
    )


def _literal_rows(lines: Lines, separator: str) -> Iterator[TableRow]:
    for number, line in enumerate(lines(), 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        cells = [cell.strip() for cell in text.split(separator)]
        reason, fix = encoding_problem(line)
        # Else one row would get another's text.
        if not reason and sum(separator in part for part in text.split("\r")) > 1:
            reason = "a carriage return between what looks like two rows"
            fix = "save the table with the line ends of Unix, or of Windows"
        yield TableRow(line=number, cells=cells, problem=reason, fix=fix)


def _quoted_rows(lines: Lines, separator: str) -> Iterator[TableRow]:
    reader = csv.reader(lines(), delimiter=separator, strict=True, skipinitialspace=True)
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
            fix = 'write a double quote inside a quoted field twice: ""'
            yield TableRow(line=line, cells=[], problem=reason, fix=fix)
            continue
        if any(cells):
            reason, fix = encoding_problem("".join(cells))
            yield TableRow(line=line, cells=cells, problem=reason, fix=fix)


def encoding_problem(text: str) -> tuple[str, str]:
    """Return (reason, fix) for bytes that are not UTF-8 and for NULs, else empty strings."""
    try:
        text.encode(errors="surrogateescape").decode()
    except UnicodeDecodeError as error:
        return f"not valid UTF-8: {error.reason} at byte {error.start}", CORRECT_ENCODING
    return ("a NUL byte", CORRECT_ENCODING) if "\0" in text else ("", "")


# --- JSON -----------------------------------------------------------------------------------------

# The usual keys of JSON records, in the order in which they are preferred.
AUDIO_KEYS = (
    "audio audio_filepath path file_name filename audio_file audio_path file filepath wav wav_path"
).split()
TEXT_KEYS = "text sentence transcription transcript normalized_text".split()
SPEAKER_KEYS = "speaker speaker_id speaker_name spk client_id".split()
SPACE = b"\xef\xbb\xbf \r\n\t"  # before a JSON text


def json_tables(folder: Path) -> list[Path]:
    """Return the manifests; among files called .json, those of NeMo and not a configuration."""
    if (folder / "manifest.jsonl").is_file():
        return [folder / "manifest.jsonl"]
    lines = sorted(folder.glob("*.jsonl"))
    if lines:
        return lines
    recordings = Recordings(folder)
    files = [path for path in sorted(folder.glob("*.json")) if path.is_file()]
    # Whisper and Emilia write one for each recording.
    files = [path for path in files if not recordings.find(path.stem)]
    return [path for path in files if _is_manifest(path, recordings)]


def read_head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(4096)


def _is_manifest(path: Path, recordings: Recordings) -> bool:
    """Tell whether a .json file lists recordings, and is no configuration or one's own text."""
    head = read_head(path)
    if b'"audio_filepath"' in head:  # as NeMo names them
        return True
    if not head.lstrip(SPACE).startswith((b"{", b"[")):
        return False
    lines = itertools.islice(_json_rows(path), SAMPLE_ROWS)
    try:
        names = [_audio(values) for _, values in lines if isinstance(values, dict)]
    except KitError:
        return False
    return 2 * sum(bool(n) and recordings.lists(str(n)) for n in names) > len(names)


def read_json(tables: list[Path], config: ManifestConfig) -> Iterator[Record | Finding]:
    """Read one object a line with audio and text; several tables are splits by their names."""
    for table in tables:
        label = label_of(table, tables)
        split = "" if len(tables) == 1 else split_of(table, tables)
        lines = Spool(_json_rows(table))
        records = Spool(values for _, values in lines if isinstance(values, dict))
        names = [_audio(values) for values in records[:: max(1, len(records) // SAMPLE_ROWS)]]
        parts = {str(_audio(values)) for values in records if values.get("offset")}
        folder = Path(config.audio_root or table.parent)
        names = [name for name in names if isinstance(name, str)]
        base, in_subfolders = choose_base(folder, folder, names)
        for number, values in lines:
            if isinstance(values, BadRecord):
                yield bad_row(label, number, "", values.reason)
                continue
            reason, fix = _json_problem(values, parts)
            if reason:
                yield bad_row(label, number, str(values.get("id", "")), reason, fix)
                continue
            audio = _audio(values)
            speaker = _value(values, SPEAKER_KEYS, "speaker")
            if os.path.isabs(audio) and Path(audio).is_relative_to(base.absolute()):
                audio = str(Path(audio).relative_to(base.absolute()))
            name = values.get("id")
            if not name and stays_inside(audio) and "\\" not in audio:
                name = label[: label.rfind("/") + 1] + os.path.splitext(audio)[0]
            yield Record(
                file=label,
                line=number,
                id=str(name or ""),
                audio=audio,
                base=base,
                text=_value(values, TEXT_KEYS, "text"),
                speaker="" if speaker is None else str(speaker),
                split=canonical_split(str(values.get("split") or "")) or split,
                in_subfolders=in_subfolders,
            )


def _json_rows(table: Path) -> Iterator[tuple[int, dict | BadRecord]]:
    """Read JSON lines, which NeMo keeps in files called .json, an array, or an object of rows."""
    if table.suffix.lower() == ".json" and not special_file_kind(table):  # a pipe would wait
        records = _records_of_object(table)
        if records:
            return enumerate(records, 1)
        if read_head(table).lstrip(SPACE).startswith(b"{"):
            return JsonLines(table, on_bad_record=lambda record: None).rows()
    return rows(table)


def _records_of_object(path: Path) -> list[dict]:
    """Return the rows of {id: text}, {id: {...}} or {"data": [{...}, ...]}; [] for another file."""
    if path.stat().st_size > 2**26:  # too much to read at once
        return []
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        return []
    if not isinstance(values, dict):
        return []
    if all(isinstance(value, str) for value in values.values()):
        return [{"audio": name, "text": text} for name, text in values.items()]
    if all(isinstance(value, dict) for value in values.values()):
        return [{"audio": name} | value for name, value in values.items()]
    lists = [value for value in values.values() if isinstance(value, list) and value]
    return lists[0] if len(lists) == 1 and all(isinstance(v, dict) for v in lists[0]) else []


def _value(values: dict, keys: list[str], role: str) -> object:
    """Return the first value under one of `keys`, or under another name of this role."""
    keys = [*keys, *(key for key in values if role_of(str(key)) == role)]
    return next((values[key] for key in keys if values.get(key) not in (None, "")), None)


def _audio(values: dict) -> object:
    audio = _value(values, AUDIO_KEYS, "audio")
    return audio.get("path") if isinstance(audio, dict) else audio  # as `datasets` writes it


def _json_problem(values: dict, parts: set[str]) -> tuple[str, str]:
    """Return (reason, fix) for an object that is not a record, else empty strings."""
    audio = _audio(values)
    text = _value(values, TEXT_KEYS, "text")
    if "rejected" in values and audio is None:  # by what wrote the table from Parquet files
        return str(values["rejected"]), ""
    if not isinstance(audio, str) or not isinstance(text, str):
        types = ", ".join(f"{key}: {type(value).__name__}" for key, value in values.items())
        return f"`audio` and `text`, both strings, expected; got {types or 'nothing'}", ""
    others = [_value(values, SPEAKER_KEYS, "speaker"), values.get("id"), values.get("split")]
    if non_utf8_problem("".join([audio, text, *map(str, others)])):  # \u escapes can spell it
        return "half of a surrogate pair, which is not a character", "save the table as UTF-8"
    if "offset" in values and audio in parts:
        reason = f"a part of a recording (offset {values['offset']}), which is not supported"
        return reason, "split the recording into one file a sentence"
    return "", ""
