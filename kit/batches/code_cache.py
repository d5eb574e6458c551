"""The code cache: codes, reference features and text ids of a corpus, read from disk.

Shards hold the codes and reference features of clips, an index file the text ids and places of a
manifest's rows (encoding.py writes both). They are mapped, and a row is verified when it is read,
so a corpus may be larger than memory.
"""

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.base.errors import DamagedFileError
from kit.base.tensor_file import arrays_digest, read_any
from kit.batches.batching import EXTRA_TOKENS, padding_lengths

SAMPLE_ROWS = 2**17  # of a larger split, some figures are computed from so many
CHECKED_AT_START_BYTES = 2**28  # shards up to this total size are verified when opened
PERCENTILES = (50, 90, 95, 99, 99.5, 100)
KEPT_PERCENT = 99.5
INDEX = ("ids", "id_offsets", "texts", "text_offsets", "codes", "tokens", "shards", "places")
INDEX += ("code_checks", "reference_checks", "speakers", "splits", "corpus")
INDEX += ("shard_names", "speaker_names", "split_names")
SHARD = ("codes", "code_counts", "references", "clips")


def open_arrays(path: Path, names: Iterable[str], verify: bool = True) -> dict[str, np.ndarray]:
    """The arrays `names` of a safetensors file, mapped: readable after it is removed.

    With `verify` the file is compared with its checksum. Raises DamagedFileError for one that is
    missing, damaged or of another kind.
    """
    if not Path(path).is_file():
        raise DamagedFileError(
            f"There is no {path}, a part of the codes that 01_data_prep makes. Run it, or copy "
            "the folder codes/, too, from where the run was prepared."
        )
    try:
        tensors, metadata = read_any(path)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    except (OSError, ValueError, TypeError) as error:  # TypeError: of a type that NumPy lacks
        raise damaged(path, error) from error
    missing = [name for name in names if name not in arrays]
    if missing:
        raise damaged(path, f"it has no column `{missing[0]}`")
    if verify and metadata.get("sha256") != arrays_digest(arrays):
        raise damaged(path, "its checksum does not match")
    return arrays


def damaged(path: Path, how: object) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is damaged or of another kind ({how}): run notebook 01_data_prep again to fix it."
    )


def as_bytes(value) -> np.ndarray:
    """Return JSON as a tensor: a million rows are too many for a safetensors header."""
    return np.frombuffer(json.dumps(value, ensure_ascii=False).encode(), dtype=np.uint8)


def from_bytes(tensor: np.ndarray):
    return json.loads(tensor.tobytes())


def touch(paths: set[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # gone, or a read-only folder
            os.utime(path)


class Items(Sequence):
    """`count` items, each made by `read(i)` when it is used."""

    def __init__(self, count: int, read: Callable[[int], object]):
        self.count = count
        self.read = read

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int):
        return self.read(range(self.count)[i])


class CodeCache:
    """The cached corpus: `rows[i]`, `texts[i]`, `codes[i]` and `references[i]`, read from disk.

    Codes are (N,), references log-mels (mels, frames) in half floats. Raises DamagedFileError for a
    missing or damaged file; of large shards, when a row is read. Pickled as the path of its index.
    """

    def __init__(self, index: Path, verify: bool = True):
        self.index = Path(index)
        columns = open_arrays(index, INDEX, verify)
        self.paths = [self.index.parent / name for name in from_bytes(columns["shard_names"])]
        size_bytes = sum(path.stat().st_size for path in self.paths if path.is_file())
        verify = verify and size_bytes <= CHECKED_AT_START_BYTES
        self.shards = [open_arrays(path, SHARD, verify) for path in self.paths]
        counts = [shard["code_counts"] for shard in self.shards]
        self.starts = [np.concatenate([[0], own.cumsum()]) for own in counts]  # of a clip's codes
        touch({self.index, *self.paths})
        self.take(columns, self._codes, partial(self._stored, "references", "reference_checks"))

    def __reduce__(self):  # a mapping cannot be pickled for a worker
        return CodeCache, (self.index, False)

    def take(self, columns: dict, codes: Callable, references: Callable) -> None:
        """Read rows and texts from the `columns` of an index; `codes(i)` are those of row i."""
        self.columns = columns
        self.split_names: list[str] = from_bytes(columns["split_names"])
        self.speaker_names: list[str] = from_bytes(columns["speaker_names"])
        self.corpus: str = from_bytes(columns["corpus"])  # digest of ids, splits and lengths
        count = len(columns["splits"])
        self.rows = Items(count, self._row)
        self.texts = Items(count, self._text)
        self.codes = Items(count, codes)
        self.references = Items(count, references)
        # The rows of each split, and those of each speaker in it, all in order.
        splits = columns["splits"].astype(np.int64)
        numbers = enumerate(self.split_names)
        self.members = {name: np.flatnonzero(splits == number) for number, name in numbers}
        voice = splits * len(self.speaker_names) + columns["speakers"]
        order = np.argsort(voice, kind="stable")
        voices, starts = np.unique(voice[order], return_index=True)
        self.voices = dict(zip(voices.tolist(), np.split(order, starts[1:])))

    def _codes(self, i: int) -> np.ndarray:
        starts = self.starts[self.columns["shards"][i]]
        place = int(self.columns["places"][i])
        return self._stored("codes", "code_checks", i, slice(starts[place], starts[place + 1]))

    def _stored(self, name: str, check: str, i: int, part: slice | None = None) -> np.ndarray:
        """Return what the shard of row i holds of it, compared with its checksum."""
        shard = self.columns["shards"][i]
        row = self.shards[shard][name][self.columns["places"][i] if part is None else part].copy()
        if zlib.crc32(row.tobytes()) != self.columns[check][i]:
            raise damaged(self.paths[shard], "a row does not match its checksum")
        return row

    def example(self, i: int) -> tuple[list[np.ndarray], list[np.ndarray], Tensor]:
        """Return row i alone as `pack` takes it: text ids, codes, its own reference (1, M, T)."""
        reference = torch.from_numpy(self.references[i]).float()
        return [self.texts[i]], [self.codes[i]], reference[None]

    def ids(self, rows: np.ndarray) -> list[bytes]:
        """Return the id of each of `rows` in UTF-8."""
        ids = self.columns["ids"]
        starts = self.columns["id_offsets"][rows].tolist()
        ends = self.columns["id_offsets"][rows + 1].tolist()
        return [ids[start:end].tobytes() for start, end in zip(starts, ends)]

    def _row(self, i: int) -> dict[str, str]:
        return {
            "id": self.ids(np.array([i]))[0].decode(),
            "speaker": self.speaker_names[self.columns["speakers"][i]],
            "split": self.split_names[self.columns["splits"][i]],
        }

    def _text(self, i: int) -> np.ndarray:
        start, end = self.columns["text_offsets"][i : i + 2].tolist()
        return self.columns["texts"][start:end].astype(np.int32)

    def rows_in_split(self, split: str | None) -> np.ndarray:
        """Return the rows of `split` (None: all), in order, without reading them."""
        if split is None:
            return np.arange(len(self.rows))
        return self.members.get(split, np.arange(0))

    def sample_of_split(self, split: str, most: int = SAMPLE_ROWS) -> np.ndarray:
        """Return the rows of `split`, at even distances if there are more than `most`."""
        members = self.rows_in_split(split)
        count = min(len(members), most)
        return members[np.arange(count) * len(members) // max(count, 1)]

    def of_speaker(self, speaker: int, split: str) -> np.ndarray:
        """Return the rows of speaker number `speaker` in `split`, in order."""
        voice = self.split_names.index(split) * len(self.speaker_names) + speaker
        return self.voices.get(voice, np.arange(0))

    def speakers(self, rows: Sequence[int]) -> np.ndarray:
        """Return the speaker number of each of `rows`."""
        return self._numbers(rows, "speakers")

    def lengths(self, rows: Sequence[int], what: str = "tokens") -> np.ndarray:
        """Return the length of each of `rows` in "texts" (text ids), "codes" or both, "tokens"."""
        if what == "texts":
            return self._numbers(rows, "tokens") - self._numbers(rows, "codes")
        return self._numbers(rows, what)

    def _numbers(self, rows: Sequence[int], what: str) -> np.ndarray:
        return self.columns[what][np.asarray(rows, dtype=np.int64)].astype(np.int64)

    def total(self, what: str, split: str | None = None) -> int:
        """Return the sum of `what` over the rows of `split` (None: all)."""
        return int(self.lengths(self.rows_in_split(split), what).sum())

    def longest(self, what: str) -> int:
        """Return the largest `what` of a row."""
        return int(self.lengths(self.rows_in_split(None), what).max())


def reference_rows(cache: CodeCache, split: str = "train") -> dict[str, int]:
    """Return each speaker's row of medium length in `split`: their reference.

    It is the speaker's shortest row from the split's median length on, or else their shortest.
    """
    members = cache.rows_in_split(split)
    order = members[np.argsort(cache.lengths(members), kind="stable")]
    order = np.roll(order, -(len(order) // 2))
    speakers, first = np.unique(cache.speakers(order), return_index=True)
    rows = order[first].tolist()
    return {cache.speaker_names[speaker]: row for speaker, row in zip(speakers, rows)}


def speaker_references(cache: CodeCache, split: str = "train") -> dict[str, Tensor]:
    """Return one reference log-mel (mels, frames) per speaker, that of `reference_rows`."""
    rows = reference_rows(cache, split)
    return {name: torch.from_numpy(cache.references[i]).float() for name, i in rows.items()}


def longest_text(cache: CodeCache) -> int:
    """Return the 95th percentile of text ids in training: what a voice learns to say at once."""
    texts = cache.lengths(cache.rows_in_split("train"), "texts")
    return int(np.quantile(texts, 0.95, method="higher"))


def slowest_pace(cache: CodeCache) -> float:
    """Return the 99th percentile of codes per text id, of at most SAMPLE_ROWS training rows."""
    rows = cache.sample_of_split("train")
    return float(np.quantile(cache.lengths(rows, "codes") / cache.lengths(rows, "texts"), 0.99))


def fixed_lengths(cache: CodeCache) -> tuple[int, ...]:
    """Return `padding_lengths` for the rows of all splits."""
    return padding_lengths(np.bincount(cache.lengths(cache.rows_in_split(None)) + EXTRA_TOKENS))


def length_report(cache: CodeCache, codes_per_s: float) -> tuple[dict[str, str], int, int]:
    """Return percentiles of training rows by quantity, and limits for one fixed shape.

    The limits are in codes and in tokens, multiples of 64: KEPT_PERCENT of the rows have fewer
    codes, and as many fewer text ids.
    """
    members = cache.rows_in_split("train")
    texts = cache.lengths(members, "texts")
    codes = cache.lengths(members, "codes")
    percentile = partial(np.percentile, method="higher")  # a length that occurs
    limit_codes = 64 * math.ceil(percentile(codes, KEPT_PERCENT) / 64)
    longest_row = percentile(texts, KEPT_PERCENT) + limit_codes + EXTRA_TOKENS
    limit_tokens = 64 * math.ceil(longest_row / 64)
    columns = {"text ids": texts, "codes": codes, "tokens": texts + codes + EXTRA_TOKENS}
    columns["seconds"] = codes / codes_per_s
    lines = {
        name: ", ".join(f"{p:g} %: {percentile(column, p):.4g}" for p in PERCENTILES)
        for name, column in columns.items()
    }
    return lines, limit_codes, limit_tokens
