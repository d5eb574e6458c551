"""Read datasets in the usual layouts into the same rows.

The layout is recognised by the files in the folder; to support another one, add a `DatasetLayout`
to `LAYOUTS`. A line that cannot be used becomes a finding that names table, line and fix. Originals
are only read.
"""

import collections
import dataclasses
import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kit.base.errors import DatasetError, KitError
from kit.base.formatting import as_utf8, join_names, non_utf8_problem, shorten
from kit.dataset import tables as table_files
from kit.dataset import text_files
from kit.dataset.data_report import Finding, Spool, rows_in_split, values_repeated
from kit.dataset.manifest import Utterance
from kit.dataset.recordings import (
    Record,
    Recordings,
    bad_row,
    canonical_split,
    check_record,
    has_known_split,
    has_suffix,
    is_phonemes,
    label_of,
    speakers_in_names,
    speakers_of_folders,
    split_of_table,
    stays_inside,
)
from kit.settings import ManifestConfig
from kit.streams.stream import is_held_out, stable_hash
from kit.text.normalize import letters

DOCUMENTS = (".xlsx", ".xls", ".ods", ".docx", ".doc", ".odt", ".pdf", ".numbers")
NOT_FOR_TRAINING = ("invalidated", "rejected", "reported")  # tables of what listeners refused
MIN_HELD_OUT = 5
MAX_TABLES = 100  # in a folder; more are texts in files of their own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The rows of a dataset's tables, before any recording is opened."""

    layout: str  # its name and its tables
    rows: Spool
    refused: list[Finding]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetLayout:
    name: str
    folder: str  # description of a folder in this layout
    row: str  # description of a table's line
    suffixes: tuple[str, ...] = ()  # of a table given instead of a folder
    beside: str = "."  # folder that must be beside the tables
    tables: Callable[[Path], list[Path]]  # in a folder; [] for another layout
    # Reads the tables; unusable lines become findings, and a str says how a table was read.
    read: Callable[[list[Path], ManifestConfig], Iterator[Record | Finding | str]]


def read_dataset(source: Path, config: ManifestConfig) -> Dataset:
    """Read the rows of a folder, or of a single table, in any known layout.

    Splits are those of the dataset; where none is held out, `hold_out` chooses rows. Raises
    DatasetError when `source` is not a dataset or has no rows, a table lacks a column or it is not
    clear which column is what, or the recordings' folder is gone.
    """
    source = Path(source)
    refused: list[Finding] = []
    notes: list[str] = []

    def read_records() -> Iterator[Record]:
        for line in layout.read(tables, config):
            if isinstance(line, Record):
                yield line
            else:
                (refused if isinstance(line, Finding) else notes).append(line)

    try:
        layout, tables = recognise(source)
        is_below = source.is_dir() and source not in (tables[0], tables[0].parent)
        if is_below and not config.audio_root and not Recordings(tables[0].parent).folders():
            config = dataclasses.replace(config, audio_root=str(source))
        records = Spool(read_records())
    except KitError as error:
        raise DatasetError(str(error)) from error
    except OSError as error:
        raise DatasetError(
            f"{error.filename or source} cannot be read: {error.strerror}. Is its disk mounted, "
            "and may this user read it?"
        ) from error
    has_speakers = any(record.speaker for record in records)
    speakers = {} if has_speakers else speakers_of_folders(record.file for record in records)
    if not records and not refused:
        raise DatasetError(_no_rows_message(layout, tables))
    folders = {base: Recordings(base) for base in {record.base for record in records}}
    for base in folders:
        if not base.is_dir():
            raise DatasetError(
                f"{base} is gone: a drive unplugged, a mount that ended, a wrong `audio_root`? "
                "Nothing was written; connect it again and run again."
            )
    if not config.columns:
        _require_words(records)

    def valid_rows() -> Iterator[Utterance]:
        for record in records:
            if speakers:
                record = dataclasses.replace(record, speaker=speakers[record.file])
            row = check_record(record, folders[record.base], config)
            if isinstance(row, Finding):
                refused.append(row)
            else:
                yield row

    rows, repeated = without_repeats(Spool(valid_rows()))
    if not (has_speakers or speakers):
        speakers = speakers_in_names(row.audio for row in rows)
        if speakers:
            rows = Spool(dataclasses.replace(row, speaker=speakers[row.audio]) for row in rows)
    if speakers:
        notes.append(f"speakers are folders: {join_names(sorted(set(speakers.values())), 8)}")
    names = join_names([label_of(table, tables) for table in tables], 8)
    beside = sorted(set(tables[0].parent.glob("metadata*.csv")) - set(tables))
    if beside:
        notes.append(f"not read: {join_names([table.name for table in beside], 8)}")
    description = "; ".join([f"{layout.name}: {names}", *notes])
    return Dataset(layout=description, rows=hold_out(rows, config), refused=refused + repeated)


def _require_words(records: Spool) -> None:
    with_text = (record for record in records if record.text)
    spoken = list(itertools.islice(with_text, table_files.SAMPLE_ROWS))
    phonemes = [record for record in spoken if is_phonemes(record.text)]
    if 2 * len(phonemes) > len(spoken):
        first = phonemes[0]
        raise DatasetError(
            f"{first.file}, line {first.line}: the texts are phonemes or pinyin, not words: "
            f"{shorten(first.text, 60)}. Give the words as they are written (in a table with both, "
            "name the columns with COLUMNS or --columns). The kit makes phonemes itself: PHONEMES "
            'or --phonemes. To train on these signs anyway, say so: COLUMNS = "audio|text" for two '
            "columns, --set manifest.columns=..."
        )


def without_repeats(rows: Spool) -> tuple[Spool, list[Finding]]:
    """Leave out the rows of a recording with several texts, and all but the first of an id.

    Returns a finding for each.
    """
    audio_repeats = values_repeated(hash(row.audio) for row in rows)
    id_repeats = values_repeated(hash(row.id) for row in rows)
    if not audio_repeats and not id_repeats:
        return rows, []
    of_audio: dict[str, Utterance] = {}
    conflicts = set()
    for row in rows:
        if hash(row.audio) in audio_repeats:
            first = of_audio.setdefault(row.audio, row)
            if letters(first.text) != letters(row.text):
                conflicts.add(row.audio)
    of_id: dict[str, Utterance] = {}
    findings = []

    def kept() -> Iterator[Utterance]:
        for row in rows:
            if row.audio in conflicts:
                first = of_audio[row.audio]
                reason = f"another text for its recording is in {first.file}, line {first.line}"
                if first == row:
                    reason = "another line gives its recording another text"
                fix = "keep the line that is right; a part of a recording needs a file of its own"
            elif hash(row.id) in id_repeats and of_id.setdefault(row.id, row) != row:
                first = of_id[row.id]
                reason = f"this id is already used in {first.file}, line {first.line}"
                fix = "give every line an id of its own"
            else:
                yield row
                continue
            findings.append(bad_row(row.file, row.line, row.id, reason, fix))

    return Spool(kept()), findings


def hold_out(
    rows: Sequence[Utterance], config: ManifestConfig, count: int = 0
) -> Sequence[Utterance]:
    """Return `rows`, some of `train` held out where no held-out row can be spelled by training.

    A stable hash of the id chooses `held_out_percent` of them; of few recordings at least
    MIN_HELD_OUT or a tenth, whichever is less, and one of two. `count` is the number of training
    rows before some were rejected. Rows with a letter that no other row has stay in training.
    """
    train = rows_in_split(rows, "train")
    known = collections.Counter()
    for row in train:
        known.update(_letters(row))
    if any(row.split == "held_out" and _letters(row) <= known.keys() for row in rows):
        return rows
    percent = config.held_out_percent
    count = max(count, len(train))
    minimum = min(MIN_HELD_OUT, max(count // 10, count > 1)) if percent else 0
    chosen = set()
    for row in _by_hash(train):
        if len(chosen) >= minimum and not is_held_out(row.id, percent):
            break
        own = _letters(row)
        if len(chosen) < len(train) - 1 and all(known[letter] > 1 for letter in own):
            chosen.add(row.id)
            known.subtract(own)

    def moved(row: Utterance) -> Utterance:
        if row.split != "train" or row.id not in chosen:
            return row
        return dataclasses.replace(row, split="held_out")

    return Spool(map(moved, rows))


def _by_hash(rows: Sequence[Utterance]) -> Iterator[Utterance]:
    """Yield `rows` in the order of their stable hashes and ids; only those asked for are read."""
    hashes = np.fromiter((stable_hash(row.id) for row in rows), np.uint16, len(rows))
    for value in np.unique(hashes):
        same = (rows[int(i)] for i in np.flatnonzero(hashes == value))
        yield from sorted(same, key=lambda row: row.id)


def _letters(row: Utterance) -> set[str]:
    return set(letters(row.text)) - {" "}


def require_training_rows(rows: Iterable[Utterance]) -> None:
    """Raise DatasetError, which names the splits, where rows have splits and none is `train`."""
    counts = collections.Counter(row.split for row in rows)
    if counts and not counts["train"]:
        splits = join_names([f"`{name}` ({n:,} rows)" for name, n in counts.most_common()])
        raise DatasetError(
            f"No row is in the split `train`. The splits are {splits}: from the names of the "
            "tables, or from a column `split`. Rename what to train on (a table to train.csv or "
            "train.jsonl, LJSpeech's to metadata_train.csv), or name one table as DATA."
        )


def _no_rows_message(layout: DatasetLayout, tables: list[Path]) -> str:
    message = ""
    for table in tables:
        head = table_files.read_head(table)
        message += f"{table} has {table.stat().st_size:,} bytes and no rows"
        if head.strip():
            first = head.split(b"\n")[0].decode(errors="replace").strip()
            message += f" below its first line, {shorten(repr(first), 120)}"
        if b"\r" in head and b"\n" not in head:
            message += "; its lines end in carriage returns alone: save it with Unix line ends"
        message += ". "
    return f"{message}Expected {layout.row}."


def recognise(source: Path) -> tuple[DatasetLayout, list[Path]]:
    """Return the layout and the tables of a folder, or of a single table.

    The tables may also be in subfolders: of splits, such as train/ and test/, or in any, as long as
    all are of one layout. Raises DatasetError, which lists what was expected and what is there.
    """
    problem = non_utf8_problem(source.absolute())
    if problem:
        raise DatasetError(f"{problem}.")
    if source.is_dir():
        result = _tables_of(source) or _tables_below(source)
        if not result and text_files.folders_of_texts(source):
            result = TEXTS, [source]
        if not result:  # VITS has filelists/ beside the recordings
            folders = [f for f in _folders_below(source) if not Recordings(f).folders()]
            tables = [table for folder in folders for table in _other_tables(folder, source)]
            result = (LAYOUTS[-1], tables) if tables else None
        if result:
            return result
    elif source.is_file():
        for layout in LAYOUTS:
            known = source.suffix.lower() in layout.suffixes
            if known and (source.parent / layout.beside).is_dir():
                return layout, [source]
    content = "no such file or folder"
    if source.is_dir():
        names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in source.iterdir())
        content = join_names(names, 8) or "an empty folder"
    elif source.exists():
        content = f"a file {source.name}"
    content = as_utf8(content)
    expected = " or ".join(f"{layout.folder} ({layout.name})" for layout in (*LAYOUTS, TEXTS))
    raise DatasetError(
        f"{source} is not a dataset in a known layout (docs/extending.md shows how to add "
        f"one): expected {expected}; found {content}.{_hint(source)}"
    )


def _hint(source: Path) -> str:
    if source.is_file() and has_suffix(source.name):
        return " That is a single recording: name the folder or the table with its text."
    folder = source if source.is_dir() else source.parent
    if not folder.is_dir():
        return ""
    recordings = Recordings(folder)
    for path in sorted(folder.iterdir()) if source.is_dir() else [source]:
        suffix = path.suffix.lower()
        if suffix in DOCUMENTS:
            return f" {path.name} is a document: export it as CSV UTF-8, a recording a line."
        if suffix not in table_files.TABLE_SUFFIXES or not path.is_file():
            continue
        try:
            lines = list(table_files.iter_lines(path, table_files.HEAD_BYTES))
        except (DatasetError, OSError) as error:
            return f" {error}"
        for line in lines:
            names = (cell.strip(' "') for cell in re.split(r"[|;,\t]", line))
            problem, fix = table_files.encoding_problem(line)
            if problem and any(map(recordings.lists, names)):
                return f" A line of {path.name} has this problem: {problem}. So {fix}."
    count = len(recordings.paths()) if source.is_dir() else 0
    if count:
        return (
            f" There are {count:,} recordings, but no text was found for them: write metadata.csv "
            "with a line `name|text` for each, or let Whisper write it: python -m kit transcribe "
            f"--data {shlex.quote(str(source))} --out clips/."
        )
    return ""


def _tables_of(folder: Path) -> tuple[DatasetLayout, list[Path]] | None:
    children = [c for c in sorted(folder.iterdir()) if has_known_split(c.name) and c.is_dir()]
    for folders in ([folder], children):
        for layout in LAYOUTS:
            beside = [f for f in folders if (f / layout.beside).is_dir()]
            tables = [table for f in beside for table in layout.tables(f)]
            if tables:
                return layout, tables
    return None


def _tables_below(source: Path) -> tuple[DatasetLayout, list[Path]] | None:
    """Return the tables in subfolders. Raises DatasetError where they are several datasets."""
    datasets = {}
    for folder in _folders_below(source):
        result = _tables_of(folder) if datasets.keys().isdisjoint(folder.parents) else None
        if result:
            datasets[folder] = result
    layouts = {layout for layout, _ in datasets.values()}
    languages = len(datasets) > 1 and any(layout.read is _common_voice for layout in layouts)
    if len(layouts) > 1 or languages:
        names = join_names([str(folder.relative_to(source)) for folder in datasets], 8)
        raise DatasetError(f"{source} holds several datasets ({names}): name one of them.")
    tables = [table for _, own in datasets.values() for table in own]
    return (layouts.pop(), tables) if tables else None


def _folders_below(source: Path, depth: int = 6) -> Iterator[Path]:
    for child in sorted(source.iterdir()):
        hidden = child.name.startswith((".", "__MACOSX")) or non_utf8_problem(child)
        if depth and child.is_dir() and not hidden:
            yield child
            yield from _folders_below(child, depth - 1)


def _ljspeech_tables(folder: Path) -> list[Path]:
    """Return the splits, or the table of all rows, which repeats them, without its copies."""
    tables = sorted(folder.glob("metadata*.csv"))
    if any(split_of_table(table.stem) == "train" for table in tables):
        return [table for table in tables if table.stem != "metadata"]  # free names of splits, too
    usual = [t for t in tables if t.stem == "metadata" or has_known_split(t.stem)]
    return usual if folder / "metadata.csv" in tables else tables


def _common_voice_tables(folder: Path) -> list[Path]:
    """Return the splits where there are any; validated.tsv repeats their rows."""
    has_splits = (folder / "train.tsv").is_file()
    names = ("train.tsv", "dev.tsv", "test.tsv") if has_splits else ("validated.tsv",)
    return [folder / name for name in names if (folder / name).is_file()]


def _common_voice(tables: list[Path], config: ManifestConfig) -> Iterator[Record | Finding | str]:
    """Read tables; an id is the clip's name, a speaker 12 of 128 hex digits: enough to tell."""
    for line in table_files.read_tables(tables, config):
        if isinstance(line, Record):
            name = line.audio.rsplit(".", 1)[0] if stays_inside(line.audio) else ""
            yield dataclasses.replace(line, id=name, speaker=line.speaker[:12])
        elif isinstance(line, Finding):
            yield line


def _other_tables(folder: Path, audio_root: Path | None = None) -> list[Path]:
    """Return the tables in a folder that name recordings there, or in `audio_root`."""
    files = [p for p in sorted(folder.iterdir()) if p.suffix.lower() in table_files.TABLE_SUFFIXES]
    files = [path for path in files if path.is_file() and path.stem.lower() not in NOT_FOR_TRAINING]
    if len(files) > MAX_TABLES or text_files.has_own_texts(files, folder):
        return []
    tables = table_files.tables_of_recordings(files, audio_root)
    # If some are splits, those alone: a list of all rows would repeat them.
    splits = [path for path in tables if has_known_split(path.stem)]
    return splits if any(canonical_split(p.stem) == "train" for p in splits) else tables


# Tried last: the tables of other layouts are texts, too.
TEXTS = DatasetLayout(
    name="texts",
    folder="a text file for each recording (c0.wav and c0.txt), or a list of `id text`",
    row="a text for each recording",
    tables=text_files.folders_of_texts,
    read=text_files.read_text_files,
)
# In the order in which they are tried.
LAYOUTS = (
    DatasetLayout(
        name="LJSpeech",
        folder="metadata.csv with id|text, and wavs/",
        row="id|text in every line",
        suffixes=(".csv",),
        beside="wavs",
        tables=_ljspeech_tables,
        read=table_files.read_tables,
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
        tables=table_files.json_tables,
        read=table_files.read_json,
    ),
    DatasetLayout(
        name="Kaldi",
        folder="wav.scp and text",
        row="`id path` in every line of wav.scp",
        suffixes=(".scp",),
        tables=text_files.kaldi_tables,
        read=text_files.read_kaldi,
    ),
    DatasetLayout(
        name="table",
        folder="a CSV, TSV or | table that names recordings beside it",
        row="a recording and its text in every line",
        suffixes=table_files.TABLE_SUFFIXES,
        tables=_other_tables,
        read=table_files.read_tables,
    ),
)
