"""Columns of numbers in one sealed file, mapped and not loaded: for tables larger than memory.

A file of gigabytes cannot be read whole at every start to see that it is. So `save_columns` notes a
CRC-32 of every 64 KiB of each column, and a `Column` checks a block when something of it is first
read: nothing is taken from a damaged one, and what nobody reads costs nothing. A small file is
checked whole when it is opened. Knows numbers and files; nothing of what they stand for.
"""

import json
import mmap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from kit.base.errors import DamagedFileError
from kit.base.files import atomic_path
from kit.base.tensor_file import arrays_digest
from kit.batches.cache_files import damaged, load_tensors, missing

BLOCK_BYTES = 2**16  # a multiple of every number's size: no number lies in two blocks
CHECKED_WHOLE_BYTES = 2**26  # a file up to this size is checked when it is opened
CHECKS = "block_checks"  # the column of the others' CRC-32, and of its own
AT_ONCE = 2**14  # numbers read together where a column is walked along
UNSIGNED = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64}
DTYPES = {"F16": np.float16, "I32": np.int32, "I64": np.int64, **UNSIGNED}


def narrow(values: np.ndarray) -> np.ndarray:
    """`values`, none below 0, in the smallest type of number that holds them."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))), copy=False)


def save_columns(columns: dict[str, np.ndarray], path: Path) -> None:
    """Write `columns` to `path`, whole or not at all, with the checks that reading them needs."""
    sealed = with_checks(columns)
    with atomic_path(path) as temporary:
        try:
            about = {"sha256": arrays_digest(sealed)}
            safetensors.numpy.save_file(sealed, temporary, metadata=about)
        except safetensors.SafetensorError as error:  # in words of its own for a full disk
            raise OSError(str(error)) from error


def with_checks(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`columns` and one more: the CRC-32 of all their blocks, by name, and last its own."""
    found = {name: np.ascontiguousarray(columns[name]) for name in sorted(columns)}
    checks = []
    for column in found.values():
        raw = column.reshape(-1).view(np.uint8)
        checks += [zlib.crc32(raw[at : at + BLOCK_BYTES]) for at in block_starts(raw)]
    checks.append(own_check(checks))
    found[CHECKS] = np.array(checks, dtype=np.uint32)
    return found


def block_starts(raw: np.ndarray) -> range:
    return range(0, len(raw), BLOCK_BYTES)


def own_check(checks: Sequence[int]) -> int:
    return zlib.crc32(np.array(checks, dtype=np.uint32).tobytes())


class Blocks:
    """The blocks of one column, and which of them were found whole."""

    def __init__(self, path: Path, raw: np.ndarray, checks: np.ndarray):
        self.path = path
        self.raw = raw
        self.checks = checks
        self.whole = np.zeros(len(checks), dtype=bool)

    def require(self, numbers: np.ndarray) -> None:
        """Raise DamagedFileError unless the blocks `numbers` hold what was written."""
        for number in np.unique(numbers[~self.whole[numbers]]):
            start = int(number) * BLOCK_BYTES
            if zlib.crc32(self.raw[start : start + BLOCK_BYTES]) != self.checks[number]:
                raise DamagedFileError(
                    damaged(self.path, "a part of it does not match its checksum")
                )
            self.whole[number] = True


class Column(Sequence):
    """One column, or a part of it: `column[rows]` reads, for a number, a slice or an array.

    What is read is checked first: raises DamagedFileError for damage. `blocks` None: checked
    already. `first` is where in its column the part begins.
    """

    def __init__(self, values: np.ndarray, blocks: Blocks | None = None, first: int = 0):
        self.values = values
        self.blocks = blocks
        self.first = first

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows):
        if isinstance(rows, (int, np.integer)):
            if self.blocks is not None:
                row = range(len(self))[rows]  # IndexError, as a list raises it
                self._require_span(row, row + 1)
            return self.values.item(rows)
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            assert step == 1, "a part of a column has no gaps"
            self._require_span(start, stop)
            return self.values[rows]
        rows = np.asarray(rows, dtype=np.int64)
        self._require(rows, rows + 1)
        return self.values[rows]

    def __iter__(self) -> Iterator[int]:
        for at in range(0, len(self), AT_ONCE):
            yield from self[at : at + AT_ONCE].tolist()

    def part(self, first: int, last: int) -> "Column":
        """Rows `first` to `last` (not included), still unread."""
        return Column(self.values[first:last], self.blocks, self.first + first)

    def pieces(self, starts: np.ndarray, ends: np.ndarray) -> list[bytes]:
        """The bytes from each of `starts` to its end."""
        self._require(starts, ends)
        pairs = zip(starts.tolist(), ends.tolist())
        return [self.values[start:end].tobytes() for start, end in pairs]

    def _require_span(self, start: int, end: int) -> None:
        """Check the blocks of the numbers from `start` to `end` (not included)."""
        if self.blocks is None or end <= start:
            return
        size = self.values.itemsize
        lowest = (start + self.first) * size // BLOCK_BYTES
        beyond = -(-(end + self.first) * size // BLOCK_BYTES)
        if not self.blocks.whole[lowest:beyond].all():
            self.blocks.require(np.arange(lowest, beyond))

    def _require(self, starts: np.ndarray, ends: np.ndarray) -> None:
        """The same for many spans at once."""
        if self.blocks is None:
            return
        size = self.values.itemsize
        some = ends > starts
        lowest = (starts[some] + self.first) * size // BLOCK_BYTES
        highest = ((ends[some] + self.first) * size - 1) // BLOCK_BYTES
        # Most spans lie in one block or two; of a long one all blocks between are read, too.
        long = highest - lowest > 1
        between = [np.arange(a, b) for a, b in zip(lowest[long], highest[long])]
        self.blocks.require(np.concatenate([lowest, highest, *between]).astype(np.int64))


class MappedFile:
    """The tensors of a safetensors file as arrays, read from it as they are touched.

    It stays readable when somebody removes the file. Raises DamagedFileError for a file that is
    missing, cut short or of another kind.
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

    def let_go(self) -> None:
        """Count what was read no longer as this process's memory; the system may keep it."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self.map.madvise(mmap.MADV_DONTNEED)


class ColumnFile:
    """The columns of a file that `save_columns` wrote, each a Column by its name.

    Raises DamagedFileError for a missing or damaged file. Travels to another process as its path.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.file = MappedFile(self.path)
        self.arrays = self.file.arrays
        self.blocks: dict[str, Blocks] = {}
        self.columns: dict[str, Column] = {}
        self.large = self.path.stat().st_size > CHECKED_WHOLE_BYTES
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

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __getitem__(self, name: str) -> Column:
        if name not in self:
            raise DamagedFileError(damaged(self.path, f"it has no column `{name}`"))
        if name not in self.columns:
            self.columns[name] = Column(self.arrays[name], self.blocks.get(name))
        return self.columns[name]

    def whole(self, name: str) -> np.ndarray:
        """All of a small column, in its own shape."""
        column = self[name]
        flat = Column(column.values.reshape(-1), column.blocks)
        return flat[:].reshape(column.values.shape).copy()

    def let_go(self) -> None:
        """Count what was read of a large file no longer as this process's memory."""
        if self.large:
            self.file.let_go()

    def __reduce__(self):
        return ColumnFile, (self.path,)


class MemoryColumns:
    """Columns in memory, read as SealedColumns are: of files that hold none, and of tests."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __getitem__(self, name: str) -> Column:
        return Column(self.arrays[name])

    def whole(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def let_go(self) -> None:
        """Nothing is mapped."""


def read_header(path: Path) -> tuple[dict, int]:
    """Where each tensor of a safetensors file lies, and where its tensors begin.

    Raises DamagedFileError for a missing file, one cut short, and one of another kind.
    """
    if not path.is_file():
        raise DamagedFileError(missing(path))
    try:
        with safetensors.safe_open(path, framework="numpy"):  # compares header and file size
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise DamagedFileError(damaged(path, str(error))) from error
    header.pop("__metadata__", None)
    unknown = {about["dtype"] for about in header.values()} - DTYPES.keys()
    if unknown:
        raise DamagedFileError(damaged(path, f"numbers of type {', '.join(sorted(unknown))}"))
    return header, 8 + length


class Strings(Sequence):
    """Texts in one column of bytes, and where each begins: `strings[i]`."""

    def __init__(self, raw: Column, offsets: Column):
        self.raw = raw
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> str:
        return self.encoded(np.array([range(len(self))[i]]))[0].decode()

    def encoded(self, rows: np.ndarray) -> list[bytes]:
        """Those of `rows` as UTF-8."""
        starts = self.offsets[rows].astype(np.int64)
        ends = self.offsets[rows + 1].astype(np.int64)
        return self.raw.pieces(starts, ends)


def strings_columns(strings: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """`strings` as the bytes and the offsets that Strings reads."""
    encoded = [string.encode() for string in strings]
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets_of(encoded)


def offsets_of(parts: Sequence) -> np.ndarray:
    """Where each of `parts` begins when they stand in a row, and where the last ends."""
    counts = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    return narrow(np.concatenate([[0], counts.cumsum()]))
