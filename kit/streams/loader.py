"""Batches of a stream's records through worker processes, with a place to go on from.

Each worker reads its own share of the stream and makes whole batches; every batch brings the
worker's place along, so that what was read ahead and never used is simply read again. Records that
are strings travel as one UTF-16 payload: decoding it costs the receiver next to nothing.

torchdata's StatefulDataLoader (0.11, its last release) was measured beside it: as exact and, given
the same payloads, as fast; its state is three times the size, and it is no longer developed.

Knows nothing of what records hold.
"""

import dataclasses
import itertools
import pickle
import signal
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from kit.base.config import require, require_within
from kit.streams.file import Fault, StreamError
from kit.streams.position import Stream, check_same


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    batch: int = 1024  # records
    workers: int = 0  # processes that read; 0: this one does
    prefetch: int = 2  # batches that each worker is ahead

    def __post_init__(self):
        require(self.batch > 0, self, "batch", "choose 1 or more.")
        require(self.workers >= 0, self, "workers", "choose 0 or more.")
        require(self.prefetch > 0, self, "prefetch", "choose 1 or more.")
        require_within(self, 0, 1e7, "batch")
        require_within(self, 0, 1024, "workers", "prefetch")


@dataclasses.dataclass(frozen=True)
class WorkerBatch:
    """What a worker sends: a batch, its place after it, and what went wrong on the way."""

    worker: int  # that reads this share, wherever it runs
    place: list | None = None
    payload: object = None
    faults: tuple[Fault, ...] = ()
    error: str = ""


def join_records(records: list):
    """Lines as one payload, other records as they are."""
    try:
        text = "\n".join(records)
    except TypeError:  # not strings, or not all of them
        return records
    return text.encode("utf-16-le") if text.count("\n") == len(records) - 1 else records


def split_records(payload) -> list:
    return payload.decode("utf-16-le").split("\n") if isinstance(payload, bytes) else payload


class Shares(IterableDataset):
    """Parts of a stream; in worker w of W that of share (w + first) % W, from its place on.

    The DataLoader asks its workers in turn, so `first` makes the one begin whose turn it was.
    """

    def __init__(self, source: Stream, config: LoaderConfig, places: list, first: int):
        self.source = source
        self.config = config
        self.places = places
        self.first = first

    def __iter__(self) -> Iterator[WorkerBatch]:
        source = self.source
        count = len(self.places)
        share = (self.worker() + self.first) % count
        source.take_role(source.config.rank * count + share, source.config.ranks * count)
        source.go_to(self.places[share])
        try:
            yield from self._parts(share)
        except StreamError as error:  # as a value, it reaches the user without a second traceback
            yield WorkerBatch(share, error=str(error))

    def worker(self) -> int:
        return get_worker_info().id if self.config.workers else 0

    def _parts(self, share: int) -> Iterator[WorkerBatch]:
        faults: list[Fault] = []
        if self.config.workers:
            self.source.send_faults(faults.append)
        records = iter(self.source)
        while batch := list(itertools.islice(records, self.config.batch)):
            payload = join_records(batch) if self.config.workers else batch
            yield WorkerBatch(share, self.source.place(), payload, tuple(faults))
            faults.clear()
        if faults:
            yield WorkerBatch(share, self.source.place(), None, tuple(faults))


def as_it_is(part: WorkerBatch) -> WorkerBatch:
    return part


def leave_interrupts(_worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the run ends its workers itself, after a save."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Loader:
    """Lists of `config.batch` records of `source`, in an order that `config.workers` is part of.

    One `iter()` is one epoch; each share may end with a shorter batch. `state_dict` between two
    batches (one for each rank) leads, through `load_state_dict`, to exactly the batches that would
    have followed. StreamErrors of workers arrive as they are; a source's `bad` is called here.
    """

    def __init__(self, source: Stream, config: LoaderConfig | None = None):
        self.source = source
        self.config = config or LoaderConfig()
        self.shares = max(1, self.config.workers)
        self._ready = False
        self._stand([source.place()] * self.shares, 0)

    def _stand(self, places: list, following: int) -> None:
        self._places = list(places)
        self._next = following

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass at the start of `epoch`; in the epoch that it is, change nothing."""
        if epoch != self.source.epoch:
            self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self.source.begin_epoch(epoch)
        self._ready = True
        self._stand([self.source.place()] * self.shares, 0)

    def __iter__(self) -> Iterator[list]:
        if not self._ready:
            self._begin_epoch(self.source.epoch)
        self._ready = False
        for part in self._parts():
            for fault in part.faults:
                self.source.hear(fault)
            if part.error:
                raise StreamError(part.error)
            self._places[part.worker] = part.place
            self._next = (part.worker + 1) % self.shares
            if part.payload is not None:
                yield split_records(part.payload)

    def _parts(self) -> Iterator[WorkerBatch]:
        shares = Shares(self.source, self.config, list(self._places), self._next)
        if not self.config.workers:
            return iter(shares)
        loader = DataLoader(
            shares,
            batch_size=None,
            num_workers=self.config.workers,
            collate_fn=as_it_is,
            prefetch_factor=self.config.prefetch,
            generator=torch.Generator(),  # else it would draw from the training's random numbers
            worker_init_fn=leave_interrupts,
        )
        try:
            return iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise StreamError(
                f"The stream cannot go to worker processes, which start afresh on this system "
                f"({error}). Give it a `keep` that stands in a module (kit.streams.position's "
                "Split does), not in the notebook, or choose workers: 0."
            ) from error

    def _sharing(self) -> dict:
        ranks = f"{self.source.config.rank} of {self.source.config.ranks}"
        return {"rank": ranks, "workers": self.shares}

    def state_dict(self) -> dict:
        """The place after the latest batch: plain values, 300 bytes and about 15 a worker."""
        place = {"next": self._next, "at": list(self._places)}
        return {"of": self.source.identity()} | self._sharing() | place

    def load_state_dict(self, state: dict) -> None:
        """Let the next `iter()` go on from `state`.

        Raises StreamError when file, format, order, ranks or workers are not what they were.
        """
        self.source.check(state.get("of"))
        check_same("This loader", self._sharing(), state)
        self.source.begin_epoch(state["at"][0][0])
        self._stand(state["at"], state["next"])
        self._ready = True
