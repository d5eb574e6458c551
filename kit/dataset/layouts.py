"""Read datasets in the usual layouts into the same rows.

LJSpeech (`metadata*.csv` and `wavs/`), Common Voice (`validated.tsv` or `train.tsv`, `dev.tsv`,
`test.tsv`, and `clips/`), and JSONL manifests. The layout is recognised by the files in the folder;
to support another one, add a `DatasetLayout` to `LAYOUTS`. A line that cannot be used becomes a
finding that names table, line and fix. Originals are only read.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kit.base.errors import DatasetError, KitError
from kit.base.formatting import non_utf8_problem, shorten
from kit.dataset.data_report import Finding, ManifestConfig, Utterance
from kit.streams.file import BadRecord, special_file_kind
from kit.streams.open import rows
from kit.streams.stream import is_held_out, stable_hash
from kit.text.normalize import letters, normalize

AUDIO_SUFFIXES = ("", ".wav", ".flac", ".ogg", ".mp3")
# Other datasets' names of the held-out split.
HELD_OUT = frozenset({"held_out", "dev", "valid", "validation", "val", "eval"})
MIN_HELD_OUT = 5
RESERVED = "__metadata__"  # by the files that hold a reference for each speaker
AUDIO_KEYS = ("audio", "audio_filepath", "path")
TEXT_KEYS = ("text", "sentence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The rows of a dataset's tables, before any recording is opened."""

    layout: str  # its name and its tables
    rows: list[Utterance]
    refused: list[Finding]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a table, parsed but not yet checked."""

    file: str
    line: int
    id: str
    audio: str  # path below `base`, possibly without its suffix
    base: Path  # folder that the recording must be in
    text: str
    speaker: str = ""
    split: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetLayout:
    """One layout of a dataset: how it is recognised, described and read."""

    name: str
    folder: str  # description of a folder in this layout
    row: str  # description of a table's line
    suffixes: tuple[str, ...]  # of a table given instead of a folder
    beside: str  # folder that must be beside the tables; "." for none
    tables: Callable[[Path], list[Path]]  # in a folder; [] for another layout
    # Reads a table, given also the number of tables; unusable lines become findings.
    read: Callable[[Path, int, ManifestConfig], Iterator[Record | Finding]]


def read_dataset(source: Path, config: ManifestConfig) -> Dataset:
    """Read the rows of a folder, or of a single table, in any known layout.

    Splits are those of the dataset; where none is held out, a stable hash of the id holds out
    `held_out_percent` of the training rows. Raises DatasetError when `source` is no dataset or has
    no rows, a table lacks a column, or the recordings' folder is gone.
    """
    layout, tables = recognise(Path(source))
    lines = list(_lines(layout, tables, config))
    records = [line for line in lines if isinstance(line, Record)]
    refused = [line for line in lines if isinstance(line, Finding)]
    kept = []
    for record in records:
        row = _check_record(record, config)
        (refused if isinstance(row, Finding) else kept).append(row)
    _require_folders(records)
    if not lines:
        raise DatasetError(_no_rows_message(layout, tables))
    kept = _without_duplicates(_with_splits(kept, config), refused)
    names = ", ".join(table.name for table in tables)
    return Dataset(layout=f"{layout.name}: {names}", rows=kept, refused=refused)


def _no_rows_message(layout: DatasetLayout, tables: list[Path]) -> str:
    descriptions = []
    for table in tables:
        with open(table, "rb") as file:
            head = file.read(4096)
        what = f"{table} has {table.stat().st_size:,} bytes and no rows"
        if head.strip():
            first = head.split(b"\n")[0].decode(errors="replace").strip()
            what += f" below its first line, {shorten(repr(first), 120)}"
        if b"\r" in head and b"\n" not in head:
            what += "; its lines end in carriage returns alone: save it with the line ends of Unix"
        descriptions.append(what)
    return f"{'; '.join(descriptions)}. Expected {layout.row}."


def _lines(
    layout: DatasetLayout, tables: list[Path], config: ManifestConfig
) -> Iterator[Record | Finding]:
    for table in tables:
        try:
            yield from layout.read(table, len(tables), config)
        except KitError as error:
            raise DatasetError(str(error)) from error
        except OSError as error:
            raise DatasetError(
                f"{table} cannot be read: {error.strerror}. Is its disk mounted, and may this user "
                "read it?"
            ) from error


def recognise(source: Path) -> tuple[DatasetLayout, list[Path]]:
    """Return the layout and the tables of a folder, or of a single table.

    Raises DatasetError, which lists what was expected and found.
    """
    if non_utf8_problem(source.absolute()):
        raise DatasetError(f"{non_utf8_problem(source.absolute())}.")
    folder = source if source.is_dir() else source.parent
    for layout in LAYOUTS:
        if source.is_dir():
            tables = layout.tables(source)
        else:
            tables = [source] if source.is_file() and source.suffix in layout.suffixes else []
        if tables and (folder / layout.beside).is_dir():
            return layout, tables
    raise DatasetError(_not_recognised(source))


def _not_recognised(source: Path) -> str:
    found = "no such file or folder"
    if source.is_dir():
        names = sorted(p.name + "/" * p.is_dir() for p in source.iterdir())
        found = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    elif source.exists():
        found = f"a file {source.name}"
    found = found.encode(errors="replace").decode()  # names that are not UTF-8
    expected = " or ".join(f"{layout.folder} ({layout.name})" for layout in LAYOUTS)
    return (
        f"{source} is not a dataset in a known layout (docs/extending.md shows how to add "
        f"one): expected {expected}; found {found or 'an empty folder'}."
    )


def _ljspeech(table: Path, _tables: int, _config: ManifestConfig) -> Iterator[Record | Finding]:
    """Read `id|text`, `id|text|normalised`, or with a speaker: no header, no quoting."""
    split = table.stem.removeprefix("metadata").strip("_")
    kind = special_file_kind(table)
    if kind:
        raise DatasetError(f"{table} is {kind}, not a file: copy its content into a file.")
    with open(table, "rb") as file:  # Python's text mode would also end lines at a lone \r
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield _ljspeech_row(raw, table, number, split)


def _ljspeech_row(raw: bytes, table: Path, number: int, split: str) -> Record | Finding:
    try:
        columns = raw.decode("utf-8-sig").rstrip("\r\n").split("|")
    except UnicodeDecodeError as error:
        reason = f"not valid UTF-8: {error.reason} at byte {error.start}"
        return _bad_row(table, number, "", reason, cure="save the table as UTF-8")
    name = columns[0].strip()
    if sum(b"|" in part for part in raw.split(b"\r")) > 1:  # else one row would get another's text
        reason = "a carriage return between what looks like two rows"
        cure = "save the table with the line ends of Unix, or of Windows"
        return _bad_row(table, number, name, reason, cure=cure)
    if b"\0" in raw:
        return _bad_row(table, number, "", "a NUL byte", cure="save the table as UTF-8")
    if not 2 <= len(columns) <= 4:
        reason = f"2 to 4 columns expected (id|text|normalised|speaker), got {len(columns)}"
        cure = "write id|text: | separates columns, not commas" if len(columns) == 1 else ""
        return _bad_row(table, number, name, reason, cure=cure)
    _, text, spoken, speaker = [*columns, "", ""][:4]
    return Record(
        file=table.name,
        line=number,
        id=name,
        audio=name,
        base=table.parent / "wavs",
        text=spoken if spoken.strip() else text,
        speaker=speaker.strip(),
        split=split,
    )


def _common_voice(table: Path, _tables: int, _config: ManifestConfig) -> Iterator[Record | Finding]:
    """Read a header with at least `path` and `sentence`; tabs, quotes are literal."""
    split = "" if table.stem == "validated" else table.stem
    for number, values in rows(table, delimiter="\t", quoting=False):
        if isinstance(values, BadRecord):
            yield _bad_row(table, number, "", values.reason)
            continue
        if not {"path", "sentence"} <= values.keys():
            raise DatasetError(
                f"{table} has no columns `path` and `sentence`: its first line holds "
                f"{', '.join(values)}. Add the header that Common Voice gives its tables."
            )
        yield Record(
            file=table.name,
            line=number,
            id=values["path"].strip().rsplit(".", 1)[0],
            audio=values["path"].strip(),
            base=table.parent / "clips",
            text=values["sentence"],
            speaker=values.get("client_id", "")[:12],  # of 128 hex digits: enough to tell apart
            split=split,
        )


def _jsonl(table: Path, tables: int, config: ManifestConfig) -> Iterator[Record | Finding]:
    """Read one object a line with audio and text; several tables are splits by their names."""
    base = Path(config.audio_root) if config.audio_root else table.parent
    for number, values in rows(table):
        if isinstance(values, BadRecord):
            yield _bad_row(table, number, "", values.reason)
        else:
            yield _jsonl_row(values, table, number, base, table.stem if tables > 1 else "")


def _jsonl_row(values: dict, table: Path, number: int, base: Path, split: str) -> Record | Finding:
    audio = next((values[key] for key in AUDIO_KEYS if values.get(key)), None)
    text = next((values[key] for key in TEXT_KEYS if values.get(key)), None)
    if not isinstance(audio, str) or not isinstance(text, str):
        types = ", ".join(f"{key}: {type(value).__name__}" for key, value in values.items())
        reason = f"`audio` and `text`, both strings, expected; got {types or 'nothing'}"
        return _bad_row(table, number, str(values.get("id", "")), reason)
    strings = [audio, text, *(str(values.get(key)) for key in ("id", "speaker", "split"))]
    if non_utf8_problem("".join(strings)):  # \u escapes can spell it
        reason = "half of a surrogate pair, which is not a character"
        return _bad_row(table, number, "", reason, cure="save the table as UTF-8")
    if values.get("offset"):
        reason = f"a part of a recording (offset {values['offset']}), which is not supported"
        cure = "split the recording into one file a sentence"
        return _bad_row(table, number, str(values.get("id", "")), reason, cure=cure)
    if os.path.isabs(audio) and Path(audio).is_relative_to(base.absolute()):
        audio = str(Path(audio).relative_to(base.absolute()))
    return Record(
        file=table.name,
        line=number,
        id=str(values.get("id") or os.path.splitext(audio)[0]),
        audio=audio,
        base=base,
        text=text,
        speaker=str(values.get("speaker") or ""),
        split=str(values.get("split") or split),
    )


def _ljspeech_tables(folder: Path) -> list[Path]:
    return sorted(folder.glob("metadata*.csv"))


def _common_voice_tables(folder: Path) -> list[Path]:
    """Return the splits where there are any; validated.tsv repeats their rows."""
    splits = [folder / name for name in ("train.tsv", "dev.tsv", "test.tsv")]
    tables = splits if splits[0].is_file() else [folder / "validated.tsv"]
    return [table for table in tables if table.is_file()]


def _jsonl_tables(folder: Path) -> list[Path]:
    one = folder / "manifest.jsonl"
    return [one] if one.is_file() else sorted(folder.glob("*.jsonl"))


# In the order in which they are tried.
LAYOUTS = (
    DatasetLayout(
        name="LJSpeech",
        folder="metadata.csv with id|text, and wavs/",
        row="id|text in every line",
        suffixes=(".csv",),
        beside="wavs",
        tables=_ljspeech_tables,
        read=_ljspeech,
    ),
    DatasetLayout(
        name="Common Voice",
        folder="validated.tsv or train.tsv, and clips/",
        row="a header with `path` and `sentence`, then a line for each recording",
        suffixes=(".tsv",),
        beside="clips",
        tables=_common_voice_tables,
        read=_common_voice,
    ),
    DatasetLayout(
        name="JSONL",
        folder="manifest.jsonl with {audio, text} a line",
        row="{audio, text} in every line",
        suffixes=(".jsonl", ".json"),
        beside=".",
        tables=_jsonl_tables,
        read=_jsonl,
    ),
)


def _bad_row(table: Path, line: int, name: str, reason: str, cure: str = "") -> Finding:
    return Finding(file=table.name, line=line, id=name, kind="row", reason=reason, cure=cure)


def _check_record(record: Record, config: ManifestConfig) -> Utterance | Finding:
    """Return the row of `record` if its text, names and path to a recording are valid."""

    def refuse(kind: str, reason: str, cure: str = "") -> Finding:
        return _finding(record, kind, reason, cure)

    inside = record.base.name or str(record.base)
    if not _stays_inside(record.audio):
        reason = f"the path must lead to a file inside {inside}/, got {record.audio!r}"
        return refuse("row", reason, "give a path below it; a JSONL's start from `audio_root`")
    if not _stays_inside(record.id):
        return refuse("row", f"the id must be a name, not a path out of a folder: {record.id!r}")
    if record.speaker == RESERVED or any(letter < " " for letter in record.speaker):
        reason = f"no speaker can be called {record.speaker!r}"
        return refuse("row", reason, "name the speaker in plain letters")
    text = normalize(record.text, config.language)
    if not letters(text):
        return refuse("row", "the text is empty", "write what is said, or remove the line")
    stem = os.path.join(record.base, record.audio)
    audio = next((stem + s for s in AUDIO_SUFFIXES if os.path.isfile(stem + s)), None)
    if audio is None:
        what = "a folder, not a recording:" if os.path.isdir(stem) else "no recording"
        suffix = "" if os.path.splitext(record.audio)[1] else ".wav"
        return refuse("missing", f"{what} {inside}/{record.audio}{suffix}")
    return Utterance(
        id=record.id,
        audio=audio,
        text=text,
        speaker=record.speaker or "speaker",
        split=record.split,
        line=record.line,
        file=record.file,
    )


def _stays_inside(name: str) -> bool:
    """Tell whether a relative path stays below its start; links are the user's own choice."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and "\0" not in name and ".." not in parts and not os.path.isabs(name)


def _require_folders(records: list[Record]) -> None:
    for base in {record.base for record in records}:
        if not base.is_dir():
            raise DatasetError(
                f"{base} is gone: a drive unplugged, a mount that ended, a wrong `audio_root`? "
                "Nothing was written; connect it again and run again."
            )


def _with_splits(rows: list[Utterance], config: ManifestConfig) -> list[Utterance]:
    """Give every row a split, `train` by default; hold out some of `train` where nothing is."""
    splits = ["held_out" if row.split in HELD_OUT else row.split or "train" for row in rows]
    if "held_out" not in splits:
        ids = [row.id for row, split in zip(rows, splits) if split == "train"]
        held_out = _held_out(ids, config.held_out_percent)
        for i, row in enumerate(rows):
            if splits[i] == "train" and row.id in held_out:
                splits[i] = "held_out"
    return [dataclasses.replace(row, split=split) for row, split in zip(rows, splits)]


def _held_out(ids: list[str], percent: float) -> set[str]:
    """Return the ids with a stable hash below `percent`.

    Of few recordings at least MIN_HELD_OUT or a tenth, whichever is less, and one of two.
    """
    chosen = {name for name in ids if is_held_out(name, percent)}
    minimum = min(MIN_HELD_OUT, max(len(ids) // 10, len(ids) > 1))
    if percent and len(chosen) < minimum:
        chosen = set(sorted(set(ids), key=stable_hash)[:minimum])
    return chosen


def _without_duplicates(rows: list[Utterance], refused: list[Finding]) -> list[Utterance]:
    """Return the first row of each id; add a finding to `refused` for every other one."""
    first: dict[str, Utterance] = {}
    for row in rows:
        if row.id not in first:
            first[row.id] = row
            continue
        reason = f"this id is already used in {first[row.id].file}, line {first[row.id].line}"
        refused.append(_finding(row, "row", reason, "give every line an id of its own"))
    return list(first.values())


def _finding(row: Record | Utterance, kind: str, reason: str, cure: str) -> Finding:
    return Finding(file=row.file, line=row.line, id=row.id, kind=kind, reason=reason, cure=cure)
