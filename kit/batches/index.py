"""The index of a corpus: each row's text ids and where its codes lie, in columns of numbers.

A row is a place in flat columns, not an object, so thirty million rows open as fast as thirty. What
a start would have to count over all rows is counted once, when the index is made: which rows a
split has, which a speaker, how many are how long, whose clip is a speaker's reference. Indexes of
earlier versions, which held rows as JSON, are read into the same columns. Knows no batch and no
model.

Shapes: N rows, S splits, P speakers.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kit.batches.cache_files import as_bytes, from_bytes, load_tensors, split_by
from kit.batches.code_shards import Clip, shard_clips
from kit.batches.columns import (
    Column,
    ColumnFile,
    MemoryColumns,
    Strings,
    narrow,
    offsets_of,
    read_header,
    strings_columns,
)

LENGTHS = ("texts", "codes", "tokens")  # text ids, codes, and both together


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexRow:
    """A row of the manifest as the index keeps it."""

    id: str
    speaker: str
    split: str
    text: np.ndarray  # ids
    clip: Clip


def index_columns(rows: Sequence[IndexRow]) -> dict[str, np.ndarray]:
    """`rows` as the columns of an index."""
    shard_paths, shards = numbered(row.clip.shard for row in rows)
    speaker_names, speakers = numbered(row.speaker for row in rows)
    split_names, splits = numbered(row.split for row in rows)
    ids, id_offsets = strings_columns(row.id for row in rows)
    texts = [row.text for row in rows]
    checks = np.array([(row.clip.code_check, row.clip.reference_check) for row in rows], np.uint32)
    columns = {
        "ids": ids,
        "id_offsets": id_offsets,
        "texts": narrow(np.concatenate(texts)),
        "text_offsets": offsets_of(texts),
        "codes": narrow(np.array([row.clip.codes for row in rows])),
        "shards": shards,
        "places": narrow(np.array([row.clip.place for row in rows])),
        "code_checks": checks[:, 0].copy(),
        "reference_checks": checks[:, 1].copy(),
        "speakers": speakers,
        "splits": splits,
    }
    return add_counts(columns, [path.name for path in shard_paths], speaker_names, split_names)


def numbered(values: Iterable) -> tuple[list, np.ndarray]:
    """The different `values` in their order, and the number of each of `values` among them."""
    values = list(values)
    names = sorted(set(values))
    numbers = {name: i for i, name in enumerate(names)}
    return names, narrow(np.array([numbers[value] for value in values]))


def add_counts(
    columns: dict[str, np.ndarray], shards: list[str], speakers: list[str], splits: list[str]
) -> dict[str, np.ndarray]:
    """`columns`, one number a row, with the names they stand for and all that is counted once."""
    found = dict(columns)
    found["shard_names"] = as_bytes(shards)
    found["speaker_names"] = as_bytes(speakers)
    found["split_names"] = as_bytes(splits)
    text_counts = np.diff(columns["text_offsets"].astype(np.int64))
    tokens = text_counts + columns["codes"]
    found["tokens"] = narrow(tokens)
    for name, counts in zip(LENGTHS, (text_counts, columns["codes"], tokens)):
        found[f"{name}_histogram"] = histograms(counts, columns["splits"], len(splits))
    found.update(rows_by_speaker(columns["splits"], columns["speakers"], len(splits), speakers))
    found["references"] = middle_rows(columns, tokens, len(splits), len(speakers))
    found["corpus"] = as_bytes(corpus_digest(found))
    return found


def histograms(counts: np.ndarray, splits: np.ndarray, split_count: int) -> np.ndarray:
    """How many rows have each count, (S, largest count + 1)."""
    size = int(counts.max(initial=0)) + 1
    rows = [np.bincount(counts[splits == number], minlength=size) for number in range(split_count)]
    return np.array(rows, dtype=np.int64)


def rows_by_speaker(
    splits: np.ndarray, speakers: np.ndarray, split_count: int, speaker_names: list[str]
) -> dict[str, np.ndarray]:
    """The rows of each split in their order, and those of each speaker in it."""
    count = len(speaker_names)
    members = np.argsort(splits, kind="stable")
    voices = np.lexsort((speakers, splits))
    of_both = splits.astype(np.int64) * count + speakers
    sizes = np.bincount(of_both, minlength=split_count * count)
    starts = np.concatenate([[0], sizes.cumsum()])
    return {
        "members": narrow(members),
        "member_starts": starts[::count].copy(),  # (S + 1,)
        "voices": narrow(voices),
        "voice_starts": narrow(starts),  # (S P + 1,)
    }


def middle_rows(
    columns: dict[str, np.ndarray], tokens: np.ndarray, split_count: int, speaker_count: int
) -> np.ndarray:
    """The row of each speaker that is of middling length in its split (S, P); -1 where none is.

    It is the first of that speaker at or above the split's median; without one, the shortest.
    """
    found = np.full((split_count, speaker_count), -1, dtype=np.int64)
    for split in range(split_count):
        members = np.flatnonzero(columns["splits"] == split)
        order = members[np.argsort(tokens[members], kind="stable")]
        middle = len(order) // 2
        order = np.concatenate([order[middle:], order[:middle]])
        speakers, first = np.unique(columns["speakers"][order], return_index=True)
        found[split, speakers] = order[first]
    return found


def corpus_digest(columns: dict[str, np.ndarray]) -> str:
    """8 hex digits that change with any id, split or length, and with their order."""
    found = hashlib.sha256()
    for name in ("ids", "id_offsets", "splits", "split_names", "tokens"):
        found.update(columns[name].tobytes())
    return found.hexdigest()[:8]


class Index:
    """The rows of a corpus: `rows[i]` and `texts[i]`, and what is known of all of them.

    `folder` is that of the shards.
    """

    def __init__(self, columns: ColumnFile | MemoryColumns, folder: Path):
        self.columns = columns
        self.folder = folder
        self.split_names: list[str] = from_bytes(columns.whole("split_names"))
        self.speaker_names: list[str] = from_bytes(columns.whole("speaker_names"))
        self.ids = Strings(columns["ids"], columns["id_offsets"])
        self.texts = Texts(columns)
        self.tokens = columns["tokens"]
        self.codes = columns["codes"]
        self.speakers = columns["speakers"]
        self.splits = columns["splits"]
        self.voices = columns["voices"]
        self.voice_starts = columns["voice_starts"]

    def __len__(self) -> int:
        return len(self.splits)

    def __reduce__(self):  # a mapping cannot travel to a spawned worker; its path can
        return Index, (self.columns, self.folder)

    @property
    def rows(self) -> "Rows":
        return Rows(self)

    @property
    def shards(self) -> list[Path]:
        return [self.folder / name for name in from_bytes(self.columns.whole("shard_names"))]

    @property
    def corpus(self) -> str:
        """A mark of all rows: their ids, splits and lengths."""
        return from_bytes(self.columns.whole("corpus"))

    def rows_in_split(self, split: str) -> Column:
        """The rows of `split` in their order; unread until they are asked for."""
        members = self.columns["members"]
        if split not in self.split_names:
            return members.part(0, 0)
        number = self.split_names.index(split)
        first, last = self.columns.whole("member_starts")[number : number + 2].tolist()
        return members.part(first, last)

    def of_speaker(self, speaker: int, split: str) -> Column:
        """The rows of speaker number `speaker` in `split`, in their order."""
        at = self.split_names.index(split) * len(self.speaker_names) + speaker
        return self.voices.part(self.voice_starts[at], self.voice_starts[at + 1])

    def numbers(self, rows: np.ndarray, what: str) -> np.ndarray:
        """Of each of `rows`: one of LENGTHS, or the number of its speaker."""
        if what == "texts":
            return self.tokens[rows].astype(np.int64) - self.codes[rows]
        columns = {"codes": self.codes, "tokens": self.tokens, "speakers": self.speakers}
        return columns[what][rows]

    def reference_rows(self, split: str) -> dict[str, int]:
        """The row of each speaker in `split` that is of middling length."""
        if split not in self.split_names:
            return {}
        rows = self.columns.whole("references")[self.split_names.index(split)].tolist()
        return {name: row for name, row in zip(self.speaker_names, rows) if row >= 0}

    def histogram(self, what: str, split: str | None = None) -> np.ndarray:
        """How many rows of `split` (None: of all) have 0, 1, 2... of `what`, one of LENGTHS."""
        table = self.columns.whole(f"{what}_histogram")
        if split is None:
            return table.sum(axis=0)
        if split not in self.split_names:
            return np.zeros(1, dtype=np.int64)
        return table[self.split_names.index(split)]


class Rows(Sequence):
    """`rows[i]`: id, speaker and split of row i."""

    def __init__(self, index: Index):
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> dict[str, str]:
        index = self.index
        return {
            "id": index.ids[i],
            "speaker": index.speaker_names[index.speakers[i]],
            "split": index.split_names[index.splits[i]],
        }


class Texts(Sequence):
    """`texts[i]`: the text ids of row i."""

    def __init__(self, columns: ColumnFile | MemoryColumns):
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["text_offsets"]) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        i = range(len(self))[i]
        start, end = self.columns["text_offsets"][i : i + 2].tolist()
        found = self.columns["texts"][start:end].astype(np.int32)
        self.columns.let_go()
        return found


def open_index(path: Path) -> Index:
    """The index at `path`. Raises DamagedFileError for a missing or damaged file."""
    path = Path(path)
    header, _ = read_header(path)
    if "rows" in header:
        columns = MemoryColumns(columns_of_early_version(path))
    else:
        columns = ColumnFile(path)
    return Index(columns, path.parent)


def columns_of_early_version(path: Path) -> dict[str, np.ndarray]:
    """The columns of an index whose rows are JSON: all its shards are read for them."""
    table = load_tensors(path)
    shards = [path.parent / name for name in from_bytes(table["shards"])]
    clips = [list(shard_clips(shard).values()) for shard in shards]
    texts = split_by(table["texts"], table["text_counts"])
    rows = []
    for row, text, (shard, place) in zip(from_bytes(table["rows"]), texts, table["places"]):
        rows.append(IndexRow(**row, text=text, clip=clips[shard][place]))
    return index_columns(rows)
