"""A place in a stream as a few numbers: what it is good for, and whose share it is in.

Streams are shared out to roles (ranks x workers) and go on exactly where a saved place says, or
refuse, naming what has changed and the cure. Here stand the settings of order and sharing, shuffles
that a key decides, and what all streams have in common. Knows no files and no records.
"""

import dataclasses
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from kit.base.config import LARGEST_SEED, require, require_within
from kit.streams.file import Fault, StreamError

CURES = {
    "file": "The file has changed: put back the one it was, or start again from the beginning.",
    "format": "Read the file the way it was read then, or start again from the beginning.",
    "role": "Use as many ranks and workers as when it was saved, or start again from the "
    "beginning.",
    "rank": "Use as many ranks as when it was saved, each with its own state, or start again from "
    "the beginning.",
    "workers": "Use as many workers as when it was saved, or start again from the beginning.",
    "numpy": "NumPy shuffles otherwise than the version this was saved with: install that one, or "
    "start again from the beginning.",
}
CURE = "Use the setting it was saved with, or start again from the beginning."


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    shuffle: bool = False
    seed: int = 0
    rank: int = 0  # of this process
    ranks: int = 1  # processes that share the file
    block_bytes: int = 65536  # read in one piece: larger for spinning disks, smaller files smaller
    group_blocks: int = 16  # blocks whose records are shuffled among themselves
    longest_record_bytes: int = 2**24  # a longer one is a fault: memory stays bounded

    def __post_init__(self):
        require(self.seed >= 0, self, "seed", "choose 0 or more.")
        require(0 <= self.rank < self.ranks, self, "rank", f"must be from 0 to {self.ranks - 1}.")
        for field in ("block_bytes", "group_blocks", "longest_record_bytes"):
            require(getattr(self, field) > 0, self, field, "choose 1 or more.")
        require_within(self, 1, 2**31, "block_bytes", "longest_record_bytes")
        require_within(self, 1, 1e6, "group_blocks", "ranks")
        require_within(self, 0, LARGEST_SEED, "seed")


@dataclasses.dataclass(frozen=True)
class Split:
    """A `keep` that holds a stable `percent` of records out, or with `held_out` keeps just those.

    By a hash of the record's `key` (a column; None: of the whole record), so rows that are added
    move none of the others. `Split(2)` trains on what `Split(2, held_out=True)` validates nothing
    of.
    """

    percent: float
    held_out: bool = False
    key: str | None = None

    def __post_init__(self):
        require(0 <= self.percent <= 100, self, "percent", "choose 0 to 100.")

    def __call__(self, record) -> bool:
        if self.key is not None and self.key not in record:
            raise StreamError(
                f"{self} finds no `{self.key}` in a record of {list(record)}: name a column that "
                "all records have, or none."
            )
        value = record if self.key is None else record[self.key]
        text = value if isinstance(value, str) else repr(value)
        return is_held_out(text, self.percent) == self.held_out


def is_held_out(key: str, percent: float) -> bool:
    """A split by a stable hash of the key: adding rows never moves the ones already there."""
    return stable_hash(key) < percent * 100


def stable_hash(key: str) -> int:
    """A number from 0 to 9,999 that depends on `key` alone."""
    return zlib.crc32(key.encode()) % 10_000


def permutation(count: int, *key: int) -> np.ndarray:
    """The numbers below `count` in an order that `key` decides."""
    return np.random.Generator(np.random.PCG64(key)).permutation(count)


@cache
def order_check() -> str:
    """Changes if NumPy ever shuffles otherwise, which it reserves the right to."""
    return f"{zlib.crc32(permutation(100, 1, 2, 3).astype('<i8').tobytes()):08x}"


def shuffled(records: list, *key: int) -> list:
    """`records` in an order that `key` decides, gathered without a Python loop."""
    box = np.fromiter(records, dtype=object, count=len(records))
    return box[permutation(len(records), *key)].tolist()


def name_of(keep: Callable | None) -> str | None:
    if keep is None or isinstance(keep, Split):
        return keep and repr(keep)
    return getattr(keep, "__qualname__", type(keep).__name__)


def check_same(what: str, own: dict, saved: object) -> None:
    """Raise StreamError with the cure unless each entry of `own` is in `saved`, too."""
    if not isinstance(saved, dict):
        raise StreamError(f"{what}: this is no saved position of a stream: {saved!r}.")
    for name, value in own.items():
        if saved.get(name) != value:
            raise StreamError(
                f"{what}: the saved position has {name} = {saved.get(name)!r}, this stream has "
                f"{value!r}. {CURES.get(name, CURE)}"
            )


def worker_role(config: StreamConfig) -> tuple[int, int]:
    """(role, roles) of this process: its rank, and its worker where a DataLoader has some."""
    worker = get_worker_info()
    at, count = (worker.id, worker.num_workers) if worker else (0, 1)
    return config.rank * count + at, config.ranks * count


class Stream(IterableDataset):
    """Records in an order set by seed and epoch; one `iter()` is one epoch, or what is left of it.

    A `state_dict` taken between two records leads, through `load_state_dict`, to exactly the
    records that would have followed. A kind of stream adds `identity`, `place`, `go_to`,
    `begin_epoch`, `send_faults` and `hear`.
    """

    def __init__(self, config: StreamConfig):
        self.config = config
        self.epoch = 0
        self._role: tuple[int, int] | None = None

    def take_role(self, role: int, roles: int) -> None:
        """Read the share `role` of `roles`, whatever rank and worker this is."""
        self._role = (role, roles)

    def role(self) -> tuple[int, int]:
        return self._role or worker_role(self.config)

    def state_dict(self) -> dict:
        """The place of the latest iterator and what it is good for: plain values, under 1 KB."""
        role = "{} of {}".format(*self.role())
        return {"of": self.identity(), "role": role, "at": self.place()}

    def load_state_dict(self, state: dict) -> None:
        """Let the next `iter()` go on from `state`.

        Raises StreamError when file, format, order or number of roles is not what it was.
        """
        self.check(state.get("of"))
        check_same("This stream", {"role": "{} of {}".format(*self.role())}, state)
        self.go_to(state["at"])

    def identity(self) -> dict:
        """All that a place depends on, but the role."""
        raise NotImplementedError

    def check(self, identity: object) -> None:
        """Raise StreamError with the cure unless `identity` is this stream's."""
        check_same("This stream", self.identity(), identity)

    def place(self) -> list:
        """Where the latest iterator stands, as plain values; begins with the epoch."""
        raise NotImplementedError

    def go_to(self, place: list) -> None:
        """Let the next `iter()` begin at `place`, one of this stream in the same role."""
        raise NotImplementedError

    def begin_epoch(self, epoch: int) -> None:
        """Let the next `iter()` begin at the start of `epoch`."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """`begin_epoch`, unless it is the one that a place was loaded of."""
        if epoch != self.epoch:
            self.begin_epoch(epoch)

    def send_faults(self, to: Callable[[Fault], None]) -> None:
        """Have `to` told of faults wherever `bad` would be: a worker's way to pass them on."""
        raise NotImplementedError

    def hear(self, fault: Fault) -> bool:
        """Pass on to `bad` what a worker found; whether it was one of this stream's."""
        raise NotImplementedError
