"""Read codes and reference features from the code cache's shards, a row at a time.

`shard_clips` reads a whole shard and returns each clip's row and checksums; `Codes` and
`References` then read and verify single rows, so only the rows of a batch are in memory.

Shapes: M mels, T reference frames.
"""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kit.base.errors import DamagedFileError
from kit.batches.cache_files import damaged, from_bytes, load_tensors, missing, split_by
from kit.batches.columns import ColumnFile, MappedFile, MemoryColumns

OPEN_SHARDS = 128  # files mapped at a time
CHECKED_AT_START_BYTES = 2**28  # shards up to this total size are verified when opened


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """The place of a clip, and what the index stores of it."""

    shard: Path
    place: int  # its row in the shard
    codes: int  # how many
    code_check: int  # CRC-32 of its codes
    reference_check: int  # CRC-32 of its reference features


def shard_clips(path: Path) -> dict[str, Clip]:
    """Return a shard's clips by digest. Raises DamagedFileError for a missing or damaged file."""
    table = load_tensors(path)
    columns = zip(
        from_bytes(table["clips"]),
        split_by(table["codes"], table["code_counts"]),
        table["references"],
    )
    clips = {}
    for place, (digest, codes, reference) in enumerate(columns):
        clips[digest] = Clip(
            shard=path,
            place=place,
            codes=len(codes),
            code_check=crc(codes),
            reference_check=crc(reference),
        )
    return clips


def crc(array: np.ndarray) -> int:
    return zlib.crc32(array.tobytes())


class OpenShard:
    """A memory-mapped shard. Raises DamagedFileError for a missing or damaged file."""

    def __init__(self, path: Path):
        self.path = path
        self.file = MappedFile(path)
        tensors = self.file.arrays
        if not {"codes", "code_counts", "references"} <= tensors.keys():
            raise DamagedFileError(damaged(path, "it holds no codes"))
        self.codes = tensors["codes"]
        self.references = tensors["references"]
        self.offsets = np.concatenate([[0], tensors["code_counts"].cumsum()]).tolist()

    def codes_at(self, place: int, check: int) -> np.ndarray:
        """Return row `place`. Raises DamagedFileError unless `check` is the CRC-32 of its codes."""
        return self._checked(self.codes[slice(*self.offsets[place : place + 2])], check)

    def reference_at(self, place: int, check: int) -> np.ndarray:
        """Return the reference of row `place`, verified likewise."""
        return self._checked(self.references[place : place + 1], check)[0]

    def _checked(self, row: np.ndarray, check: int) -> np.ndarray:
        row = row.copy()
        self.file.release()  # the system may map megabytes around a row
        if crc(row) != check:
            raise DamagedFileError(damaged(self.path, "a row does not match its checksum"))
        return row


class Shards:
    """The shards of an index, by number; the most recently used stay open.

    Raises DamagedFileError when one is missing, or damaged if they are small enough to verify at
    once. Of larger ones each row is verified when it is read.
    """

    def __init__(self, paths: list[Path]):
        self.paths = paths
        total_bytes = sum(shard_bytes(path) for path in paths)
        if total_bytes <= CHECKED_AT_START_BYTES:
            for path in paths:
                load_tensors(path)
        self._open_first()

    def _open_first(self) -> None:
        self.opened = functools.lru_cache(OPEN_SHARDS)(OpenShard)
        if len(self.paths) <= OPEN_SHARDS:
            for path in self.paths:
                self.opened(path)

    def __getitem__(self, number: int) -> OpenShard:
        return self.opened(self.paths[number])

    def __getstate__(self) -> dict:  # a mapping cannot be pickled for a worker
        return {"paths": self.paths}

    def __setstate__(self, state: dict) -> None:
        self.paths = state["paths"]
        self._open_first()


def shard_bytes(path: Path) -> int:
    """Return the size of a shard. Raises DamagedFileError where it is missing."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise DamagedFileError(missing(path)) from error


class ShardRows(Sequence):
    """Base of `Codes` and `References`.

    `columns` are the index's: the shard of each row, its place there, and its checksums.
    """

    def __init__(self, columns: ColumnFile | MemoryColumns, shards: Shards):
        self.columns = columns
        self.shards = shards

    def __len__(self) -> int:
        return len(self.columns["shards"])

    def _locate(self, i: int, check: str) -> tuple[OpenShard, int, int]:
        """Return the shard of row i, its place there, and its checksum."""
        shard = self.shards[self.columns["shards"][i]]
        place = self.columns["places"][i]
        check = self.columns[check][i]
        self.columns.release()
        return shard, place, check


class Codes(ShardRows):
    """`codes[i]`: the codes (N,) of row i."""

    def __getitem__(self, i: int) -> np.ndarray:
        shard, place, check = self._locate(i, "code_checks")
        return shard.codes_at(place, check)


class References(ShardRows):
    """`references[i]`: the reference log-mel (M, T) of row i, half floats."""

    def __getitem__(self, i: int) -> np.ndarray:
        shard, place, check = self._locate(i, "reference_checks")
        return shard.reference_at(place, check)
