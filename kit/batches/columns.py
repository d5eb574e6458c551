"""Columns of numbers in a memory-mapped file, for tables larger than memory.

`save_columns` stores a CRC-32 of every 64 KiB of each column, and a `Column` verifies a block when
it is first read; a small file is verified when it is opened.
"""

import contextlib
import json
import mmap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kit.base.errors import DamagedFileError, KitError
from kit.base.files import atomic_path
from kit.base.tensor_file import arrays_digest, read, read_arrays, save_tensors

BLOCK_BYTES = 2**16  # a multiple of every number's size
CHECKED_AT_OPEN_BYTES = 2**26  # a file up to this size is verified when opened
CHECKS = "block_checks"  # the column of the others' CRC-32, and of its own
CHUNK = 2**14  # numbers read at a time by iteration
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


def save_columns(columns: dict[str, np.ndarray], path: Path) -> None:
    """Write `columns` to `path` atomically, with their checksums."""
    arrays = with_checks(columns)
    with atomic_path(path) as temporary:
        save_tensors(arrays, temporary, {"sha256": arrays_digest(arrays)})


def with_checks(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return `columns` and one more: the CRC-32 of all blocks, by column name, then its own."""
    arrays = {name: np.ascontiguousarray(columns[name]) for name in sorted(columns)}
    checks = []
    for column in arrays.values():
        raw = column.reshape(-1).view(np.uint8)
        starts = range(0, len(raw), BLOCK_BYTES)
        checks += [zlib.crc32(raw[start : start + BLOCK_BYTES]) for start in starts]
    checks.append(own_check(checks))
    arrays[CHECKS] = np.array(checks, dtype=np.uint32)
    return arrays


def own_check(checks: Sequence[int]) -> int:
    return zlib.crc32(np.array(checks, dtype=np.uint32).tobytes())


class Blocks:
    """The blocks of one column, and which of them were verified."""

    def __init__(self, path: Path, raw: np.ndarray, checks: np.ndarray):
        self.path = path
        self.raw = raw
        self.checks = checks
        self.verified = np.zeros(len(checks), dtype=bool)

    def require(self, numbers: np.ndarray) -> None:
        """Verify the blocks `numbers`. Raises DamagedFileError."""
        for number in np.unique(numbers[~self.verified[numbers]]):
            start = int(number) * BLOCK_BYTES
            if zlib.crc32(self.raw[start : start + BLOCK_BYTES]) != self.checks[number]:
                how = "a part of it does not match its checksum"
                raise DamagedFileError(damaged(self.path, how))
            self.verified[number] = True


class Column(Sequence):
    """A column, or a part of one that begins at `first`: `column[index, slice or array]`.

    Reading verifies the blocks, unless `blocks` is None. Raises DamagedFileError.
    """

    def __init__(self, values: np.ndarray, blocks: Blocks | None = None, first: int = 0):
        self.values = values
        self.blocks = blocks
        self.first = first

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows):
        if isinstance(rows, (int, np.integer)):
            row = range(len(self))[rows]  # IndexError, as a list raises it
            self._require_span(row, row + 1)
            return self.values.item(row)
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            assert step == 1, "a part of a column has no gaps"
            self._require_span(start, stop)
            return self.values[rows]
        rows = np.asarray(rows, dtype=np.int64)
        self._require(rows, rows + 1)
        return self.values[rows]

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), CHUNK):
            yield from self[start : start + CHUNK].tolist()

    def part(self, first: int, last: int) -> "Column":
        """Return rows `first` to `last` (not included) without reading them."""
        return Column(self.values[first:last], self.blocks, self.first + first)

    def pieces(self, starts: np.ndarray, ends: np.ndarray) -> list[bytes]:
        """Return the bytes from each of `starts` to its end."""
        self._require(starts, ends)
        pairs = zip(starts.tolist(), ends.tolist())
        return [self.values[start:end].tobytes() for start, end in pairs]

    def _require_span(self, start: int, end: int) -> None:
        """Verify the blocks of the numbers from `start` to `end` (not included)."""
        if self.blocks is None or end <= start:
            return
        size = self.values.itemsize
        lowest = (start + self.first) * size // BLOCK_BYTES
        beyond = -(-(end + self.first) * size // BLOCK_BYTES)
        if not self.blocks.verified[lowest:beyond].all():
            self.blocks.require(np.arange(lowest, beyond))

    def _require(self, starts: np.ndarray, ends: np.ndarray) -> None:
        """Verify the blocks of many spans at once."""
        if self.blocks is None:
            return
        size = self.values.itemsize
        filled = ends > starts
        lowest = (starts[filled] + self.first) * size // BLOCK_BYTES
        highest = ((ends[filled] + self.first) * size - 1) // BLOCK_BYTES
        # Most spans are in one block or two; a long one has blocks in between.
        long = highest - lowest > 1
        between = [np.arange(a, b) for a, b in zip(lowest[long], highest[long])]
        self.blocks.require(np.concatenate([lowest, highest, *between]).astype(np.int64))


class MappedFile:
    """The tensors of a safetensors file as memory-mapped arrays, readable after it is removed.

    Raises DamagedFileError for a file that is missing, truncated or of another kind.
    """

    def __init__(self, path: Path):
        header, begins = read_header(path)
        with open(path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.arrays: dict[str, np.ndarray] = {}
        for name, about in header.items():
            start, end = about["data_offsets"]
            dtype = np.dtype(DTYPES[about["dtype"]])
            flat = np.zeros(0, dtype)
            if end > start:
                count = (end - start) // dtype.itemsize
                flat = np.frombuffer(self.map, dtype, count, begins + start)
            self.arrays[name] = flat.reshape(about["shape"])

    def release(self) -> None:
        """Give the pages read so far back to the system, which may keep them cached."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self.map.madvise(mmap.MADV_DONTNEED)


class MemoryColumns:
    """Columns in memory, each a Column by its name."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays
        self.blocks: dict[str, Blocks] = {}  # of the columns to verify

    def __getitem__(self, name: str) -> Column:
        return Column(self.arrays[name], self.blocks.get(name))

    def read_all(self, name: str) -> np.ndarray:
        """Return all of a small column, in its own shape."""
        column = self[name].values
        flat = Column(column.reshape(-1), self.blocks.get(name))
        return flat[:].reshape(column.shape).copy()

    def release(self) -> None:
        """Give the pages read so far of a large file back to the system."""


class ColumnFile(MemoryColumns):
    """The columns of a file that `save_columns` wrote. Pickled as its path.

    Raises DamagedFileError for a missing or damaged file.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.file = MappedFile(self.path)
        super().__init__(self.file.arrays)
        self.large = self.path.stat().st_size > CHECKED_AT_OPEN_BYTES
        if self.large:
            self._find_blocks()
        else:
            load_tensors(self.path)

    def _find_blocks(self) -> None:
        checks = self.arrays.get(CHECKS, np.zeros(1, dtype=np.uint32))
        counts = {}
        for name in sorted(self.arrays.keys() - {CHECKS}):
            counts[name] = -(-self.arrays[name].nbytes // BLOCK_BYTES)
        if own_check(checks[:-1]) != checks[-1] or sum(counts.values()) != len(checks) - 1:
            raise DamagedFileError(damaged(self.path, "its checksums do not match"))
        first = 0
        for name, count in counts.items():
            raw = self.arrays[name].reshape(-1).view(np.uint8)
            self.blocks[name] = Blocks(self.path, raw, checks[first : first + count])
            first += count

    def __getitem__(self, name: str) -> Column:
        if name not in self.arrays:
            raise DamagedFileError(damaged(self.path, f"it has no column `{name}`"))
        return super().__getitem__(name)

    def release(self) -> None:
        if self.large:
            self.file.release()

    def __reduce__(self):
        return ColumnFile, (self.path,)


def read_header(path: Path) -> tuple[dict, int]:
    """Return the header of a safetensors file, and where its tensors begin, or DamagedFileError."""
    with explain_damage(path):
        read(path, tensors=False)  # compares header and file size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        unknown = {about["dtype"] for about in header.values()} - DTYPES.keys()
        if unknown:
            raise KitError(f"numbers of type {', '.join(sorted(unknown))}")
    return header, 8 + length


class Strings(Sequence):
    """Strings in one column of bytes with a column of offsets: `strings[i]`."""

    def __init__(self, raw: Column, offsets: Column):
        self.raw = raw
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> str:
        return self.encoded(np.array([range(len(self))[i]]))[0].decode()

    def encoded(self, rows: np.ndarray) -> list[bytes]:
        """Return the strings of `rows` as UTF-8."""
        starts = self.offsets[rows].astype(np.int64)
        ends = self.offsets[rows + 1].astype(np.int64)
        return self.raw.pieces(starts, ends)


def strings_columns(strings: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes and offsets of `strings`, as Strings reads them."""
    encoded = [string.encode() for string in strings]
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets_of(encoded)


def offsets_of(parts: Sequence) -> np.ndarray:
    """Return where each of `parts` begins when they are concatenated, and where the last ends."""
    counts = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    return narrow(np.concatenate([[0], counts.cumsum()]))
