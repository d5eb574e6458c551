"""The usual ways to lay out a dataset, all read into the same rows.

LJSpeech (`metadata*.csv` and `wavs/`), Common Voice (`validated.tsv` or `train.tsv`, `dev.tsv`,
`test.tsv`, and `clips/`), and JSONL manifests. The layout is recognised by what lies in the folder,
and said; a further one is one more `DatasetLayout` in `LAYOUTS`, below its readers. A line that
cannot be used is a finding that names table, line and cure; the others go on. Originals are only
read. Knows nothing of what a recording sounds like.
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
# Names of the split that is held out, as other datasets spell it.
HELD_OUT = frozenset({"held_out", "dev", "valid", "validation", "val", "eval"})
FEWEST_HELD_OUT = 5
RESERVED = "__metadata__"  # by the files that hold a reference for each speaker
AUDIO_KEYS = ("audio", "audio_filepath", "path")
TEXT_KEYS = ("text", "sentence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Rows as they stand in a dataset's tables; no recording has been opened yet."""

    layout: str  # in words, with the tables taken
    rows: list[Utterance]
    refused: list[Finding]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a table, as a layout reads it: taken apart, but not yet believed."""

    file: str
    line: int
    id: str
    audio: str  # below `base`, its suffix possibly left out
    base: Path  # folder that the recording must lie in
    text: str
    speaker: str = ""
    split: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetLayout:
    """One way to lay out a dataset: how it is recognised, told of and read."""

    name: str
    folder: str  # what lies in a folder of this layout, in words
    row: str  # what a line of its tables holds, in words
    suffixes: tuple[str, ...]  # of a table that is named by itself
    beside: str  # folder that must lie beside the tables; "." where it may be any
    tables: Callable[[Path], list[Path]]  # those of a folder; none where the layout is another
    # Its lines, those that cannot be used as findings. Also given: how many tables there are.
    read: Callable[[Path, int, ManifestConfig], Iterator[Record | Finding]]


def read_dataset(source: Path, config: ManifestConfig) -> Dataset:
    """The rows of a folder or of one of its tables, whichever layout it has.

    Splits are the ones that the dataset names; where none is held out, a stable hash of the id
    holds out `held_out_percent` of the training rows. Raises DatasetError when `source` is no
    dataset or has no rows, a table lacks a column it needs, or the recordings' folder is gone.
    """
    layout, tables = recognise(Path(source))
    found = list(_lines(layout, tables, config))
    records = [line for line in found if isinstance(line, Record)]
    refused = [line for line in found if isinstance(line, Finding)]
    kept = []
    for record in records:
        row = _believe(record, config)
        (refused if isinstance(row, Finding) else kept).append(row)
    _still_there(records)
    if not found:
        raise DatasetError(_nothing_in(layout, tables))
    kept = _without_repeats(_with_splits(kept, config), refused)
    names = ", ".join(table.name for table in tables)
    return Dataset(layout=f"{layout.name}: {names}", rows=kept, refused=refused)


def _nothing_in(layout: DatasetLayout, tables: list[Path]) -> str:
    """What tables without a single row hold instead, and what would be a row."""
    said = []
    for table in tables:
        with open(table, "rb") as file:
            begins = file.read(4096)
        what = f"{table} has {table.stat().st_size:,} bytes and no rows"
        if begins.strip():
            first = begins.split(b"\n")[0].decode(errors="replace").strip()
            what += f" below its first line, {shorten(repr(first), 120)}"
        if b"\r" in begins and b"\n" not in begins:
            what += "; its lines end in carriage returns alone: save it with the line ends of Unix"
        said.append(what)
    return f"{'; '.join(said)}. Expected {layout.row}."


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
                f"{table} cannot be read: {error.strerror}. Is the disk it lies on mounted, and "
                "may this user read it?"
            ) from error


def recognise(source: Path) -> tuple[DatasetLayout, list[Path]]:
    """(layout, the tables that belong to it) of a folder, or of a single table in one.

    Raises DatasetError that says what was expected and what was found.
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
        some = sorted(p.name + "/" * p.is_dir() for p in source.iterdir())
        found = ", ".join(some[:8]) + (f" and {len(some) - 8} more" if len(some) > 8 else "")
    elif source.exists():
        found = f"a file {source.name}"
    found = found.encode(errors="replace").decode()  # names that are not UTF-8
    expected = " or ".join(f"{layout.folder} ({layout.name})" for layout in LAYOUTS)
    return (
        f"{source} is not a dataset in a layout known here (docs/extending.md shows how one is "
        f"added): expected {expected}; found {found or 'an empty folder'}."
    )


def _ljspeech(table: Path, _tables: int, _config: ManifestConfig) -> Iterator[Record | Finding]:
    """`id|text`, `id|text|normalised`, or with a speaker: no header, no quoting."""
    split = table.stem.removeprefix("metadata").strip("_")
    kind = special_file_kind(table)
    if kind:
        raise DatasetError(f"{table} is {kind}, no file: copy its content into a file.")
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
        reason = "a carriage return stands between what looks like two rows"
        cure = "save the table with the line ends of Unix, or of Windows"
        return _bad_row(table, number, name, reason, cure=cure)
    if b"\0" in raw:
        return _bad_row(table, number, "", "a NUL byte", cure="save the table as UTF-8")
    if not 2 <= len(columns) <= 4:
        reason = f"2 to 4 columns expected (id|text|normalised|speaker), got {len(columns)}"
        cure = "write id|text: not commas but | parts the columns" if len(columns) == 1 else ""
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
    """A header with at least `path` and `sentence`; tabs, and quotes that mean themselves."""
    split = "" if table.stem == "validated" else table.stem
    for number, found in rows(table, delimiter="\t", quoting=False):
        if isinstance(found, BadRecord):
            yield _bad_row(table, number, "", found.reason)
            continue
        if not {"path", "sentence"} <= found.keys():
            raise DatasetError(
                f"{table} has no columns `path` and `sentence`: its first line holds "
                f"{', '.join(found)}. Add the header that Common Voice gives its tables."
            )
        yield Record(
            file=table.name,
            line=number,
            id=found["path"].strip().rsplit(".", 1)[0],
            audio=found["path"].strip(),
            base=table.parent / "clips",
            text=found["sentence"],
            speaker=found.get("client_id", "")[:12],  # of 128 hex digits: enough to tell apart
            split=split,
        )


def _jsonl(table: Path, tables: int, config: ManifestConfig) -> Iterator[Record | Finding]:
    """One object a line with audio and text; several tables are splits by their names."""
    base = Path(config.audio_root) if config.audio_root else table.parent
    for number, found in rows(table):
        if isinstance(found, BadRecord):
            yield _bad_row(table, number, "", found.reason)
        else:
            yield _jsonl_row(found, table, number, base, table.stem if tables > 1 else "")


def _jsonl_row(found: dict, table: Path, number: int, base: Path, split: str) -> Record | Finding:
    audio = next((found[key] for key in AUDIO_KEYS if found.get(key)), None)
    text = next((found[key] for key in TEXT_KEYS if found.get(key)), None)
    if not isinstance(audio, str) or not isinstance(text, str):
        have = ", ".join(f"{key}: {type(value).__name__}" for key, value in found.items())
        reason = f"`audio` and `text`, both strings, expected; got {have or 'nothing'}"
        return _bad_row(table, number, str(found.get("id", "")), reason)
    told = [audio, text, *(str(found.get(key)) for key in ("id", "speaker", "split"))]
    if non_utf8_problem("".join(told)):  # \u escapes can spell it
        reason = "half of a surrogate pair, which is no character"
        return _bad_row(table, number, "", reason, cure="save the table as UTF-8")
    if found.get("offset"):
        reason = f"a part of a recording (offset {found['offset']}), which is not cut here"
        cure = "cut the recording into one file a sentence"
        return _bad_row(table, number, str(found.get("id", "")), reason, cure=cure)
    if os.path.isabs(audio) and Path(audio).is_relative_to(base.absolute()):
        audio = str(Path(audio).relative_to(base.absolute()))
    return Record(
        file=table.name,
        line=number,
        id=str(found.get("id") or os.path.splitext(audio)[0]),
        audio=audio,
        base=base,
        text=text,
        speaker=str(found.get("speaker") or ""),
        split=str(found.get("split") or split),
    )


def _ljspeech_tables(folder: Path) -> list[Path]:
    return sorted(folder.glob("metadata*.csv"))


def _common_voice_tables(folder: Path) -> list[Path]:
    """The splits where there are any; their rows stand in validated.tsv once more."""
    splits = [folder / name for name in ("train.tsv", "dev.tsv", "test.tsv")]
    tables = splits if splits[0].is_file() else [folder / "validated.tsv"]
    return [table for table in tables if table.is_file()]


def _jsonl_tables(folder: Path) -> list[Path]:
    one = folder / "manifest.jsonl"
    return [one] if one.is_file() else sorted(folder.glob("*.jsonl"))


# In the order in which they are tried. All that the kit knows of a layout stands here.
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


def _believe(record: Record, config: ManifestConfig) -> Utterance | Finding:
    """The row that `record` describes, once its names stay inside the folder and lead to a file."""

    def refuse(kind: str, reason: str, cure: str = "") -> Finding:
        where = {"file": record.file, "line": record.line, "id": record.id}
        return Finding(**where, kind=kind, reason=reason, cure=cure)

    inside = record.base.name or str(record.base)
    if not _stays_inside(record.audio):
        reason = f"the path must lead to a file inside {inside}/, got {record.audio!r}"
        return refuse("row", reason, "give a path below it; a JSONL's start from `audio_root`")
    if not _stays_inside(record.id):
        return refuse("row", f"the id must be a name, not lead out of a folder: {record.id!r}")
    if record.speaker == RESERVED or any(letter < " " for letter in record.speaker):
        reason = f"no speaker can be called {record.speaker!r}"
        return refuse("row", reason, "name the speaker in plain letters")
    text = normalize(record.text, config.language)
    if not letters(text):
        return refuse("row", "the text is empty", "write what is said, or take the line out")
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
    """Whether a relative path leads to no place above where it starts; links are the user's own."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and "\0" not in name and ".." not in parts and not os.path.isabs(name)


def _still_there(records: list[Record]) -> None:
    for base in {record.base for record in records}:
        if not base.is_dir():
            raise DatasetError(
                f"{base} is gone: a drive unplugged, a mount that ended, a wrong `audio_root`? "
                "Nothing was written; connect it again and run again."
            )


def _with_splits(found: list[Utterance], config: ManifestConfig) -> list[Utterance]:
    """Every row in a split: its own, or `train`; some of `train` held out where nothing is."""
    own = ["held_out" if row.split in HELD_OUT else row.split or "train" for row in found]
    if "held_out" not in own:
        ids = [row.id for row, split in zip(found, own) if split == "train"]
        chosen = _held_out(ids, config.held_out_percent)
        for i, row in enumerate(found):
            if own[i] == "train" and row.id in chosen:
                own[i] = "held_out"
    return [dataclasses.replace(row, split=split) for row, split in zip(found, own)]


def _held_out(ids: list[str], percent: float) -> set[str]:
    """Those of a stable hash below `percent`; of few recordings more, or nothing could be judged.

    At least `FEWEST_HELD_OUT`, but no more than a tenth of them, and one of two.
    """
    chosen = {name for name in ids if is_held_out(name, percent)}
    fewest = min(FEWEST_HELD_OUT, max(len(ids) // 10, len(ids) > 1))
    if percent and len(chosen) < fewest:
        chosen = set(sorted(set(ids), key=stable_hash)[:fewest])
    return chosen


def _without_repeats(found: list[Utterance], refused: list[Finding]) -> list[Utterance]:
    first: dict[str, Utterance] = {}
    for row in found:
        if row.id not in first:
            first[row.id] = row
            continue
        reason = f"this id stands already in {first[row.id].file}, line {first[row.id].line}"
        cure = "give every line an id of its own"
        where = {"file": row.file, "line": row.line, "id": row.id}
        refused.append(Finding(**where, kind="row", reason=reason, cure=cure))
    return list(first.values())
