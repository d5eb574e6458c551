"""Splits of a dataset: their usual names, and which rows are held out where it brings none."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kit.base.errors import DatasetError
from kit.base.formatting import join_names
from kit.dataset.data_report import ManifestConfig, Utterance, rows_in_split
from kit.dataset.recordings import label_of
from kit.dataset.spool import Spool
from kit.streams.stream import is_held_out, stable_hash
from kit.text.normalize import letters

TRAIN = frozenset({"train", "training", "traindata", "trainset", "nodev"})
HELD_OUT = frozenset(
    "heldout dev devel development valid validation validate val eval evaluation devset valset "
    "evalset".split()
)
TEST = frozenset({"test", "testing", "testset"})
MIN_HELD_OUT = 5
# Folders that divide the recordings of one person.
PARTS = re.compile(
    r"(book|chapter|ch|part|disc|disk|cd|take|session|batch|volume|vol|day|lesson|unit)[ _-]*\d+",
    re.I,
)
GENDERS = frozenset({"male", "female", "m", "f"})  # folders of several speakers each


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


def canonical_split(name: str) -> str:
    """Return "train" or "held_out" for the usual names of these, any other name as it is.

    In any case, with - or _, and with other words around: `train_manifest`, `Validation`,
    `dev-clean`. What names both (ESPnet's train_dev) is not trained on.
    """
    words = _words(name)
    if words & HELD_OUT or {"held", "out"} <= words:
        return "held_out"
    if words & TRAIN:
        return "train"
    return name


def known_split(name: str) -> bool:
    """Tell whether a value is nothing but a split's usual name."""
    words = re.split(r"[-_ ]", name.strip().lower())
    return "".join(words) in TRAIN | HELD_OUT | TEST


def split_of_table(stem: str) -> str:
    """Return the split that a table's name says it holds: `metadata_test-clean` holds test-clean.

    "" for `metadata` alone, which is all of a dataset.
    """
    rest = re.sub(r"^metadata", "", stem, flags=re.IGNORECASE)
    return canonical_split(rest.strip("_- ."))


def has_known_split(name: str) -> bool:
    """Tell whether a table's or folder's name has a word for train, held-out or test rows."""
    return canonical_split(name) in ("train", "held_out") or bool(_words(name) & TEST)


def split_of(table: Path, tables: list[Path]) -> str:
    """Return the split that a table's name says it holds, or its folder's; "" for none."""
    label = label_of(table, tables)
    split = split_of_folders(label)
    if split:
        return split
    if ("/" in label or len(tables) == 1) and not has_known_split(table.stem):
        return ""
    return split_of_table(table.stem)


def split_of_folders(label: str) -> str:
    """Return the split that the innermost folder with the name of one says; "" for none."""
    names = [part for part in Path(label).parts[:-1] if has_known_split(part)]
    return canonical_split(names[-1]) if names else ""


def speakers_of_folders(labels: Iterable[str]) -> dict[str, str]:
    """Return {label of a table or text: its folder}, where the folders can be speakers.

    That is the first folder in which the paths differ, without those of splits and of chapters.
    """
    folders = {}
    for label in set(labels):
        parts = Path(label).parts[:-1]
        folders[label] = [p for p in parts if not has_known_split(p) and not PARTS.fullmatch(p)]
    without_gender = {}
    for label, parts in folders.items():
        without_gender[label] = [p for p in parts if p.lower() not in GENDERS]
    return _first_difference(without_gender) or _first_difference(folders)


def speakers_in_names(paths: Iterable[str]) -> dict[str, str]:
    """Return {recording: speaker}, where it is in a folder whose name is in its own name, too.

    AISHELL has S0002/BAC009S0002W0122.wav, MLS 10/20/10_20_000001.flac. {} where there is just one.
    """
    names = {}
    for path in paths:
        *folders, name = Path(path).parts
        known = [f for f in folders if len(f) > 1 and re.search(r"\d", f) and f in name]
        names[path] = [folder for folder in known if not PARTS.fullmatch(folder)][:1]
        if not names[path]:
            return {}
    return _first_difference(names)


def _first_difference(folders: dict[str, list[str]]) -> dict[str, str]:
    depth = 0
    while folders and all(len(parts) > depth for parts in folders.values()):
        names = {label: parts[depth] for label, parts in folders.items()}
        if len(set(names.values())) > 1:
            return names
        depth += 1
    return {}


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
    chosen: set[str] = set()
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
    if not counts or counts["train"]:
        return
    splits = [f"`{name}` ({n:,} rows)" for name, n in counts.most_common()]
    raise DatasetError(
        f"No row is in the split `train`. The splits are {join_names(splits)}: from the names of "
        "the tables, or from a column `split`. Rename what to train on (a table to train.csv or "
        "train.jsonl, LJSpeech's to metadata_train.csv), or name one table as DATA."
    )
