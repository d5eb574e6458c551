"""Find a dataset's tables, or the texts beside its recordings, and read them into the same rows.

What a table's columns hold is said by its first line or by the user (columns.py, tables.py). A line
that cannot be used becomes a finding that names table, line and fix. Originals are only read.
"""

import collections
import dataclasses
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from kit.base.errors import DatasetError, KitError
from kit.base.formatting import as_utf8, join_names, non_utf8_problem
from kit.dataset.columns import columns_in_order
from kit.dataset.data_report import Finding, rows_in_split
from kit.dataset.manifest import Utterance
from kit.dataset.recordings import (
    BadRow,
    Place,
    Recordings,
    bad_row,
    check_row,
    has_suffix,
    known_split,
    split_of_table,
    walk,
)
from kit.dataset.tables import JSON_SUFFIXES, Row, Table, encoding_problem, iter_lines, open_table
from kit.settings import ManifestConfig
from kit.streams.stream import is_held_out, stable_hash
from kit.text.normalize import letters, unicode_script

TABLE_SUFFIXES = (".csv", ".tsv", *JSON_SUFFIXES)
# Read as tables where `columns` says what they hold; a README or a text of a recording may be one.
LIST_SUFFIXES = (".txt", ".list", ".psv", ".json")
NOT_FOR_TRAINING = ("invalidated", "rejected", "reported")  # tables of what listeners refused
MIN_HELD_OUT = 5
UPLOADED = re.compile(r"batch-\d+")  # folders that the page for uploads makes
# Scripts of thousands of letters, few of which recur: a held-out text may have one of its own.
MANY_LETTERS = {"CJK", "HANGUL"}
EXPECTED = (
    "metadata.csv with id|text, beside wavs/ (LJSpeech); validated.tsv or train.tsv, beside clips/ "
    "(Common Voice); a CSV, TSV or JSONL with names for its columns, such as audio and text; or "
    "c0.txt beside c0.wav for each recording. A table without names, .txt or .json needs COLUMNS "
    "(--columns); a document or spreadsheet is exported as CSV UTF-8"
)
EVALUATION = "eval-data/"  # begins ids and tables of a dataset that is held out as a whole
TEXT_COLUMNS = columns_in_order(["audio", "text"], ["audio", "text"])  # of texts beside recordings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The rows of a dataset's tables, before any recording is opened."""

    layout: str  # its tables and their columns
    rows: list[Utterance]
    refused: list[Finding]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetFiles:
    folder: Path  # that the names of its files start from
    tables: list[Table]  # none: a text beside each recording
    unread: list[str]  # names of tables that are left out

    def label(self, path: Path) -> str:
        """Return a file's name, with its folder where it is in another one, as UTF-8."""
        return as_utf8(path.relative_to(self.folder).as_posix())

    def __str__(self) -> str:
        parts = [] if self.tables else ["a .txt beside each recording"]
        for columns in dict.fromkeys(str(table.columns) for table in self.tables):
            own = [self.label(t.path) for t in self.tables if str(t.columns) == columns]
            parts.append(f"{join_names(own, 8)} ({columns})")
        if self.unread:
            parts.append(f"not read: {join_names(self.unread, 8)}")
        return "; ".join(parts)


def read_dataset(source: Path, config: ManifestConfig) -> Dataset:
    """Read the rows of a folder, or of a single table.

    Splits are those of the dataset; where none is held out, `hold_out` chooses rows. Raises
    DatasetError when `source` is not a dataset or has no rows, when it is not clear which column
    is what, or when the recordings' folder is gone.
    """
    source = Path(source)
    try:
        files = find_dataset(source, config)
        if files.tables:
            results = list(_read_tables(files, config, alone=source.is_file()))
        else:
            results = list(_read_texts(files, config))
    except KitError as error:
        raise DatasetError(str(error)) from error
    except OSError as error:
        raise DatasetError(
            f"{error.filename or source} cannot be read: {error.strerror}. Is its disk mounted, "
            "and may this user read it?"
        ) from error
    if not results:
        names = join_names([str(table.path) for table in files.tables])
        raise DatasetError(f"{names} has no rows below its first line: one a recording expected.")
    rows, repeated = without_repeats([row for row in results if isinstance(row, Utterance)])
    refused = [row for row in results if isinstance(row, Finding)]
    return Dataset(layout=str(files), rows=hold_out(rows, config), refused=refused + repeated)


def _read_tables(
    files: DatasetFiles, config: ManifestConfig, alone: bool
) -> Iterator[Utterance | Finding]:
    for table in files.tables:
        parent = table.path.parent
        bases = [Path(config.audio_root)] if config.audio_root else [parent, files.folder]
        if not bases[0].is_dir():
            raise DatasetError(
                f"{bases[0]} is gone: a drive unplugged, a mount that ended, a wrong `audio_root`? "
                "Nothing was written; connect it again and run again."
            )
        usual = [base / name for base in bases for name in ("wavs", "clips", ".")]
        roots = list(dict.fromkeys(folder for folder in usual if folder.is_dir()))
        is_one_of_several = parent != files.folder and len(files.tables) > 1
        place = Place(
            file=files.label(table.path),
            folder=bases[-1],
            columns=table.columns,
            recordings=Recordings(roots),
            split="" if alone else _split_of(table.path, files),
            prefix=f"{parent.name}/" if is_one_of_several else "",
        )
        for row in table.rows():
            yield check_row(row, place, config)


def _split_of(table: Path, files: DatasetFiles) -> str:
    """Return the split that a table's name, or that of its folder, says; "" for none."""
    split = split_of_table(table.stem)
    if split and (known_split(table.stem) or len(files.tables) > 1):
        return split
    return known_split(table.parent.name) if table.parent != files.folder else ""


def _read_texts(files: DatasetFiles, config: ManifestConfig) -> Iterator[Utterance | Finding]:
    """Read the text of each recording beside it; a recording without one becomes a finding."""
    folder = files.folder
    recordings = Recordings([folder])
    for audio in filter(lambda file: has_suffix(file.name), walk(folder)):
        path = audio.with_suffix(".txt")
        name = audio.relative_to(folder).as_posix()
        if not path.is_file():
            fix = "write it, or let `python -m kit transcribe` do it"
            bad = BadRow(f"no text: there is no {as_utf8(path.name)} beside it", fix)
            yield bad_row(folder.name, 1, name, bad)
            continue
        text = " ".join("".join(iter_lines(path)).split())
        reason, fix = encoding_problem(text)
        if "|" in text or text.lower().startswith(f"{audio.stem.lower()}:"):
            reason = "a line of a table in a text file of its own"
            fix = "write what is said, and nothing else"
        top = name.split("/")[0] if "/" in name else ""
        place = Place(
            file=files.label(path),
            folder=folder,
            columns=TEXT_COLUMNS,
            recordings=recordings,
            split=known_split(top),
        )
        row = Row(line=1, values={"audio": name, "text": text}, problem=reason, fix=fix)
        yield check_row(row, place, config)


def without_repeats(rows: list[Utterance]) -> tuple[list[Utterance], list[Finding]]:
    """Leave out the rows of a recording with several texts, and all but the first of an id.

    Returns a finding for each.
    """
    of_audio: dict[str, Utterance] = {}
    conflicts = set()
    for row in rows:
        first = of_audio.setdefault(row.audio, row)
        if letters(first.text) != letters(row.text):
            conflicts.add(row.audio)
    of_id: dict[str, Utterance] = {}
    kept = []
    findings = []
    for row in rows:
        first = of_id.setdefault(row.id, row)
        if row.audio in conflicts:
            first = of_audio[row.audio]
            bad = BadRow(
                f"its recording has several texts, the first in {first.file}, line {first.line}",
                "keep the line that is right; a part of a recording needs a file of its own",
            )
        elif first is not row:
            bad = BadRow(
                f"this id is already used in {first.file}, line {first.line}",
                "give every line an id of its own, or leave the column out: - in COLUMNS",
            )
        else:
            kept.append(row)
            continue
        findings.append(bad_row(row.file, row.line, row.id, bad))
    return kept, findings


def with_evaluation(dataset: Dataset, evaluation: Dataset) -> Dataset:
    """Return `dataset` with all rows of `evaluation` held out."""

    def marked(each: Utterance | Finding, **over):
        names = {"id": EVALUATION + each.id, "file": EVALUATION + each.file}
        return dataclasses.replace(each, **names, **over)

    return Dataset(
        layout=f"{dataset.layout}; evaluation data: {evaluation.layout}",
        rows=dataset.rows + [marked(row, split="held_out") for row in evaluation.rows],
        refused=dataset.refused + [marked(finding) for finding in evaluation.refused],
    )


def hold_out(rows: list[Utterance], config: ManifestConfig, count: int = 0) -> list[Utterance]:
    """Return `rows`, some of `train` held out where no held-out row can be spelled by training.

    A stable hash of the id chooses `held_out_percent` of them; of few recordings at least
    MIN_HELD_OUT or a tenth, whichever is less, and one of two. `count` is the number of training
    rows before some were rejected. Rows with a letter that no other row has stay in training, but
    for scripts of thousands of letters.
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
    for row in sorted(train, key=lambda row: (stable_hash(row.id), row.id)):
        if len(chosen) >= minimum and not is_held_out(row.id, percent):
            break
        own = _letters(row)
        if len(chosen) < len(train) - 1 and all(known[letter] > 1 for letter in own):
            chosen.add(row.id)
            known.subtract(own)
    return [
        dataclasses.replace(row, split="held_out")
        if row.split == "train" and row.id in chosen
        else row
        for row in rows
    ]


def _letters(row: Utterance) -> set[str]:
    """Return the letters of a row's text that training has to know."""
    own = set(letters(row.text)) - {" "}
    return {letter for letter in own if unicode_script(letter) not in MANY_LETTERS}


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


# --- the files of a dataset -----------------------------------------------------------------------


def find_dataset(source: Path, config: ManifestConfig) -> DatasetFiles:
    """Return the tables of a folder (or in its subfolders), or a single one.

    A folder that holds only a folder is opened. Raises DatasetError where there is no dataset or
    several, or a table does not say what its columns hold.
    """
    if source.is_file() and not has_suffix(source.name):
        return DatasetFiles(folder=source.parent, tables=[open_table(source, config)], unread=[])
    folder = source
    children = _visible(folder)
    while len(children) == 1 and children[0].is_dir():
        folder = children[0]
        children = _visible(folder)
    files = _tables_in(folder, children, config) or _tables_below(folder, children, config)
    if files:
        return files
    if any(has_suffix(file.name) and file.with_suffix(".txt").is_file() for file in walk(source)):
        return DatasetFiles(folder=source, tables=[], unread=[])
    raise DatasetError(_no_dataset_message(source))


def _visible(folder: Path) -> list[Path]:
    """Return what is in a folder, without hidden files; [] where there is none."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        p for p in paths if not p.name.startswith((".", "__MACOSX")) and not non_utf8_problem(p)
    ]


def _tables_in(folder: Path, children: list[Path], config: ManifestConfig) -> DatasetFiles | None:
    """Return the tables in a folder: by their names, or else all that say what they hold."""
    files = [path for path in children if not path.is_dir()]
    recordings = {path.stem for path in files if has_suffix(path.name)}
    paths = [path for path in files if path.suffix.lower() in TABLE_SUFFIXES]
    if config.columns and not paths:
        lists = [path for path in files if path.suffix.lower() in LIST_SUFFIXES]
        paths = [path for path in lists if path.stem not in recordings]
    named = _named_tables(paths)
    tables = []
    problems = []
    for path in named or [p for p in paths if p.stem.lower() not in NOT_FOR_TRAINING]:
        try:
            tables.append(open_table(path, config))
        except DatasetError as error:
            if path in named and split_of_table(path.stem) in ("", "train"):
                raise
            problems.append(error)
    if problems and not tables:
        raise problems[0]
    read = {table.path for table in tables}
    unread = [path.name for path in paths if path not in read]
    return DatasetFiles(folder=folder, tables=tables, unread=unread) if tables else None


def _named_tables(paths: list[Path]) -> list[Path]:
    """Return the tables of splits if one is that of training, or one that is all of a dataset.

    A table of all rows beside those of splits would repeat them.
    """
    of_splits = [path for path in paths if split_of_table(path.stem)]
    if any(split_of_table(path.stem) == "train" for path in of_splits):
        if (of_splits[0].parent / "clips").is_dir():  # Common Voice, whose order this is
            of_splits.sort(key=lambda path: path.name != "train.tsv")
        return of_splits
    whole = [path for path in paths if path.stem.lower() in ("metadata", "validated")]
    named = [path for path in of_splits if path.stem.lower().startswith("metadata")]
    return whole + [path for path in named if known_split(path.stem)] if whole else []


def _tables_below(
    folder: Path, children: list[Path], config: ManifestConfig
) -> DatasetFiles | None:
    """Return the tables in subfolders: in one, in those of splits, or in those of speakers."""
    datasets = [_tables_in(path, _visible(path), config) for path in children if path.is_dir()]
    datasets = [files for files in datasets if files]
    names = [files.folder.name for files in datasets]
    is_known = all(map(known_split, names)) or all(map(UPLOADED.fullmatch, names))
    if len(datasets) > 1 and not (config.speakers or is_known):
        raise DatasetError(
            f"{folder} holds several datasets ({join_names(names, 8)}): name one of them. Where "
            'each folder is a speaker, say so: SPEAKERS = "folder" in 01_data_prep, --speakers.'
        )
    tables = [table for files in datasets for table in files.tables]
    unread = [f"{files.folder.name}/{name}" for files in datasets for name in files.unread]
    return DatasetFiles(folder=folder, tables=tables, unread=unread) if tables else None


def _no_dataset_message(source: Path) -> str:
    names = [f"{p.name}/" if p.is_dir() else p.name for p in _visible(source)]
    recordings = sum(has_suffix(file.name) for file in walk(source))
    hint = ""
    if recordings:
        hint = (
            f" There are {recordings:,} recordings, but no text was found for them: write "
            "metadata.csv with a line `name|text` for each, or let Whisper write it: python -m kit "
            f"transcribe --data {shlex.quote(str(source))} --out clips/."
        )
    content = join_names(names, 8) or "no folder with files"
    return as_utf8(f"{source} is not a dataset: expected {EXPECTED}; found {content}.{hint}")
