"""Records of a file in an order set by seed and epoch, resumed at any position.

A record belongs to the block (64 KiB) that holds its first byte, so blocks need no index. Blocks
are shuffled by (seed, epoch) and taken sixteen at a time; the records of such a group are shuffled
by (seed, epoch, group). Groups are dealt to shares (ranks x DataLoader workers) in turn, so a
position is (turn, record): no buffer has to be saved, and resuming reads one group.

No file stays open between reads, so an unmounted disk or a truncated file is noticed at the next
one. A file that grows is read up to the size it had when it was opened.
"""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import operator
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from kit.base.config import MAX, require, require_within
from kit.base.errors import DatasetError
from kit.base.files import LFS_POINTER

SAMPLE_BYTES = 65536
CHUNK_BYTES = 1 << 20
TAIL_BYTES = 4096  # first read past a block: where its last line usually ends
BOM = b"\xef\xbb\xbf"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks
# First bytes of files that people take for plain text, and what to do about them.
NOT_TEXT = {
    b"\x1f\x8b": "gzip: unpack it first (gunzip)",
    b"PK\x03\x04": "a ZIP archive or a spreadsheet: unpack it, or export it as CSV in UTF-8",
    b"PAR1": "Parquet: export it as JSON lines",
    b"version https://git-lfs": LFS_POINTER,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadRecord:
    """A record that cannot be used: its place in the file, and the reason."""

    file: str
    line: int | None  # of the record's first byte, from 1; None where counting would cost too much
    offset: int  # of the record's first byte
    reason: str

    def __str__(self):
        line = "" if self.line is None else f"line {self.line}, "
        return f"{self.file}, {line}byte {self.offset}: {self.reason}"


def require_text(path: Path, first_bytes: bytes) -> None:
    """Raise DatasetError, with the fix, for a file whose first bytes are not those of text."""
    for magic, kind in NOT_TEXT.items():
        if first_bytes.startswith(magic):
            raise DatasetError(f"{path} is not text but {kind}.")


def unix_ends(data: bytes) -> bytes:
    """Lines that end in "\\n" alone, the last one without."""
    return (data.replace(b"\r\n", b"\n") if b"\r" in data else data).removesuffix(b"\n")


class ByteFile:
    """The first `size` bytes of a UTF-8 file, its size now; `begin` is where its text begins.

    `fingerprint` is the size and a digest of the first, middle and last 64 KiB. Raises DatasetError
    for a file that cannot be read, and for one that is not UTF-8 text by its first bytes.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.size = None
        with self.opened() as read:
            starts = (0, self.size // 2, max(0, self.size - SAMPLE_BYTES))
            samples = b"".join(read(start, SAMPLE_BYTES) for start in starts)
        self.fingerprint = f"{self.size}-{hashlib.blake2b(samples, digest_size=6).hexdigest()}"
        require_text(self.path, samples)
        if samples.startswith(UTF_16):
            raise DatasetError(f"{self.path} is not UTF-8 text but UTF-16: save it as UTF-8.")
        self.begin = len(BOM) if samples.startswith(BOM) else 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[int, int], bytes]]:
        """Give `read(offset, count) -> bytes`; DatasetError for a missing or shorter file."""
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, 2)
                if self.size is None:
                    self.size = size
                if size < self.size:
                    raise DatasetError(
                        f"{self.path} became shorter while it was read: from {self.size} to {size} "
                        "bytes. Restore the complete file, or start again with this one."
                    )

                def read(offset: int, count: int) -> bytes:
                    file.seek(offset)
                    return file.read(max(0, min(count, self.size - offset)))

                yield read
        except OSError as error:
            raise DatasetError(
                f"{self.path} cannot be read: {error.strerror}. Check the path, and that its disk "
                "is mounted. A saved position stays valid: restore the file and resume."
            ) from error

    def count_newlines(self, start: int, end: int) -> int:
        count = 0
        if start < end:
            with self.opened() as read:
                for offset in range(start, end, CHUNK_BYTES):
                    count += read(offset, min(CHUNK_BYTES, end - offset)).count(b"\n")
        return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    shuffle: bool = False
    seed: int = 0
    rank: int = 0  # of this process
    ranks: int = 1  # processes that share the file
    block_bytes: int = 65536  # read at once: more for spinning disks, less for small files
    group_blocks: int = 16  # blocks whose records are shuffled together
    longest_record_bytes: int = 2**24  # a longer record is a bad one, so memory stays bounded

    def __post_init__(self):
        require(self.seed >= 0, self, "seed", "choose 0 or more.")
        require(0 <= self.rank < self.ranks, self, "rank", f"must be from 0 to {self.ranks - 1}.")
        require_within(self, 1, MAX, "ranks", "block_bytes", "group_blocks", "longest_record_bytes")


@dataclasses.dataclass(frozen=True)
class Split:
    """A `keep` that leaves out a stable `percent` of records, or with `held_out` keeps only those.

    Decided by a hash of the record's column `key` (None: the record), so adding rows moves no
    others. `Split(2, held_out=True)` is the validation set of `Split(2)`.
    """

    percent: float
    held_out: bool = False
    key: str | None = None

    def __post_init__(self):
        require(0 <= self.percent <= 100, self, "percent", "choose 0 to 100.")

    def __call__(self, record) -> bool:
        value = record if self.key is None else record[self.key]
        text = value if isinstance(value, str) else repr(value)
        return is_held_out(text, self.percent) == self.held_out


def is_held_out(key: str, percent: float) -> bool:
    """Whether a stable hash of `key` is in the held-out `percent`, whatever other keys exist."""
    return stable_hash(key) < percent * 100


def stable_hash(key: str) -> int:
    """A number from 0 to 9,999 that depends on `key` alone."""
    return zlib.crc32(key.encode()) % 10_000


def permutation(count: int, *key: int) -> np.ndarray:
    """The numbers below `count` in an order decided by `key`."""
    return np.random.Generator(np.random.PCG64(key)).permutation(count)


def shuffled(records: list, *key: int) -> list:
    """`records` in an order decided by `key`, gathered without a Python loop."""
    array = np.fromiter(records, dtype=object, count=len(records))
    return array[permutation(len(records), *key)].tolist()


@cache
def numpy_order() -> str:
    """A digest that changes if NumPy ever shuffles differently, which it reserves the right to."""
    return f"{zlib.crc32(permutation(100, 1, 2, 3).astype('<i8').tobytes()):08x}"


def require_same(what: str, own: dict, saved: object) -> None:
    """Raise DatasetError unless a saved position has each entry of `own`."""
    if not isinstance(saved, dict):
        raise DatasetError(f"{what}: this is not the saved position of a stream: {saved!r}.")
    for name, value in own.items():
        if saved.get(name) != value:
            raise DatasetError(
                f"{what}: the saved position has {name} = {saved.get(name)!r}, this stream has "
                f"{value!r}. Use the file, settings, ranks, workers and NumPy that it was saved "
                "with, or start again from the beginning."
            )


class Stream(IterableDataset):
    """An iterable whose one `iter()` is one epoch, or what is left of it.

    `load_state_dict` of a `state_dict` leads to exactly the records that would have followed. A
    subclass has `identity()`, all that a position depends on but the role, which
    `require_identity(identity)` compares; `position()` of the latest iterator, plain values of
    which the first is the epoch; and `seek(position)` and `begin_epoch(epoch)` for the next one.
    """

    def __init__(self, config: StreamConfig):
        self.config = config
        self.epoch = 0

    def role(self) -> tuple[int, int]:
        """(share, shares) of this process: its rank, and its worker in a DataLoader with some."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return self.config.rank * workers + worker, self.config.ranks * workers

    def _role_entry(self) -> dict:
        return {"role": "{} of {}".format(*self.role())}

    def state_dict(self) -> dict:
        """The position of the latest iterator and what it is valid for, in less than 1 KB."""
        return {"of": self.identity()} | self._role_entry() | {"at": self.position()}

    def load_state_dict(self, state: dict) -> None:
        """Let the next `iter()` resume from `state`. DatasetError for one of another stream."""
        self.require_identity(state.get("of"))
        require_same("This stream", self._role_entry(), state)
        self.seek(state["at"])

    def set_epoch(self, epoch: int) -> None:
        """Let the next `iter()` begin `epoch`; in the current epoch, change nothing."""
        if epoch != self.epoch:
            self.begin_epoch(epoch)


class LineStream(Stream):
    """Records of one file: its lines, without their ends.

    A format is a subclass with `parse(raw)`, which returns the record of a line or raises
    ValueError with what is wrong, and maybe a quicker `parse_all(data)` for many lines. `keep`
    chooses records. `on_bad_record` is called at least once for each that cannot be used; by
    default it raises DatasetError.
    """

    format = ""  # the format and its settings: a position is valid for no other
    blank: bytes | None = None  # a line of such bytes alone is no record; None: it is one

    def __init__(
        self,
        path: Path,
        config: StreamConfig | None = None,
        *,
        keep: Callable[[object], bool] | None = None,
        on_bad_record: Callable[[BadRecord], None] | None = None,
    ):
        super().__init__(config or StreamConfig())
        self.file = ByteFile(path)
        self.keep = keep
        self.on_bad_record = on_bad_record
        self.begin = self.file.begin  # of the part of the file that holds records
        self.end = self.file.size
        self.seek([0, 0, 0])

    def parse(self, raw: bytes) -> object:
        raise NotImplementedError

    def parse_all(self, data: bytes) -> list:
        """Return the records of lines. Raises ValueError if one is bad."""
        return [self.parse(raw) for _, _, raw in self.lines(data)]

    def lines(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield (number from 0, offset in `data`, bytes without the end) of each line."""
        offset = 0
        for number, line in enumerate(io.BytesIO(data)):
            if self.blank is None or line.strip(self.blank):
                yield number, offset, unix_ends(line)
            offset += len(line)

    @property
    def blocks(self) -> int:
        return -(-(self.end - self.begin) // self.config.block_bytes)

    @property
    def groups(self) -> int:
        return -(-self.blocks // self.config.group_blocks)

    def identity(self) -> dict:
        config = self.config
        return {
            "format": self.format,
            "file": self.file.fingerprint,
            "shuffle": config.shuffle,
            "seed": config.seed,
            "block": f"{config.block_bytes}x{config.group_blocks}",
            # Of a Split all of it, of another function its name.
            "keep": self.keep and getattr(self.keep, "__qualname__", repr(self.keep)),
            "numpy": numpy_order(),
        }

    def require_identity(self, identity: object) -> None:
        require_same(str(self.file.path), self.identity(), identity)

    def position(self) -> list[int]:
        """[epoch, turn, record]: the next record, within the turn of this share."""
        return [self.epoch, self._turn, self._count - operator.length_hint(self._remaining)]

    def seek(self, position: list[int]) -> None:
        self.epoch, turn, record = position
        self._start = (turn, record)
        self._start_role = self.role()
        self._set_turn(turn, record, iter(()))

    def begin_epoch(self, epoch: int) -> None:
        self.seek([epoch, 0, 0])

    def _set_turn(self, turn: int, count: int, remaining: Iterator) -> None:
        self._turn = turn
        self._count = count  # records of the turn's group
        self._remaining = remaining  # those not yet read

    def __iter__(self) -> Iterator:
        turn, record = self._start
        if (turn or record) and self._start_role != self.role():
            raise DatasetError(
                f"{self.file.path}: the position was loaded in another process, so DataLoader "
                "workers would repeat and lose records. Resume with num_workers=0, or call "
                "load_state_dict in each worker."
            )
        self._start = (0, 0)
        self._set_turn(turn, record, iter(()))
        # `chain` iterates in C; the position is read from the list's own iterator.
        return itertools.chain.from_iterable(self._turns(turn, record))

    def _turns(self, turn: int, record: int) -> Iterator[Iterator]:
        role, roles = self.role()
        order = np.arange(self.blocks)
        if self.config.shuffle:
            order = permutation(self.blocks, self.config.seed, self.epoch, 0)
        for group in range(role + turn * roles, self.groups, roles):
            records = []
            for offset, data in self._spans(order, group):
                # A group that is resumed has reported its bad records before.
                records += self._records(offset, data, report=record == 0)
            if self.keep:
                records = list(filter(self.keep, records))
            if self.config.shuffle:
                records = shuffled(records, self.config.seed, self.epoch, group + 1)
            remaining = iter(records[record:])
            self._set_turn(turn, len(records), remaining)
            yield remaining
            turn += 1
            record = 0
        self._set_turn(turn, 0, iter(()))

    def _spans(self, order: np.ndarray, group: int) -> list[tuple[int, bytes]]:
        size = self.config.group_blocks
        blocks = order[group * size : (group + 1) * size].tolist()
        with self.file.opened() as read:
            spans = [self.span(read, block) for block in blocks]
        return [span for span in spans if span[1]]

    def span(self, read: Callable, block: int) -> tuple[int, bytes]:
        """Return (offset, bytes) of all lines whose first byte is in `block`."""
        start = self.begin + block * self.config.block_bytes
        end = min(start + self.config.block_bytes, self.end)
        offset = start - 1 if block else start  # a newline there begins a line in this block
        data = read(offset, end - offset + TAIL_BYTES)
        last = end - offset - 1
        first = 0
        if block:
            first = data.find(b"\n", 0, last) + 1
            if not first:
                return start, b""
        return offset + first, self.to_line_end(read, offset, data, last)[first:]

    def to_line_end(self, read: Callable, offset: int, data: bytes, index: int) -> bytes:
        """Return `data` to the end of the line that holds its byte `index`; reads on if needed."""
        max_bytes = index + self.config.longest_record_bytes + 2
        while (newline := data.find(b"\n", index)) < 0:
            if len(data) >= max_bytes or offset + len(data) >= self.end:
                return data
            count = max(len(data), TAIL_BYTES)
            data += read(offset + len(data), min(count, max_bytes - len(data)))
        return data[: newline + 1]

    def _parsed(self, data: bytes) -> list | None:
        """Return the records of `data`; None if one is bad, and each is parsed alone."""
        if len(data) <= self.config.longest_record_bytes:
            with contextlib.suppress(ValueError):
                return self.parse_all(data)
        return None

    def _records(self, offset: int, data: bytes, report: bool) -> list:
        records = self._parsed(data)
        if records is not None:
            return records
        records = []
        for _, start, raw in self.lines(data):
            record = self._parse(offset + start, raw)
            if not isinstance(record, BadRecord):
                records.append(record)
            elif not self.on_bad_record:
                line = 1 + self.file.count_newlines(0, record.offset)
                raise DatasetError(
                    f"{dataclasses.replace(record, line=line)}. Fix it, or pass an "
                    "`on_bad_record=` function to continue without such records."
                )
            elif report:
                self.on_bad_record(record)
        return records

    def _parse(self, offset: int, raw: bytes, line: int | None = None):
        """Return the record, or a BadRecord."""
        longest = self.config.longest_record_bytes
        try:
            if len(raw) > longest:
                raise ValueError(f"longer than longest_record_bytes ({longest})")
            return self.parse(raw)
        except ValueError as error:
            return BadRecord(file=str(self.file.path), line=line, offset=offset, reason=str(error))

    def rows(self) -> Iterator[tuple[int, object]]:
        """(line number, record or BadRecord) in file order; ignores `keep` and the role."""
        line = 1
        counted = 0
        order = np.arange(self.blocks)
        for group in range(self.groups):
            for offset, data in self._spans(order, group):
                line += self.file.count_newlines(counted, offset)
                records = self._parsed(data)
                if records is not None and len(records) == sum(1 for _ in io.BytesIO(data)):
                    yield from enumerate(records, line)
                else:
                    for number, start, raw in self.lines(data):
                        yield line + number, self._parse(offset + start, raw, line + number)
                line += data.count(b"\n")
                counted = offset + len(data)
