"""The code cache: codes, reference features and text ids of a corpus, read from disk.

Shards hold the codes and reference features of clips, an index file the text ids and places of a
manifest's rows; both are mapped, so a corpus may be larger than memory. What concerns all rows
(those of a split or speaker, histograms of lengths, each speaker's reference) is computed once,
when the index is made.

Shapes: N rows, S splits, P speakers.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.base.errors import DamagedFileError
from kit.batches.batching import EXTRA_TOKENS, padding_lengths
from kit.batches.code_shards import (
    Clip,
    MappedFile,
    Shards,
    as_bytes,
    from_bytes,
    narrow,
    offsets_of,
    touch,
)

LENGTHS = ("texts", "codes", "tokens")  # text ids, codes, and both together


def index_columns(
    ids: list[str],
    speakers: list[str],
    splits: list[str],
    texts: list[np.ndarray],
    clips: list[Clip],
) -> dict[str, np.ndarray]:
    """Return the columns of an index; each list has a value a row, `texts` the ids of its text."""
    shard_paths, shards = numbered(clip.shard for clip in clips)
    speaker_names, speaker_numbers = numbered(speakers)
    split_names, split_numbers = numbered(splits)
    encoded = [name.encode() for name in ids]
    checks = np.array([(clip.code_check, clip.reference_check) for clip in clips], np.uint32)
    columns = {
        "ids": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        "id_offsets": offsets_of(encoded),
        "texts": narrow(np.concatenate(texts)),
        "text_offsets": offsets_of(texts),
        "codes": narrow(np.array([clip.codes for clip in clips])),
        "shards": shards,
        "places": narrow(np.array([clip.place for clip in clips])),
        "code_checks": checks[:, 0].copy(),
        "reference_checks": checks[:, 1].copy(),
        "speakers": speaker_numbers,
        "splits": split_numbers,
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


REHEARSAL = "rehearsal"  # the split of rows without a recording, generated by a voice
SAMPLE_ROWS = 2**17  # of a larger split, some figures are computed from so many


class Items(Sequence):
    """`count` items, each made by `read(i)` when it is used, and then those of `more`."""

    def __init__(self, count: int, read: Callable[[int], object]):
        self.count = count
        self.read = read
        self.more: list = []

    def __len__(self) -> int:
        return self.count + len(self.more)

    def __getitem__(self, i: int):
        i = range(len(self))[i]
        return self.read(i) if i < self.count else self.more[i - self.count]


class CodeCache:
    """The cached corpus: `rows[i]`, `texts[i]`, `codes[i]` and `references[i]`, read from disk.

    Codes are (N,), references log-mels (mels, frames) in half floats. Raises DamagedFileError for a
    missing or damaged file; of large shards, when a row is read.
    """

    def __init__(self, index: Path):
        index = Path(index)
        columns = MappedFile(index, verify=True)
        shards = Shards([index.parent / name for name in from_bytes(columns["shard_names"])])
        touch({index, *shards.paths})
        codes, references = (partial(shards.row, columns, what) for what in ("codes", "references"))
        self.take(columns, codes, references)

    def take(self, columns: MappedFile, codes: Callable, references: Callable) -> None:
        """Read rows, texts and statistics from an index; `codes(i)` are those of row i."""
        self.columns = columns
        self.split_names: list[str] = from_bytes(columns["split_names"])
        self.speaker_names: list[str] = from_bytes(columns["speaker_names"])
        self.corpus: str = from_bytes(columns["corpus"])  # digest of ids, splits and lengths
        self.recorded = len(columns["splits"])  # rows, without those to rehearse
        self.rows = Items(
            self.recorded, partial(_row, columns, self.speaker_names, self.split_names)
        )
        self.texts = Items(self.recorded, partial(_text, columns))
        self.codes = Items(self.recorded, codes)
        self.references = Items(self.recorded, references)
        self.spoken = {name: np.zeros(0, np.int64) for name in (*LENGTHS, "speakers")}

    def add_rehearsal(
        self, speakers: list[str], texts: list[np.ndarray], codes: list[np.ndarray]
    ) -> None:
        """Add rows of the split "rehearsal" in memory, whose speakers have recordings here."""
        unknown = sorted(set(speakers) - set(self.speaker_names))
        if unknown:
            raise DamagedFileError(
                f"Rehearsal rows have the speaker {', '.join(unknown)}, of whom the code cache "
                "holds no recording: run notebook 01_data_prep again to generate them again."
            )
        text_counts = np.array([len(text) for text in texts], dtype=np.int64)
        code_counts = np.array([len(row) for row in codes], dtype=np.int64)
        numbers = [self.speaker_names.index(name) for name in speakers]
        self.spoken = {
            "texts": text_counts,
            "codes": code_counts,
            "tokens": text_counts + code_counts,
            "speakers": np.array(numbers, dtype=np.int64),
        }
        for i, speaker in enumerate(speakers):
            row = {"id": f"{REHEARSAL}-{i}", "speaker": speaker, "split": REHEARSAL}
            self.rows.more.append(row)
        self.texts.more += texts
        self.codes.more += codes

    def rows_in_split(self, split: str) -> np.ndarray | range:
        """Return the rows of `split`, in order, without reading them."""
        if split == REHEARSAL:
            return range(self.recorded, len(self.rows))
        first = last = 0
        if split in self.split_names:
            number = self.split_names.index(split)
            first, last = self.columns["member_starts"][number : number + 2].tolist()
        return self.columns["members"][first:last]

    def require_rows(self, split: str) -> None:
        """Raise DamagedFileError where `split` is empty."""
        if not len(self.rows_in_split(split)):
            raise DamagedFileError(
                f"The code cache holds no utterance of the split `{split}`: were all refused? "
                "With a higher `held_out_percent` (section manifest), prepare holds out more."
            )

    def sample_of_split(self, split: str, most: int = SAMPLE_ROWS) -> np.ndarray:
        """Return the rows of `split`, at even distances if there are more than `most`."""
        members = self.rows_in_split(split)
        count = min(len(members), most)
        return members[np.arange(count) * len(members) // max(count, 1)].astype(np.int64)

    def encoded_ids(self, rows: Sequence[int]) -> list[bytes]:
        """Return the ids of `rows` as UTF-8."""
        ids = []
        for i in np.asarray(rows).tolist():
            known = i < self.recorded
            ids.append(_id(self.columns, i) if known else self.rows[i]["id"].encode())
        return ids

    def release(self) -> None:
        """Give the index's pages read so far back to the system."""
        self.columns.release()

    def of_speaker(self, speaker: int, split: str) -> np.ndarray:
        """Return the rows of speaker number `speaker` in `split`, in order."""
        first = self.split_names.index(split) * len(self.speaker_names) + speaker
        start, end = self.columns["voice_starts"][first : first + 2].tolist()
        return self.columns["voices"][start:end]

    def speakers(self, rows: Sequence[int]) -> np.ndarray:
        """Return the speaker number of each of `rows`."""
        return self._numbers(rows, "speakers")

    def lengths(self, rows: Sequence[int], what: str = "tokens") -> np.ndarray:
        """Return the length of each of `rows` in text ids, codes or tokens (one of LENGTHS)."""
        if what == "texts":
            return self._numbers(rows, "tokens") - self._numbers(rows, "codes")
        return self._numbers(rows, what)

    def _numbers(self, rows: Sequence[int], what: str) -> np.ndarray:
        rows = np.asarray(rows, dtype=np.int64)
        spoken = rows >= self.recorded
        numbers = np.empty(len(rows), dtype=np.int64)
        numbers[~spoken] = self.columns[what][rows[~spoken]]
        numbers[spoken] = self.spoken[what][rows[spoken] - self.recorded]
        return numbers

    def length(self, i: int) -> int:
        return int(self.lengths([i])[0])

    def histogram(self, what: str, split: str | None = None) -> np.ndarray:
        """Return how many rows of `split` (None: all) have 0, 1, 2... of `what`, one of LENGTHS."""
        table = self.columns[f"{what}_histogram"]
        chosen = [split is None or name == split for name in self.split_names]
        rows = table[chosen].sum(axis=0)
        if split in (None, REHEARSAL):
            spoken = np.bincount(self.spoken[what], minlength=len(rows))
            spoken[: len(rows)] += rows
            rows = spoken
        return rows

    def total(self, what: str, split: str | None = None) -> int:
        """Return the sum of `what` over the rows of `split` (None: all)."""
        rows = self.histogram(what, split)
        return int(rows @ np.arange(len(rows)))

    def longest(self, what: str) -> int:
        """Return the largest `what` of a row."""
        return int(np.flatnonzero(self.histogram(what))[-1])


def _id(columns: MappedFile, i: int) -> bytes:
    start, end = columns["id_offsets"][i : i + 2].tolist()
    return columns["ids"][start:end].tobytes()


def _row(columns: MappedFile, speakers: list[str], splits: list[str], i: int) -> dict[str, str]:
    return {
        "id": _id(columns, i).decode(),
        "speaker": speakers[columns["speakers"][i]],
        "split": splits[columns["splits"][i]],
    }


def _text(columns: MappedFile, i: int) -> np.ndarray:
    start, end = columns["text_offsets"][i : i + 2].tolist()
    return columns["texts"][start:end].astype(np.int32)


def reference_rows(cache: CodeCache, split: str = "train") -> dict[str, int]:
    """Return each speaker's row of medium length in `split`: their reference."""
    if split not in cache.split_names:
        return {}
    rows = cache.columns["references"][cache.split_names.index(split)].tolist()
    return {name: row for name, row in zip(cache.speaker_names, rows) if row >= 0}


def speaker_references(cache: CodeCache, split: str = "train") -> dict[str, Tensor]:
    """Return one reference log-mel (mels, frames) per speaker, that of `reference_rows`."""
    rows = reference_rows(cache, split)
    return {name: torch.from_numpy(cache.references[i]).float() for name, i in rows.items()}


def longest_text(cache: CodeCache) -> int:
    """Return the 95th percentile of text ids in training: what a voice learns to say at once."""
    rows = cache.histogram("texts", "train").cumsum()
    return int(np.searchsorted(rows, math.ceil(0.95 * (rows[-1] - 1)), side="right"))


def slowest_pace(cache: CodeCache) -> float:
    """Return the 99th percentile of codes per text id, of at most SAMPLE_ROWS training rows."""
    rows = cache.sample_of_split("train")
    return float(np.quantile(cache.lengths(rows, "codes") / cache.lengths(rows, "texts"), 0.99))


def fixed_lengths(cache: CodeCache) -> tuple[int, ...]:
    """Return `padding_lengths` for the rows of all splits."""
    rows = cache.histogram("tokens")
    return padding_lengths(np.pad(rows, (EXTRA_TOKENS, 0)))
