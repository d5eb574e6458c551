"""The code cache's files: columns of numbers, mapped and verified, shared and limited in size.

`shard_clips` reads a whole shard and returns each clip's row and checksums; `Shards.row` then reads
and verifies a row, so only the rows of a batch are in memory.
"""

import contextlib
import dataclasses
import functools
import json
import mmap
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from kit.base.errors import DamagedFileError, KitError
from kit.base.files import atomic_path
from kit.base.formatting import format_gib
from kit.base.tensor_file import arrays_digest, read, read_arrays, save_tensors

DTYPES = {"F16": "f2", "I32": "i4", "I64": "i8", "U8": "u1", "U16": "u2", "U32": "u4", "U64": "u8"}


def missing(path: Path) -> str:
    return f"There is no {path}: run notebook 01_data_prep to make it."


def damaged(path: Path, how: str) -> str:
    return (
        f"{path} is damaged or of another kind ({how}): run notebook 01_data_prep again to fix it."
    )


@contextlib.contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Raise what a missing or damaged file raises in the block as a DamagedFileError."""
    if not Path(path).is_file():
        raise DamagedFileError(missing(path))
    try:
        yield
    except (OSError, ValueError) as error:
        raise DamagedFileError(damaged(path, str(error))) from error


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


def narrow(values: np.ndarray) -> np.ndarray:
    """Return `values`, none below 0, in the smallest unsigned type that holds them."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))), copy=False)


def offsets_of(parts: Sequence) -> np.ndarray:
    """Return where each of `parts` begins when they are concatenated, and where the last ends."""
    counts = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    return narrow(np.concatenate([[0], counts.cumsum()]))


def save_columns(columns: dict[str, np.ndarray], path: Path) -> None:
    """Write `columns` to `path` atomically, with their checksum."""
    arrays = {name: np.ascontiguousarray(columns[name]) for name in sorted(columns)}
    with atomic_path(path) as temporary:
        save_tensors(arrays, temporary, {"sha256": arrays_digest(arrays)})


class MappedFile:
    """The tensors of a safetensors file, `file[name]`, mapped: readable after it is removed.

    With `verify` all of it is compared with its checksum. Pickled as its path. Raises
    DamagedFileError for a file that is missing, damaged or of another kind.
    """

    def __init__(self, path: Path, verify: bool = False):
        self.path = Path(path)
        self.verify = verify
        with explain_damage(self.path):
            metadata = read(self.path, tensors=False)[1]  # compares header and file size
            with open(self.path, "rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            begins = 8 + int.from_bytes(self.map[:8], "little")
            header = json.loads(self.map[8:begins])
            header.pop("__metadata__", None)
            self.arrays = {name: self._array(begins, **about) for name, about in header.items()}
            if verify and metadata.get("sha256") != arrays_digest(self.arrays):
                raise KitError("its checksum does not match")
        self.release()

    def _array(self, begins: int, dtype: str, shape: list, data_offsets: list) -> np.ndarray:
        if dtype not in DTYPES:
            raise KitError(f"numbers of type {dtype}")
        start, end = data_offsets
        if end == start:
            return np.zeros(shape, DTYPES[dtype])
        count = (end - start) // np.dtype(DTYPES[dtype]).itemsize
        return np.frombuffer(self.map, DTYPES[dtype], count, begins + start).reshape(shape)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise DamagedFileError(damaged(self.path, f"it has no column `{name}`"))
        return self.arrays[name]

    def __reduce__(self):
        return MappedFile, (self.path, self.verify)

    def release(self) -> None:
        """Give the pages read so far back to the system, which may keep them cached."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self.map.madvise(mmap.MADV_DONTNEED)


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

    def __init__(self, path: Path, verify: bool = False):
        self.file = MappedFile(path, verify)
        self.offsets = np.concatenate([[0], self.file["code_counts"].cumsum()]).tolist()

    def row(self, what: str, place: int, check: int) -> np.ndarray:
        """Return "codes" or "references" of a row, of which `check` is the CRC-32."""
        where = slice(*self.offsets[place : place + 2]) if what == "codes" else place
        row = self.file[what][where].copy()
        self.file.release()  # the system may map megabytes around a row
        if crc(row) != check:
            how = "a row does not match its checksum"
            raise DamagedFileError(damaged(self.file.path, how))
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
        size_bytes = sum(path.stat().st_size for path in paths)
        self._open_first(verify=size_bytes <= CHECKED_AT_START_BYTES)

    def _open_first(self, verify: bool) -> None:
        self.opened = functools.lru_cache(OPEN_SHARDS)(partial(OpenShard, verify=verify))
        if verify or len(self.paths) <= OPEN_SHARDS:
            for path in self.paths:
                self.opened(path)

    def row(self, columns: MappedFile, what: str, i: int) -> np.ndarray:
        """Return "codes" (N,) or "references" (mels, frames) of row i of the index `columns`."""
        check = {"codes": "code_checks", "references": "reference_checks"}[what]
        shard = self.opened(self.paths[columns["shards"][i]])
        return shard.row(what, int(columns["places"][i]), columns[check][i])

    def __getstate__(self) -> dict:  # a mapping cannot be pickled for a worker
        return {"paths": self.paths}

    def __setstate__(self, state: dict) -> None:
        self.paths = state["paths"]
        self._open_first(verify=False)


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
    """Remove old half-written files of killed processes."""
    for path, (age_s, _) in ages(folder, ".*.safetensors.*").items():
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
