"""The code cache: codes, reference features and text ids of a corpus, read from disk.

Shards hold the codes and reference features of clips, an index file the text ids and places of a
manifest's rows (encoding.py writes both). They are mapped, and a row is verified when it is read,
so a corpus may be larger than memory.
"""

import contextlib
import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kit.base.errors import DamagedFileError, KitError
from kit.base.tensor_file import arrays_digest, read, read_arrays
from kit.batches.batching import EXTRA_TOKENS, padding_lengths

SAMPLE_ROWS = 2**17  # of a larger split, some figures are computed from so many
CHECKED_AT_START_BYTES = 2**28  # shards up to this total size are verified when opened
DTYPES = {"F16": "f2", "I32": "i4", "I64": "i8", "U8": "u1", "U16": "u2", "U32": "u4", "U64": "u8"}


def damaged(path: Path, how: object) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is damaged or of another kind ({how}): run notebook 01_data_prep again to fix it."
    )


@contextlib.contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Raise what a missing or damaged file raises in the block as a DamagedFileError."""
    if not Path(path).is_file():
        raise DamagedFileError(
            f"There is no {path}, a part of the codes that 01_data_prep makes. Run it, or copy "
            "the folder codes/, too, from where the run was prepared."
        )
    try:
        yield
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def load_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read and verify a file of `pack_tensors`. Raises DamagedFileError."""
    with explain_damage(path):
        return read_arrays(path)


def as_bytes(value) -> np.ndarray:
    """Return JSON as a tensor: a million rows are too many for a safetensors header."""
    return np.frombuffer(json.dumps(value, ensure_ascii=False).encode(), dtype=np.uint8)


def from_bytes(tensor: np.ndarray):
    return json.loads(tensor.tobytes())


def split_by(tensor: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    return np.split(tensor, counts.cumsum()[:-1])


class MappedFile:
    """The tensors of a safetensors file, `file[name]`, mapped: readable after it is removed.

    With `verify` all of it is compared with its checksum. Raises DamagedFileError for a file that
    is missing, damaged or of another kind.
    """

    def __init__(self, path: Path, verify: bool = False):
        self.path = Path(path)
        with explain_damage(self.path):
            metadata = read(self.path, tensors=False)[1]  # compares header and file size
            with open(self.path, "rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            begins = 8 + int.from_bytes(content[:8], "little")
            header = json.loads(content[8:begins])
            header.pop("__metadata__", None)
            self.arrays = {}
            for name, entry in header.items():
                if entry["dtype"] not in DTYPES:
                    raise KitError(f"numbers of type {entry['dtype']}")
                dtype = DTYPES[entry["dtype"]]
                start = begins + entry["data_offsets"][0]
                self.arrays[name] = np.ndarray(entry["shape"], dtype, content, start)
            if verify and metadata.get("sha256") != arrays_digest(self.arrays):
                raise KitError("its checksum does not match")

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise damaged(self.path, f"it has no column `{name}`")
        return self.arrays[name]


class Shards:
    """The shards of an index, by number.

    Raises DamagedFileError when one is missing, or damaged if they are small enough to verify at
    once. Of larger ones each row is verified when it is read.
    """

    def __init__(self, paths: list[Path], verify: bool):
        size_bytes = 0
        for path in paths:
            with explain_damage(path):
                size_bytes += path.stat().st_size
        verify = verify and size_bytes <= CHECKED_AT_START_BYTES
        self.files = [MappedFile(path, verify) for path in paths]
        counts = [file["code_counts"] for file in self.files]
        self.starts = [np.concatenate([[0], own.cumsum()]) for own in counts]  # of a row's codes

    def row(self, columns: MappedFile, what: str, i: int) -> np.ndarray:
        """Return "codes" (N,) or "references" (mels, frames) of row i of the index `columns`."""
        shard = columns["shards"][i]
        place = int(columns["places"][i])
        file = self.files[shard]
        part = place
        if what == "codes":
            part = slice(*self.starts[shard][place : place + 2])
        row = file[what][part].copy()
        check = {"codes": "code_checks", "references": "reference_checks"}[what]
        if zlib.crc32(row.tobytes()) != columns[check][i]:
            raise damaged(file.path, "a row does not match its checksum")
        return row


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
        index = Path(index)
        columns = MappedFile(index, verify)
        paths = [index.parent / name for name in from_bytes(columns["shard_names"])]
        shards = Shards(paths, verify)
        touch({index, *paths})
        codes, references = (partial(shards.row, columns, what) for what in ("codes", "references"))
        self.take(columns, codes, references)

    def __reduce__(self):  # a mapping cannot be pickled for a worker
        return CodeCache, (self.columns.path, False)

    def take(self, columns: MappedFile, codes: Callable, references: Callable) -> None:
        """Read rows and texts from an index; `codes(i)` are those of row i."""
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

    def _row(self, i: int) -> dict[str, str]:
        start, end = self.columns["id_offsets"][i : i + 2].tolist()
        return {
            "id": self.columns["ids"][start:end].tobytes().decode(),
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

    def histogram(self, what: str, split: str | None = None) -> np.ndarray:
        """Return how many rows of `split` (None: all) have 0, 1, 2... of `what`, see `lengths`."""
        return np.bincount(self.lengths(self.rows_in_split(split), what))

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
    rows = cache.histogram("texts", "train").cumsum()
    return int(np.searchsorted(rows, math.ceil(0.95 * (rows[-1] - 1)), side="right"))


def slowest_pace(cache: CodeCache) -> float:
    """Return the 99th percentile of codes per text id, of at most SAMPLE_ROWS training rows."""
    rows = cache.sample_of_split("train")
    return float(np.quantile(cache.lengths(rows, "codes") / cache.lengths(rows, "texts"), 0.99))


def fixed_lengths(cache: CodeCache) -> tuple[int, ...]:
    """Return `padding_lengths` for the rows of all splits."""
    return padding_lengths(np.pad(cache.histogram("tokens"), (EXTRA_TOKENS, 0)))


PERCENTILES = (50, 90, 95, 99, 99.5, 100)
KEPT_PERCENT = 99.5


class LengthReport(NamedTuple):
    """Percentiles by quantity, and limits that keep KEPT_PERCENT of the rows."""

    percentiles: dict[str, str]  # {"codes": "50 %: 61, 90 %: ...", "seconds": ...}
    limit_codes: int  # the KEPT_PERCENT-th percentile, rounded up to 64
    limit_tokens: int  # that many codes, and the same percentile of text, rounded up to 64
    beyond: int  # rows over a limit
    beyond_share: float  # of all rows


def length_report(cache: CodeCache, codes_per_s: float) -> LengthReport:
    """Return the lengths of training rows, and suggested limits for fixed shapes."""
    members = cache.rows_in_split("train")
    texts = cache.lengths(members, "texts")
    codes = cache.lengths(members, "codes")
    tokens = texts + codes + EXTRA_TOKENS
    percentile = partial(np.percentile, method="higher")  # a length that occurs
    limit_codes = 64 * math.ceil(percentile(codes, KEPT_PERCENT) / 64)
    longest_row = percentile(texts, KEPT_PERCENT) + limit_codes + EXTRA_TOKENS
    limit_tokens = 64 * math.ceil(longest_row / 64)
    beyond = int(((codes > limit_codes) | (tokens > limit_tokens)).sum())
    lines = {}
    columns = {"text ids": texts, "codes": codes, "tokens": tokens, "seconds": codes / codes_per_s}
    for name, column in columns.items():
        lines[name] = ", ".join(f"{p:g} %: {percentile(column, p):.4g}" for p in PERCENTILES)
    return LengthReport(lines, limit_codes, limit_tokens, beyond, beyond / len(members))
