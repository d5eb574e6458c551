"""The index of a corpus: each row's text ids and the place of its codes, in columns of numbers.

What concerns all rows (those of a split or speaker, histograms of lengths, each speaker's
reference) is computed once, when the index is made, so thirty million rows open as fast as thirty.

Shapes: N rows, S splits, P speakers.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kit.batches.code_shards import Clip, shard_clips
from kit.batches.columns import (
    Column,
    ColumnFile,
    MemoryColumns,
    Strings,
    as_bytes,
    from_bytes,
    load_tensors,
    narrow,
    offsets_of,
    read_header,
    split_by,
    strings_columns,
)

LENGTHS = ("texts", "codes", "tokens")  # text ids, codes, and both together


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexRow:
    """A row of the manifest as the index stores it."""

    id: str
    speaker: str
    split: str
    text: np.ndarray  # ids
    clip: Clip


def index_columns(rows: Sequence[IndexRow]) -> dict[str, np.ndarray]:
    """Return `rows` as the columns of an index."""
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
    """Return the sorted distinct `values`, and the index of each of `values` among them."""
    values = list(values)
    names = sorted(set(values))
    numbers = {name: i for i, name in enumerate(names)}
    return names, narrow(np.array([numbers[value] for value in values]))


def add_counts(
    columns: dict[str, np.ndarray], shards: list[str], speakers: list[str], splits: list[str]
) -> dict[str, np.ndarray]:
    """Return `columns` (one number a row) with the names and the statistics of all rows."""
    result = dict(columns)
    result["shard_names"] = as_bytes(shards)
    result["speaker_names"] = as_bytes(speakers)
    result["split_names"] = as_bytes(splits)
    text_counts = np.diff(columns["text_offsets"].astype(np.int64))
    tokens = text_counts + columns["codes"]
    result["tokens"] = narrow(tokens)
    in_split = [columns["splits"] == number for number in range(len(splits))]
    for name, counts in zip(LENGTHS, (text_counts, columns["codes"], tokens)):
        size = int(counts.max(initial=0)) + 1
        rows = [np.bincount(counts[members], minlength=size) for members in in_split]
        result[f"{name}_histogram"] = np.array(rows, dtype=np.int64)  # (S, largest count + 1)
    # The rows of each split in order, and those of each speaker in it.
    of_both = columns["splits"].astype(np.int64) * len(speakers) + columns["speakers"]
    sizes = np.bincount(of_both, minlength=len(splits) * len(speakers))
    starts = np.concatenate([[0], sizes.cumsum()])
    result["members"] = narrow(np.argsort(columns["splits"], kind="stable"))
    result["member_starts"] = starts[:: len(speakers)].copy()  # (S + 1,)
    result["voices"] = narrow(np.lexsort((columns["speakers"], columns["splits"])))
    result["voice_starts"] = narrow(starts)  # (S P + 1,)
    result["references"] = middle_rows(columns, tokens, len(splits), len(speakers))
    result["corpus"] = as_bytes(corpus_digest(result))
    return result


def middle_rows(
    columns: dict[str, np.ndarray], tokens: np.ndarray, split_count: int, speaker_count: int
) -> np.ndarray:
    """Return each speaker's row of medium length in each split (S, P), -1 for none.

    It is the speaker's shortest row from the split's median length on, or else their shortest.
    """
    rows = np.full((split_count, speaker_count), -1, dtype=np.int64)
    for split in range(split_count):
        members = np.flatnonzero(columns["splits"] == split)
        order = members[np.argsort(tokens[members], kind="stable")]
        middle = len(order) // 2
        order = np.concatenate([order[middle:], order[:middle]])
        speakers, first = np.unique(columns["speakers"][order], return_index=True)
        rows[split, speakers] = order[first]
    return rows


def corpus_digest(columns: dict[str, np.ndarray]) -> str:
    """Return 8 hex digits that change with any id, split or length, and with their order."""
    sha = hashlib.sha256()
    for name in ("ids", "id_offsets", "splits", "split_names", "tokens"):
        sha.update(columns[name].tobytes())
    return sha.hexdigest()[:8]


class Index:
    """The rows of a corpus, `rows[i]` and `texts[i]`, with statistics; `folder` has the shards."""

    def __init__(self, columns: MemoryColumns, folder: Path):
        self.columns = columns
        self.folder = folder
        self.split_names: list[str] = from_bytes(columns.read_all("split_names"))
        self.speaker_names: list[str] = from_bytes(columns.read_all("speaker_names"))
        self.ids = Strings(columns["ids"], columns["id_offsets"])
        self.rows = Rows(self)
        self.texts = Texts(columns)
        self.tokens = columns["tokens"]
        self.codes = columns["codes"]
        self.speakers = columns["speakers"]
        self.splits = columns["splits"]
        self.voices = columns["voices"]
        self.voice_starts = columns["voice_starts"]

    def __len__(self) -> int:
        return len(self.splits)

    def __reduce__(self):  # a mapping cannot be pickled for a worker
        return Index, (self.columns, self.folder)

    @property
    def shards(self) -> list[Path]:
        return [self.folder / name for name in from_bytes(self.columns.read_all("shard_names"))]

    @property
    def corpus(self) -> str:
        """A digest of all rows: their ids, splits and lengths."""
        return from_bytes(self.columns.read_all("corpus"))

    def rows_in_split(self, split: str) -> Column:
        """Return the rows of `split` in order, without reading them."""
        first = last = 0
        if split in self.split_names:
            number = self.split_names.index(split)
            first, last = self.columns.read_all("member_starts")[number : number + 2].tolist()
        return self.columns["members"].part(first, last)

    def of_speaker(self, speaker: int, split: str) -> Column:
        """Return the rows of speaker number `speaker` in `split`, in order."""
        first = self.split_names.index(split) * len(self.speaker_names) + speaker
        return self.voices.part(self.voice_starts[first], self.voice_starts[first + 1])

    def numbers(self, rows: np.ndarray, what: str) -> np.ndarray:
        """Return for each of `rows` one of LENGTHS, or the number of its speaker."""
        if what == "texts":
            return self.tokens[rows].astype(np.int64) - self.codes[rows]
        columns = {"codes": self.codes, "tokens": self.tokens, "speakers": self.speakers}
        return columns[what][rows]

    def reference_rows(self, split: str) -> dict[str, int]:
        """Return each speaker's row of medium length in `split`."""
        if split not in self.split_names:
            return {}
        rows = self.columns.read_all("references")[self.split_names.index(split)].tolist()
        return {name: row for name, row in zip(self.speaker_names, rows) if row >= 0}

    def histogram(self, what: str, split: str | None = None) -> np.ndarray:
        """Return how many rows of `split` (None: all) have 0, 1, 2... of `what`, one of LENGTHS."""
        table = self.columns.read_all(f"{what}_histogram")
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

    def __init__(self, columns: MemoryColumns):
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["text_offsets"]) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        i = range(len(self))[i]
        start, end = self.columns["text_offsets"][i : i + 2].tolist()
        ids = self.columns["texts"][start:end].astype(np.int32)
        self.columns.release()
        return ids


def open_index(path: Path) -> Index:
    """Open the index at `path`. Raises DamagedFileError for a missing or damaged file."""
    path = Path(path)
    if "rows" in read_header(path)[0]:
        return Index(MemoryColumns(columns_of_early_version(path)), path.parent)
    return Index(ColumnFile(path), path.parent)


def columns_of_early_version(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of an index whose rows are JSON; reads all its shards."""
    table = load_tensors(path)
    shards = [path.parent / name for name in from_bytes(table["shards"])]
    clips = [list(shard_clips(shard).values()) for shard in shards]
    texts = split_by(table["texts"], table["text_counts"])
    rows = []
    for row, text, (shard, place) in zip(from_bytes(table["rows"]), texts, table["places"]):
        rows.append(IndexRow(**row, text=text, clip=clips[shard][place]))
    return index_columns(rows)
