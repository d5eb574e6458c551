"""A sequence that may be too long for memory: its values are kept in a temporary file."""

import pickle
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kit.base.files import disk_errors

BLOCK = 256  # values read at a time
IN_MEMORY_BYTES = 2**24  # a shorter sequence needs no file


class Spool(Sequence):
    """`values`, in their order, each read again whenever it is used: 8 bytes each in memory.

    So what is changed in a value is not kept; a slice is a list.
    """

    def __init__(self, values: Iterable = ()):
        self.file = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115
        self.lock = threading.Lock()  # of the file's position
        self.starts = array("Q", [0])
        for value in values:
            data = pickle.dumps(value, -1)
            try:
                self.file.write(data)
            except OSError as error:
                with disk_errors(Path(tempfile.gettempdir())):
                    raise error
            self.starts.append(self.starts[-1] + len(data))
        self.numbers: Sequence[int] = range(len(self.starts) - 1)  # of the values in the file

    def where(self, wanted: Callable[[object], bool]) -> "Spool":
        """Return the values for which `wanted` is true; they share this one's file."""
        chosen = Spool.__new__(Spool)
        vars(chosen).update(vars(self))
        chosen.numbers = array("Q", (n for n, value in zip(self.numbers, self) if wanted(value)))
        return chosen

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = self.numbers[index]
        return pickle.loads(self._read(number, number + 1))

    def __iter__(self) -> Iterator:
        for first in range(0, len(self), BLOCK):
            numbers = self.numbers[first : first + BLOCK]
            if numbers[-1] - numbers[0] > 4 * BLOCK:  # a few values far apart
                yield from (self[i] for i in range(first, first + len(numbers)))
                continue
            data = self._read(numbers[0], numbers[-1] + 1)
            before = self.starts[numbers[0]]
            for number in numbers:
                start, end = self.starts[number] - before, self.starts[number + 1] - before
                yield pickle.loads(data[start:end])

    def _read(self, first: int, end: int) -> bytes:
        with self.lock:
            self.file.seek(self.starts[first])
            return self.file.read(self.starts[end] - self.starts[first])

    def __eq__(self, other) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(a == b for a, b in zip(self, other))

    __hash__ = None

    def __reduce__(self):
        return Spool, (list(self),)  # for another process


def values_repeated(hashes: Iterable[int]) -> set[int]:
    """The hashes that occur more than once; 8 bytes of memory each, where a set would be large."""
    values, counts = np.unique(np.fromiter(hashes, np.int64), return_counts=True)
    return set(values[counts > 1].tolist())
