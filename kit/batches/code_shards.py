"""What lies in the code cache's shards, read a row at a time.

A shard is a sealed file with the codes and reference features of some clips. `shard_clips` reads it
whole and says of each clip where it lies and what its bytes must add up to; `Codes` and
`References` then read single rows and compare, so damage is found wherever it is read, and a corpus
of any size needs no more than the rows of a batch in memory. Knows no manifest and no batch.

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
CHECKED_AT_START_BYTES = (
    2**28
)  # shards up to this size together are read whole when they are opened


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """Where a clip lies, and what of it the index notes."""

    shard: Path
    place: int  # its row in the shard
    codes: int  # how many
    code_check: int  # CRC-32 of its codes
    reference_check: int  # CRC-32 of its reference features


def shard_clips(path: Path) -> dict[str, Clip]:
    """The clips in a shard by their digests. Raises DamagedFileError for a missing or damaged
    file.
    """
    table = load_tensors(path)
    columns = zip(
        from_bytes(table["clips"]),
        split_by(table["codes"], table["code_counts"]),
        table["references"],
    )
    found = {}
    for place, (digest, codes, reference) in enumerate(columns):
        found[digest] = Clip(
            shard=path,
            place=place,
            codes=len(codes),
            code_check=crc(codes),
            reference_check=crc(reference),
        )
    return found


def crc(array: np.ndarray) -> int:
    return zlib.crc32(array.tobytes())


class OpenShard:
    """One shard, mapped. Raises DamagedFileError for a missing or damaged file."""

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
        """The codes of row `place`. Raises DamagedFileError where their CRC-32 is not `check`."""
        return self._checked(self.codes[slice(*self.offsets[place : place + 2])], check)

    def reference_at(self, place: int, check: int) -> np.ndarray:
        """The reference of row `place`, likewise."""
        return self._checked(self.references[place : place + 1], check)[0]

    def _checked(self, found: np.ndarray, check: int) -> np.ndarray:
        found = found.copy()
        self.file.let_go()  # a system may map megabytes around what was asked for
        if crc(found) != check:
            raise DamagedFileError(damaged(self.path, "a row does not match its checksum"))
        return found


class Shards:
    """The shards of an index, by number; those used last stay open.

    Raises DamagedFileError when one is missing, and for damage where all are small enough to read
    whole. Of larger ones each row is checked when it is read.
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

    def __getstate__(self) -> dict:  # a mapping cannot travel to a spawned worker; the paths can
        return {"paths": self.paths}

    def __setstate__(self, state: dict) -> None:
        self.paths = state["paths"]
        self._open_first()


def shard_bytes(path: Path) -> int:
    """The size of a shard. Raises DamagedFileError where it is missing."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise DamagedFileError(missing(path)) from error


class ShardRows(Sequence):
    """Something of each row of an index, read from its shard and checked when it is asked for.

    `columns` are the index's: the shard of each row, its place there, and its checksums.
    """

    def __init__(self, columns: ColumnFile | MemoryColumns, shards: Shards):
        self.columns = columns
        self.shards = shards

    def __len__(self) -> int:
        return len(self.columns["shards"])

    def _of(self, i: int, check: str) -> tuple[OpenShard, int, int]:
        """The shard of row i, its place there, and what its bytes must add up to."""
        shard = self.shards[self.columns["shards"][i]]
        place = self.columns["places"][i]
        check = self.columns[check][i]
        self.columns.let_go()
        return shard, place, check


class Codes(ShardRows):
    """`codes[i]`: the codes (N,) of row i."""

    def __getitem__(self, i: int) -> np.ndarray:
        shard, place, check = self._of(i, "code_checks")
        return shard.codes_at(place, check)


class References(ShardRows):
    """`references[i]`: the reference log-mel (M, T) of row i, half floats."""

    def __getitem__(self, i: int) -> np.ndarray:
        shard, place, check = self._of(i, "reference_checks")
        return shard.reference_at(place, check)
