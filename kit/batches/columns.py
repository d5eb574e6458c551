"""Columns of numbers in a safetensors file that is mapped, for tables larger than memory."""

import contextlib
import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kit.base.errors import DamagedFileError, KitError
from kit.base.files import atomic_path
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
