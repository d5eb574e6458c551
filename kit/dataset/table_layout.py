"""Read tables of any tool: separator, header and columns are found by what the rows hold."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from kit.base.errors import DatasetError
from kit.dataset.columns import Columns, find_columns, names_columns, parse_columns
from kit.dataset.data_report import Finding, ManifestConfig
from kit.dataset.record import Record, bad_row, label_of, split_of
from kit.dataset.recordings import Recordings, choose_base, stays_inside
from kit.dataset.splits import canonical_split, known_split
from kit.dataset.tables import NAMES, QUOTED, RawTable, TableRow, hits, read_table

HEAD_BYTES = 65536
TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".psv", ".list", ".lst", ".tab")


def read_tables(tables: list[Path], config: ManifestConfig) -> Iterator[Record | Finding | str]:
    """Read tables with any separator, with or without a header, once their columns are known.

    Tables of the same shape are looked at together: a small one tells too little.
    """
    groups: dict[tuple, list[RawTable]] = {}
    finders = {}
    for path in tables:
        places = _folders(path, config)
        found = finders.setdefault(places, _finder(*places))
        raw = read_table(path, found, len(parse_columns(config.columns)))
        first = [cell.lower() for cell in raw.rows[0].cells] if raw.rows else []
        header = first if names_columns(first) else []
        groups.setdefault((raw.separator, raw.width, *header), []).append(raw)
    for group in groups.values():
        found = finders[_folders(group[0].path, config)]
        yield from _table_group(group, tables, config, found)


def _table_group(
    group: list[RawTable],
    tables: list[Path],
    config: ManifestConfig,
    found: Callable[[str], bool],
) -> Iterator[Record | Finding | str]:
    usable = [raw for raw in group if raw.width > 1 and raw.good]
    columns = None
    if usable:
        first = usable[0].good[0].cells
        sample = [cells for raw in usable for cells in raw.sample()]
        columns = find_columns(usable[0].path, sample, first, config.columns, found)
        note = _describe(usable[0], columns)
        if note:
            yield note
    for raw in group:
        if columns is None:
            for row in raw.rows:
                yield _wrong_width(row, raw, None, label_of(raw.path, tables))
        else:
            yield from _table_rows(raw, columns, tables, config, found)


def _describe(raw: RawTable, columns: Columns) -> str:
    """Say which columns were found, where a table is not LJSpeech's own."""
    usual = raw.separator == "|" and columns.audio == 0 and not columns.header
    if usual and columns.texts in ((1,), (2, 1)) and columns.speaker in (None, 3):
        return ""
    header = ", with a header" if columns.header else ""
    return f"columns {columns} separated by {NAMES[raw.separator]}{header}"


def _table_rows(
    raw: RawTable,
    columns: Columns,
    tables: list[Path],
    config: ManifestConfig,
    found: Callable[[str], bool],
) -> Iterator[Record | Finding]:
    label = label_of(raw.path, tables)
    split = split_of(raw.path, tables)
    folder, usual = _folders(raw.path, config)
    names = [cells[columns.audio] for cells in raw.sample()]
    base, in_subfolders = choose_base(usual, folder, names)
    prefix = f"{raw.path.parent.name}/" if label != raw.path.name else ""

    def cell(row: TableRow, index: int | None) -> str:
        return "" if index is None else row.cells[index]

    has_header = bool(columns.header) and tuple(raw.rows[0].cells) == columns.header
    rows = raw.rows[1:] if has_header else raw.rows
    audio_folder = has_header and columns.header[columns.audio].lower() == "file_name"
    for row, following in itertools.zip_longest(rows, rows[1:]):
        if not row.problem and following and _continues(row, following, raw, found):
            reason = f"line {following.line} looks like the rest of its text"
            cure = "write the text in one line, or in double quotes"
            yield bad_row(label, row.line, row.cells[columns.audio], reason, cure)
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


def _continues(
    row: TableRow, following: TableRow, raw: RawTable, found: Callable[[str], bool]
) -> bool:
    """Tell whether the line after a row is no row of its own but the rest of the row's text."""
    if following.problem or len(row.cells) != raw.width or any(map(found, following.cells)):
        return False
    opened = any(c.startswith('"') and c.count('"') % 2 for c in row.cells)
    return len(following.cells) < raw.width or (opened and raw.separator not in QUOTED)


def _wrong_width(row: TableRow, raw: RawTable, columns: Columns | None, label: str) -> Finding:
    """Return the finding about a row that is broken, or has other columns than the others."""
    name = row.cells[0] if row.cells else ""
    reason, cure = row.problem, row.cure
    if not reason and columns is None:
        reason = f"2 to 4 columns expected (id|text|normalised|speaker), got {len(row.cells)}"
        cure = "write id|text: no separator (| , ; or a tab) was found"
    elif not reason:
        reason = f"{raw.width} columns expected ({columns}), got {len(row.cells)}"
        cure = (
            f"is there {NAMES[raw.separator]} or a line end in its text? Take it out, or quote it"
        )
    return bad_row(label, row.line, name, reason, cure)


def _folders(table: Path, config: ManifestConfig) -> tuple[Path, Path]:
    """Return the folder that recordings must be in, and the one that paths usually start from."""
    folder = Path(config.audio_root) if config.audio_root else table.parent
    wavs = folder / "wavs"
    return folder, wavs if wavs.is_dir() else folder


def _finder(folder: Path, usual: Path) -> Callable[[str], bool]:
    """Return a function that tells whether a value of a table names a recording."""
    places = [Recordings(base) for base in dict.fromkeys((usual, folder))]
    return lambda value: any(place.lists(value) for place in places)


def tables_of_recordings(files: list[Path]) -> list[Path]:
    """Return the files of which most rows name recordings, unlike a README's; by their beginning.

    All are in one folder.
    """
    if not files:
        return []
    found = _finder(*_folders(files[0], ManifestConfig()))
    tables = []
    for path in files:
        try:
            raw = read_table(path, found, max_bytes=HEAD_BYTES)
        except (DatasetError, OSError):
            continue
        sample = raw.sample()[1:] or raw.sample()  # without a header
        if raw.width > 1 and sample and 2 * max(hits(raw, sample, found)) >= len(sample):
            tables.append(path)
    return tables
