"""The code cache's shards: read a row at a time, shared by processes, and limited in size.

`shard_clips` reads a whole shard and returns each clip's row and checksums; `ShardRows` then reads
and verifies single rows, so only the rows of a batch are in memory.
"""

import contextlib
import dataclasses
import functools
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kit.base.errors import DamagedFileError
from kit.base.formatting import format_gib
from kit.batches.columns import (
    MappedFile,
    MemoryColumns,
    damaged,
    from_bytes,
    load_tensors,
    missing,
    split_by,
)

OPEN_SHARDS = 128  # files mapped at a time
STALE_S = 3600  # a temporary file of this age has lost its process
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
    codes = split_by(table["codes"], table["code_counts"])
    return {
        digest: Clip(
            shard=path,
            place=place,
            codes=len(codes[place]),
            code_check=crc(codes[place]),
            reference_check=crc(table["references"][place]),
        )
        for place, digest in enumerate(from_bytes(table["clips"]))
    }


def crc(array: np.ndarray) -> int:
    return zlib.crc32(array.tobytes())


class OpenShard:
    """A memory-mapped shard. Raises DamagedFileError for a missing or damaged file."""

    def __init__(self, path: Path):
        self.path = path
        self.file = MappedFile(path)
        if not {"codes", "code_counts", "references"} <= self.file.arrays.keys():
            raise DamagedFileError(damaged(path, "it holds no codes"))
        self.offsets = np.concatenate([[0], self.file.arrays["code_counts"].cumsum()]).tolist()

    def row(self, what: str, place: int, check: int) -> np.ndarray:
        """Return "codes" or "references" of a row, of which `check` is the CRC-32."""
        where = slice(*self.offsets[place : place + 2]) if what == "codes" else place
        row = self.file.arrays[what][where].copy()
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
        for path in paths:
            if not path.is_file():
                raise DamagedFileError(missing(path))
        if sum(path.stat().st_size for path in paths) <= CHECKED_AT_START_BYTES:
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


class ShardRows(Sequence):
    """The "codes" (N,) of each row, or the "references", log-mels (mels, frames) in half floats.

    `columns` are the index's: the shard of each row, its place there, and its checksums.
    """

    def __init__(self, what: str, columns: MemoryColumns, shards: Shards):
        self.what = what
        self.check = {"codes": "code_checks", "references": "reference_checks"}[what]
        self.columns = columns
        self.shards = shards

    def __len__(self) -> int:
        return len(self.columns["shards"])

    def __getitem__(self, i: int) -> np.ndarray:
        shard = self.shards[self.columns["shards"][i]]
        place = self.columns["places"][i]
        check = self.columns[self.check][i]
        self.columns.release()
        return shard.row(self.what, place, check)


def claimed(paths: list[Path], make: Callable[[Path], None]) -> Iterator[Path]:
    """Call `make(path)` for each missing file of `paths`; yield each path once the file is there.

    Each process first makes files that no other has started, then those still missing: a killed
    one blocks nothing; at worst a file is made twice, with the same content.
    """
    others = []
    for path in paths:
        if path.is_file() or _claim(path):
            yield _made(path, make)
        else:
            others.append(path)
    for path in others:
        yield _made(path, make)


def _claim(path: Path) -> bool:
    try:
        _mark(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _mark(path: Path) -> Path:
    return path.with_suffix(".claim")


def _made(path: Path, make: Callable[[Path], None]) -> Path:
    try:
        if not path.is_file():  # another process may have made it meanwhile
            make(path)
    finally:
        _mark(path).unlink(missing_ok=True)
    return path


def touch(paths: set[Path]) -> None:
    """Mark `paths` as used now."""
    for path in paths:
        with contextlib.suppress(OSError):  # gone, or a read-only folder
            os.utime(path)


def ages(folder: Path, pattern: str) -> dict[Path, tuple[float, int]]:
    """Return {file: (seconds since it was used, bytes)}."""
    files = {}
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process made room
            stat = path.stat()
            files[path] = (time.time() - stat.st_mtime, stat.st_size)
    return files


def sweep(folder: Path) -> None:
    """Remove old claims and half-written files of killed processes."""
    for pattern in ("*.claim", ".*.safetensors.*"):
        for path, (age_s, _) in ages(folder, pattern).items():
            if age_s > STALE_S:
                path.unlink(missing_ok=True)


def make_room(
    folder: Path, names: tuple[str, ...], cap_gib: float, needed_bytes: int, used: set[Path]
) -> None:
    """Remove the least recently used files, none of `used`, until `needed_bytes` more fit the cap.

    Only files that match one of the patterns `names` count. Raises DamagedFileError when the files
    in use alone exceed the cap.
    """
    files = {}
    cap_bytes = cap_gib * 2**30
    for name in names:
        files.update(ages(folder, name))
    total_bytes = needed_bytes + sum(size for _, size in files.values())
    for path in sorted(files, key=lambda p: files[p][0], reverse=True):
        if total_bytes <= cap_bytes:
            return
        if path not in used:
            with contextlib.suppress(PermissionError):  # Windows: mapped by another run
                path.unlink(missing_ok=True)
                total_bytes -= files[path][1]
    if total_bytes > cap_bytes:
        raise DamagedFileError(
            f"The code cache in {folder} needs {format_gib(total_bytes)} and more for this "
            f"corpus alone, and may take {cap_gib} GiB: raise `max_cache_gib`, or lower "
            "`reference_frames`."
        )
