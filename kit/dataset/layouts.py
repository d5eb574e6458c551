"""Read datasets in the usual layouts into the same rows.

LJSpeech (`metadata*.csv` and `wavs/`), Common Voice (`validated.tsv` or `train.tsv`, `dev.tsv`,
`test.tsv`, and `clips/`), JSONL manifests, Kaldi, and any other table that names recordings
(table_layout.py). The layout is recognised by the files in the folder; to support another one, add
a `DatasetLayout` to `LAYOUTS`. A line that cannot be used becomes a finding that names table, line
and fix. Originals are only read.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kit.base.errors import DatasetError, KitError
from kit.base.formatting import join_names, non_utf8_problem, shorten
from kit.dataset.data_report import Finding, ManifestConfig, Utterance
from kit.dataset.record import Record, bad_row, label_of, split_of
from kit.dataset.recordings import Recordings, choose_base, stays_inside
from kit.dataset.splits import canonical_split, has_known_split, hold_out, split_of_table
from kit.dataset.table_layout import TABLE_SUFFIXES, read_tables, tables_of_recordings
from kit.dataset.tables import SAMPLE_ROWS, read_lines
from kit.streams.file import BadRecord, special_file_kind
from kit.streams.lines import JsonLines
from kit.streams.open import rows
from kit.text.normalize import letters, normalize

RESERVED = "__metadata__"  # by the files that hold a reference for each speaker
# The usual keys of JSON records, in the order in which they are preferred.
AUDIO_KEYS = (
    "audio audio_filepath path file_name filename audio_file audio_path file filepath wav wav_path"
).split()
TEXT_KEYS = "text sentence transcription transcript normalized_text".split()
SPEAKER_KEYS = "speaker speaker_id speaker_name spk client_id".split()
HEAD_BYTES = 4096
MAX_TABLES = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The rows of a dataset's tables, before any recording is opened."""

    layout: str  # its name and its tables
    rows: list[Utterance]
    refused: list[Finding]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetLayout:
    """One layout of a dataset: how it is recognised, described and read."""

    name: str
    folder: str  # description of a folder in this layout
    row: str  # description of a table's line
    suffixes: tuple[str, ...]  # of a table given instead of a folder
    beside: str  # folder that must be beside the tables; "." for none
    tables: Callable[[Path], list[Path]]  # in a folder; [] for another layout
    # Reads the tables; unusable lines become findings, and a str says how a table was read.
    read: Callable[[list[Path], ManifestConfig], Iterator[Record | Finding | str]]


def read_dataset(source: Path, config: ManifestConfig) -> Dataset:
    """Read the rows of a folder, or of a single table, in any known layout.

    Splits are those of the dataset; where none is held out, a stable hash of the id holds out
    `held_out_percent` of the training rows. Raises DatasetError when `source` is no dataset or has
    no rows, a table lacks a column or it is not clear which column is what, or the recordings'
    folder is gone.
    """
    layout, tables = recognise(Path(source))
    lines = list(_lines(layout, tables, config))
    records = [line for line in lines if isinstance(line, Record)]
    refused = [line for line in lines if isinstance(line, Finding)]
    notes = [line for line in lines if isinstance(line, str)]
    _require_folders(records)
    folders = {record.base: Recordings(record.base) for record in records}
    kept = []
    for record in records:
        row = _check_record(record, folders[record.base], config)
        (refused if isinstance(row, Finding) else kept).append(row)
    if not records and not refused:
        raise DatasetError(_no_rows_message(layout, tables))
    kept = hold_out(_without_duplicates(kept, refused), config)
    names = join_names([label_of(table, tables) for table in tables], 8)
    described = "; ".join([f"{layout.name}: {names}", *notes])
    return Dataset(layout=described, rows=kept, refused=refused)


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
) -> Iterator[Record | Finding | str]:
    try:
        yield from layout.read(tables, config)
    except KitError as error:
        raise DatasetError(str(error)) from error
    except OSError as error:
        raise DatasetError(
            f"{error.filename or tables[0]} cannot be read: {error.strerror}. Is its disk mounted, "
            "and may this user read it?"
        ) from error


def recognise(source: Path) -> tuple[DatasetLayout, list[Path]]:
    """Return the layout and the tables of a folder, or of a single table.

    A folder may also have a subfolder with tables for each split, such as train/ and test/. Raises
    DatasetError, which lists what was expected and found.
    """
    if non_utf8_problem(source.absolute()):
        raise DatasetError(f"{non_utf8_problem(source.absolute())}.")
    if source.is_dir():
        for layout in LAYOUTS:
            tables = _tables_in(source, layout)
            if tables:
                return layout, tables
        children = [c for c in sorted(source.iterdir()) if c.is_dir() and has_known_split(c.name)]
        for layout in LAYOUTS:
            tables = [table for child in children for table in _tables_in(child, layout)]
            if tables:
                return layout, tables
    elif source.is_file():
        for layout in LAYOUTS:
            known = source.suffix.lower() in layout.suffixes
            if known and (source.parent / layout.beside).is_dir():
                return layout, [source]
    raise DatasetError(_not_recognised(source))


def _tables_in(folder: Path, layout: DatasetLayout) -> list[Path]:
    return layout.tables(folder) if (folder / layout.beside).is_dir() else []


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


def _common_voice(tables: list[Path], config: ManifestConfig) -> Iterator[Record | Finding | str]:
    """Read a header with at least `path` and `sentence`; tabs, quotes are literal."""
    for table in tables:
        split = "" if table.stem == "validated" else table.stem
        for number, values in rows(table, delimiter="\t", quoting=False):
            if isinstance(values, BadRecord):
                yield bad_row(label_of(table, tables), number, "", values.reason)
                continue
            if not {"path", "sentence"} <= values.keys():
                if tables_of_recordings([table]):
                    yield from read_tables(tables, config)
                    return
                raise DatasetError(
                    f"{table} has no columns `path` and `sentence`: its first line holds "
                    f"{', '.join(values)}. Add the header that Common Voice gives its tables."
                )
            audio = values["path"].strip()
            yield Record(
                file=label_of(table, tables),
                line=number,
                id=audio.rsplit(".", 1)[0] if stays_inside(audio) else "",
                audio=audio,
                base=table.parent / "clips",
                text=values["sentence"],
                speaker=values.get("client_id", "")[:12],  # of 128 hex digits: enough to tell apart
                split=canonical_split(split),
            )


def _jsonl(tables: list[Path], config: ManifestConfig) -> Iterator[Record | Finding]:
    """Read one object a line with audio and text; several tables are splits by their names."""
    for table in tables:
        lines = list(_json_rows(table))
        folder = Path(config.audio_root) if config.audio_root else table.parent
        records = [values for _, values in lines if not isinstance(values, BadRecord)]
        step = max(1, len(records) // SAMPLE_ROWS)
        names = [_value(values, AUDIO_KEYS) for values in records[::step]]
        names = [name for name in names if isinstance(name, str)]
        base, in_subfolders = choose_base(folder, folder, names)
        for number, values in lines:
            if isinstance(values, BadRecord):
                yield bad_row(label_of(table, tables), number, "", values.reason)
                continue
            row = _jsonl_row(values, table, tables, number, base)
            if in_subfolders and isinstance(row, Record):
                row = dataclasses.replace(row, in_subfolders=True)
            yield row


def _json_rows(table: Path) -> Iterator[tuple[int, dict | BadRecord]]:
    """Read JSON lines, which NeMo keeps in files called .json, or an array."""
    head = b""
    if not special_file_kind(table):  # a pipe would be waited for
        with open(table, "rb") as file:
            head = file.read(HEAD_BYTES)
    if table.suffix.lower() == ".json" and head.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{"):
        return JsonLines(table, on_bad_record=lambda record: None).rows()
    return rows(table)


def _value(values: dict, keys: list[str]) -> object:
    return next((values[key] for key in keys if values.get(key) not in (None, "")), None)


def _jsonl_row(
    values: dict, table: Path, tables: list[Path], number: int, base: Path
) -> Record | Finding:
    audio = _value(values, AUDIO_KEYS)
    text = _value(values, TEXT_KEYS)
    speaker = _value(values, SPEAKER_KEYS)
    label = label_of(table, tables)
    if "rejected" in values and audio is None:  # by what wrote the table from Parquet files
        return bad_row(label, number, str(values.get("id", "")), str(values["rejected"]))
    if not isinstance(audio, str) or not isinstance(text, str):
        types = ", ".join(f"{key}: {type(value).__name__}" for key, value in values.items())
        reason = f"`audio` and `text`, both strings, expected; got {types or 'nothing'}"
        return bad_row(label, number, str(values.get("id", "")), reason)
    strings = [audio, text, str(speaker), *(str(values.get(key)) for key in ("id", "split"))]
    if non_utf8_problem("".join(strings)):  # \u escapes can spell it
        reason = "half of a surrogate pair, which is not a character"
        return bad_row(label, number, "", reason, cure="save the table as UTF-8")
    if values.get("offset"):
        reason = f"a part of a recording (offset {values['offset']}), which is not supported"
        cure = "split the recording into one file a sentence"
        return bad_row(label, number, str(values.get("id", "")), reason, cure=cure)
    if os.path.isabs(audio) and Path(audio).is_relative_to(base.absolute()):
        audio = str(Path(audio).relative_to(base.absolute()))
    name = os.path.splitext(audio)[0] if stays_inside(audio) and "\\" not in audio else ""
    if name and label != table.name:
        name = f"{table.parent.name}/{name}"
    split = "" if len(tables) == 1 else split_of(table, tables)
    return Record(
        file=label,
        line=number,
        id=str(values.get("id") or name),
        audio=audio,
        base=base,
        text=text,
        speaker="" if speaker is None else str(speaker),
        split=canonical_split(str(values.get("split") or "")) or split,
    )


def _kaldi(tables: list[Path], config: ManifestConfig) -> Iterator[Record | Finding]:
    """Read `id path` in wav.scp, `id words` in text and `id speaker` in utt2spk beside it."""
    for table in tables:
        label = label_of(table, tables)
        if (table.parent / "segments").is_file():
            raise DatasetError(
                f"{table.parent} has a file `segments`: its recordings hold several utterances "
                "each. Split them into one file an utterance first (Kaldi's extract-segments)."
            )
        texts = {name: text for _, name, text in _kaldi_lines(table.parent / "text")}
        speakers = {name: speaker for _, name, speaker in _kaldi_lines(table.parent / "utt2spk")}
        lines = _kaldi_lines(table)
        folder = Path(config.audio_root) if config.audio_root else table.parent
        base, in_subfolders = choose_base(folder, folder, [audio for *_, audio in lines])
        for number, name, audio in lines:
            if audio.endswith("|"):
                reason = "a command, not a recording"
                cure = "run it and name the file it makes"
                yield bad_row(label, number, name, reason, cure=cure)
                continue
            yield Record(
                file=label,
                line=number,
                id=name,
                audio=audio,
                base=base,
                text=texts.get(name, ""),
                speaker=speakers.get(name, ""),
                split=split_of(table, tables),
                in_subfolders=in_subfolders,
            )


def _kaldi_lines(path: Path) -> list[tuple[int, str, str]]:
    """Return (line, id, what follows it) of each line; [] where there is no such file."""
    lines = read_lines(path) if path.is_file() else []
    split = [(number, line.split(maxsplit=1)) for number, line in enumerate(lines, 1)]
    return [(number, line[0], line[1].strip()) for number, line in split if len(line) == 2]


def _ljspeech_tables(folder: Path) -> list[Path]:
    """Return the splits without the table of all rows, which repeats them."""
    tables = sorted(folder.glob("metadata*.csv"))
    has_train = any(split_of_table(table.stem) == "train" for table in tables)
    return [table for table in tables if not has_train or table.stem != "metadata"]


def _common_voice_tables(folder: Path) -> list[Path]:
    """Return the splits where there are any; validated.tsv repeats their rows."""
    splits = [folder / name for name in ("train.tsv", "dev.tsv", "test.tsv")]
    tables = splits if splits[0].is_file() else [folder / "validated.tsv"]
    return [table for table in tables if table.is_file()]


def _jsonl_tables(folder: Path) -> list[Path]:
    one = folder / "manifest.jsonl"
    if one.is_file():
        return [one]
    return sorted(folder.glob("*.jsonl")) or [p for p in sorted(folder.glob("*.json")) if _nemo(p)]


def _nemo(path: Path) -> bool:
    """Tell whether a .json file is a manifest, as NeMo names them, and not a configuration."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return b'"audio_filepath"' in file.read(HEAD_BYTES)


def _kaldi_tables(folder: Path) -> list[Path]:
    return [folder / "wav.scp"] if (folder / "text").is_file() else []


def _other_tables(folder: Path) -> list[Path]:
    """Return the tables that name recordings in the folder; those with the name of a split, if any.

    A list of all rows beside the lists of the splits would repeat them.
    """
    files = [p for p in sorted(folder.iterdir()) if p.suffix.lower() in TABLE_SUFFIXES]
    if len(files) > MAX_TABLES:  # a text for each recording
        return []
    tables = tables_of_recordings([path for path in files if path.is_file()])
    splits = [path for path in tables if has_known_split(path.stem)]
    return splits if any(canonical_split(p.stem) == "train" for p in splits) else tables


# In the order in which they are tried.
LAYOUTS = (
    DatasetLayout(
        name="LJSpeech",
        folder="metadata.csv with id|text, and wavs/",
        row="id|text in every line",
        suffixes=(".csv",),
        beside="wavs",
        tables=_ljspeech_tables,
        read=read_tables,
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
    DatasetLayout(
        name="Kaldi",
        folder="wav.scp and text",
        row="`id path` in every line of wav.scp",
        suffixes=(".scp",),
        beside=".",
        tables=_kaldi_tables,
        read=_kaldi,
    ),
    DatasetLayout(
        name="table",
        folder="a CSV, TSV or | table that names recordings beside it",
        row="a recording and its text in every line",
        suffixes=TABLE_SUFFIXES,
        beside=".",
        tables=_other_tables,
        read=read_tables,
    ),
)


def _check_record(
    record: Record, recordings: Recordings, config: ManifestConfig
) -> Utterance | Finding:
    """Return the row of `record` if its text, names and path to a recording are valid."""

    def refuse(kind: str, reason: str, cure: str = "") -> Finding:
        return _finding(record, kind, reason, cure)

    inside = record.base.name or str(record.base)
    find = recordings.find_below if record.in_subfolders else recordings.find
    audio = find(record.audio)
    if not audio and not stays_inside(record.audio):
        reason = f"the path must lead to a file inside {inside}/, got {record.audio!r}"
        cure = "give a path below it; paths start from `audio_root` (--set manifest.audio_root="
        cure += f"{os.path.dirname(record.audio) or '...'})"
        return refuse("row", reason, cure)
    name = record.id or (recordings.id_of(audio) if audio else record.audio)
    if not stays_inside(name):
        return refuse("row", f"the id must be a name, not a path out of a folder: {name!r}")
    if record.speaker == RESERVED or any(letter < " " for letter in record.speaker):
        reason = f"no speaker can be called {record.speaker!r}"
        return refuse("row", reason, "name the speaker in plain letters")
    text = normalize(record.text, config.language)
    if not letters(text):
        return refuse("row", "the text is empty", "write what is said, or remove the line")
    if not audio:
        return refuse("missing", recordings.problem(record.audio))
    return Utterance(
        id=name,
        audio=audio,
        text=text,
        speaker=record.speaker or "speaker",
        split=record.split or "train",
        line=record.line,
        file=record.file,
    )


def _require_folders(records: list[Record]) -> None:
    for base in {record.base for record in records}:
        if not base.is_dir():
            raise DatasetError(
                f"{base} is gone: a drive unplugged, a mount that ended, a wrong `audio_root`? "
                "Nothing was written; connect it again and run again."
            )


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
    name = row.id or getattr(row, "audio", "")
    return Finding(file=row.file, line=row.line, id=name, kind=kind, reason=reason, cure=cure)
