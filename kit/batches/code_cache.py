"""The code cache: what training reads of each clip, as `encoding` made it.

A shard holds codes and reference features of some clips. An index, one file, says where each row of
a manifest lies, with its text ids. Both stay on disk and are read a row at a time, so a corpus may
be larger than memory. Every file carries its own checksums. Knows no batch and no model.

Shapes: M mels, T reference frames.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.base.errors import DamagedFileError
from kit.batches.cache_files import touch
from kit.batches.code_shards import Codes, References, Shards
from kit.batches.columns import Column
from kit.batches.index import LENGTHS, Index, open_index

REHEARSAL = "rehearsal"  # the split of rows that no recording is of: a voice has spoken them
SAMPLE_ROWS = 2**17  # of a larger split, figures that need each row's own numbers take so many


class CodeCache:
    """The cached corpus: `rows[i]`, `texts[i]`, `codes[i]` and `references[i]`, read from disk.

    Nothing is held but what was read last, so a million rows take no more memory than a thousand.
    Raises DamagedFileError for a missing or damaged file: of a large corpus, when the damage is
    read.
    """

    def __init__(self, index: Path):
        self.take(open_index(index))
        shards = self.index.shards
        opened = Shards(shards)
        self.codes = Codes(self.index.columns, opened)
        self.references = References(self.index.columns, opened)
        touch({Path(index), *shards})

    def take(self, index: Index) -> None:
        """Read rows and texts from `index`; `codes` and `references` are set beside them."""
        self.index = index
        self.rows = index.rows
        self.texts = index.texts
        self.spoken = {name: np.zeros(0, np.int64) for name in (*LENGTHS, "speakers")}

    def add_rehearsal(
        self, speakers: list[str], texts: list[np.ndarray], codes: list[np.ndarray]
    ) -> None:
        """Rows of the split "rehearsal", here in memory alone.

        They have no reference of their own: a recording of their speaker is one for them. Raises
        DamagedFileError where there is none.
        """
        unknown = sorted(set(speakers) - set(self.index.speaker_names))
        if unknown:
            raise DamagedFileError(
                f"Rows to rehearse are spoken as {', '.join(unknown)}, of whom the code cache "
                "holds no recording: run notebook 01_data_prep again to have them spoken anew."
            )
        number = {name: i for i, name in enumerate(self.index.speaker_names)}
        text_counts = np.array([len(text) for text in texts], dtype=np.int64)
        code_counts = np.array([len(row) for row in codes], dtype=np.int64)
        self.spoken = {
            "texts": text_counts,
            "codes": code_counts,
            "tokens": text_counts + code_counts,
            "speakers": np.array([number[name] for name in speakers], dtype=np.int64),
        }
        rows = []
        for i, speaker in enumerate(speakers):
            rows.append({"id": f"{REHEARSAL}-{i}", "speaker": speaker, "split": REHEARSAL})
        self.rows = Joined(self.rows, rows)
        self.texts = Joined(self.texts, texts)
        self.codes = Joined(self.codes, codes)

    def rows_in_split(self, split: str) -> Column | range:
        """The rows of `split`, in their order; unread until they are asked for."""
        if split == REHEARSAL:
            return range(len(self.index), len(self.rows))
        return self.index.rows_in_split(split)

    def sample_of_split(self, split: str, most: int = SAMPLE_ROWS) -> np.ndarray:
        """All rows of `split`, or `most` of them at even distances."""
        members = self.rows_in_split(split)
        count = min(len(members), most)
        return members[np.arange(count) * len(members) // max(count, 1)].astype(np.int64)

    def encoded_ids(self, rows: Sequence[int]) -> list[bytes]:
        """The ids of `rows` as UTF-8."""
        rows = np.asarray(rows, dtype=np.int64)
        found = self.index.ids.encoded(rows[rows < len(self.index)])
        spoken = rows[rows >= len(self.index)].tolist()
        return [*found, *(self.rows[i]["id"].encode() for i in spoken)]

    def let_go(self) -> None:
        """Count what was read of the index no longer as this process's memory."""
        self.index.columns.let_go()

    def of_speaker(self, speaker: int, split: str) -> Column:
        """The recordings of speaker number `speaker` in `split`."""
        return self.index.of_speaker(speaker, split)

    def speakers(self, rows: Sequence[int]) -> np.ndarray:
        """The number of the speaker of each of `rows`."""
        return self._numbers(rows, "speakers")

    def lengths(self, rows: Sequence[int], what: str = "tokens") -> np.ndarray:
        """How many text ids, codes, or both as tokens (one of LENGTHS) each of `rows` has."""
        return self._numbers(rows, what)

    def _numbers(self, rows: Sequence[int], what: str) -> np.ndarray:
        rows = np.asarray(rows, dtype=np.int64)
        spoken = rows >= len(self.index)
        found = np.empty(len(rows), dtype=np.int64)
        found[~spoken] = self.index.numbers(rows[~spoken], what)
        found[spoken] = self.spoken[what][rows[spoken] - len(self.index)]
        return found

    def length(self, i: int) -> int:
        return int(self.lengths([i])[0])

    def histogram(self, what: str, split: str | None = None) -> np.ndarray:
        """How many rows of `split` (None: of all) have 0, 1, 2... of `what`, one of LENGTHS."""
        found = self.index.histogram(what, split)
        if split not in (None, REHEARSAL):
            return found
        spoken = np.bincount(self.spoken[what], minlength=len(found))
        spoken[: len(found)] += found
        return spoken

    def total(self, what: str, split: str | None = None) -> int:
        """The sum of `what` over the rows of `split` (None: of all)."""
        found = self.histogram(what, split)
        return int(found @ np.arange(len(found)))

    def longest(self, what: str) -> int:
        """The most of `what` that a row has."""
        return int(np.flatnonzero(self.histogram(what))[-1])


class Joined(Sequence):
    """The items of `first`, and then those of `more`."""

    def __init__(self, first: Sequence, more: list):
        self.first = first
        self.more = more

    def __len__(self) -> int:
        return len(self.first) + len(self.more)

    def __getitem__(self, i: int):
        i = range(len(self))[i]
        if i < len(self.first):
            return self.first[i]
        return self.more[i - len(self.first)]


def reference_rows(cache: CodeCache, split: str = "train") -> dict[str, int]:
    """The row of each speaker that is to be the reference: an utterance of middling length."""
    return cache.index.reference_rows(split)


def speaker_references(cache: CodeCache, split: str = "train") -> dict[str, Tensor]:
    """One reference log-mel (M, T) per speaker, that of `reference_rows`."""
    found = {}
    for speaker, i in reference_rows(cache, split).items():
        found[speaker] = torch.from_numpy(cache.references[i]).float()
    return found


def longest_text(cache: CodeCache, split: str = "train") -> int:
    """How many text ids a voice learns to say in one go: all but the longest 5 % are shorter."""
    rows = cache.histogram("texts", split).cumsum()
    return int(np.searchsorted(rows, math.ceil(0.95 * (rows[-1] - 1)), side="right"))


def slowest_pace(cache: CodeCache, split: str = "train") -> float:
    """Codes a text id takes where a voice speaks slowly: in all but 1 % of its recordings fewer.

    Of a split of more than SAMPLE_ROWS, so many are asked.
    """
    rows = cache.sample_of_split(split)
    return float(np.quantile(cache.lengths(rows, "codes") / cache.lengths(rows, "texts"), 0.99))
