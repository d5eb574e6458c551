"""The order of a file's records, and reading them from any place in it.

A record belongs to the block (64 KiB) that holds its first byte, so blocks need no index. Blocks
are shuffled by (seed, epoch) and taken sixteen at a time; the records of such a group are shuffled
by (seed, epoch, group). Groups are dealt to roles (ranks x workers) in turn. A place is therefore
(turn, record): nothing is buffered that would have to be saved, and going on reads one group,
wherever in the file it lies. Unshuffled, the same machinery keeps the order of the file.

A format says where records begin and what they hold; this room knows neither that nor batches.
"""

import dataclasses
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import get_worker_info

from kit.base.notes import Note
from kit.streams.file import ByteFile, Fault, StreamError
from kit.streams.position import (
    Stream,
    StreamConfig,
    check_same,
    name_of,
    order_check,
    permutation,
    shuffled,
)


def warn_of(fault: Fault) -> None:
    """Stands for a `bad` that stayed behind in another process."""
    warnings.warn(str(fault), category=Note, stacklevel=2)


class Source(Stream):
    """Records of one file, in the order and from the place described above.

    `keep(record)` chooses records; `bad(fault)` is told of those that cannot be used, at least
    once, and the stream goes on without them; without it they raise StreamError. `set_epoch`
    chooses the order; one `iter()` is one epoch. A `state_dict` taken between two records leads,
    through `load_state_dict`, to exactly the records that would have followed.
    """

    format = ""  # name of the format and its settings: a place is good for no other

    def __init__(
        self,
        path: Path,
        config: StreamConfig | None = None,
        *,
        keep: Callable[[object], bool] | None = None,
        bad: Callable[[Fault], None] | None = None,
    ):
        super().__init__(config or StreamConfig())
        self.file = ByteFile(path)
        self.keep = keep
        self.bad = bad
        self.begin = self.file.text_start()
        self.end = self.file.size  # where records are
        self._start = (0, 0)  # turn and record of the next pass
        self._stand(0, 0)

    # --- what a format says -----------------------------------------------------------------

    def span(self, read: Callable[[int, int], bytes], block: int) -> tuple[int, bytes]:
        """(offset, bytes) of all records whose first byte lies in `block`."""
        raise NotImplementedError

    def parse_all(self, data: bytes) -> list:
        """The records of a span at once. ValueError when in doubt: then `parse` has each."""
        raise NotImplementedError

    def cut(self, offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of each record of the span `data` that begins at `offset`."""
        raise NotImplementedError

    def parse(self, raw: bytes):
        """One record. ValueError with the reason when it cannot be used."""
        raise NotImplementedError

    # --- order and place --------------------------------------------------------------------

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
            "keep": name_of(self.keep),
            "numpy": order_check(),
        }

    def check(self, identity: object) -> None:
        check_same(str(self.file.path), self.identity(), identity)

    def place(self) -> list[int]:
        """[epoch, turn, record]: the record of the role's turn that comes next."""
        return [self.epoch, self._turn, self._filled - operator.length_hint(self._left)]

    def go_to(self, place: list[int]) -> None:
        self.epoch, turn, record = place
        self._start = (turn, record)
        self._stand(turn, record)

    def begin_epoch(self, epoch: int) -> None:
        self.go_to([epoch, 0, 0])

    def send_faults(self, to: Callable[[Fault], None]) -> None:
        self.bad = self.bad and to

    def __getstate__(self) -> dict:
        """Where worker processes start afresh (Windows, macOS), no function of a notebook can go
        along; that there is a `bad` can, until `send_faults` puts another in its place.
        """
        state = dict(vars(self))
        state["bad"] = warn_of if self.bad else None
        return state

    def hear(self, fault: Fault) -> bool:
        own = bool(self.bad) and fault.file == str(self.file.path)
        if own:
            self.bad(fault)
        return own

    def _stand(self, turn: int, filled: int, left: Iterator = iter(())) -> None:  # noqa: B008
        self._turn = turn
        self._filled = filled
        self._left = left

    # --- reading ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator:
        turn, record = self._start
        if (turn or record) and not self._role and get_worker_info():
            raise StreamError(
                f"{self.file.path}: the loaded position is that of one process, and a DataLoader "
                "with workers would repeat and lose records. Go on through `Loader` "
                "(kit.streams.loader)."
            )
        self._start = (0, 0)
        self._stand(turn, record)
        # `chain` hands records on in C; where it stands is asked of the list's own iterator.
        return itertools.chain.from_iterable(self._turns(turn, record))

    def _turns(self, turn: int, record: int) -> Iterator[Iterator]:
        role, roles = self.role()
        order = self._block_order()
        for group in range(role + turn * roles, self.groups, roles):
            records = self._read_group(order, group, tell=record == 0)
            left = iter(records[record:] if record else records)
            self._stand(turn, len(records), left)
            yield left
            turn += 1
            record = 0
        self._stand(turn, 0)

    def _block_order(self) -> np.ndarray:
        if self.config.shuffle:
            return permutation(self.blocks, self.config.seed, self.epoch, 0)
        return np.arange(self.blocks)

    def _read_group(self, order: np.ndarray, group: int, tell: bool) -> list:
        records = []
        for offset, data in self._spans(order, group):
            records += self._records(offset, data, tell)
        if self.keep:
            records = list(filter(self.keep, records))
        if self.config.shuffle:
            records = shuffled(records, self.config.seed, self.epoch, group + 1)
        return records

    def _spans(self, order: np.ndarray, group: int) -> list[tuple[int, bytes]]:
        size = self.config.group_blocks
        with self.file.opened() as read:
            blocks = order[group * size : (group + 1) * size].tolist()
            spans = [self.span(read, block) for block in blocks]
        return [span for span in spans if span[1]]

    def _records(self, offset: int, data: bytes, tell: bool) -> list:
        """The records of a span; what is wrong with others is told when `tell`."""
        if len(data) <= self.config.longest_record_bytes:
            try:
                return self.parse_all(data)
            except ValueError:
                pass  # some record of it: below, each is looked at
        judged = [self._judge(at, raw) for at, raw in self.cut(offset, data)]
        faults = [record for record in judged if isinstance(record, Fault)]
        for fault in faults if tell or not self.bad else ():
            self._tell(fault)
        return [record for record in judged if not isinstance(record, Fault)]

    def _judge(self, offset: int, raw: bytes, line: int | None = None):
        """The record, or the Fault that it is."""
        longest = self.config.longest_record_bytes
        try:
            if len(raw) > longest:
                raise ValueError(f"longer than longest_record_bytes ({longest})")
            return self.parse(raw)
        except ValueError as why:
            return Fault(file=str(self.file.path), line=line, offset=offset, reason=str(why))

    def _tell(self, fault: Fault) -> None:
        if self.bad:
            self.bad(fault)
            return
        counted = dataclasses.replace(fault, line=self.file.line_of(fault.offset))
        raise StreamError(
            f"{counted}. Mend it, or give the stream a `bad=` function to go on without such "
            "records."
        )

    def rows(self) -> Iterator[tuple[int, object]]:
        """(line number, record or Fault) in the order of the file; not for `keep` or roles."""
        line = 1
        counted = 0
        order = np.arange(self.blocks)
        for group in range(self.groups):
            for offset, data in self._spans(order, group):
                line += self.file.newlines(counted, offset)
                yield from self.numbered(offset, data, line)
                line += data.count(b"\n")
                counted = offset + len(data)

    def numbered(self, offset: int, data: bytes, line: int) -> Iterator[tuple[int, object]]:
        """`rows` of one span that begins in `line`."""
        counted = 0
        for at, raw in self.cut(offset, data):
            line += data.count(b"\n", counted, at - offset)
            counted = at - offset
            yield line, self._judge(at, raw, line)
