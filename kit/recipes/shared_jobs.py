"""Sharing work between the ranks that torchrun has started for one run.

The main rank runs the recipe. Where the others can help it broadcasts an order, and each calls its
`follow(ranks)`; then they wait for the next, until there is none. Orders are pickled, so they hold
plain values. `RankGroup` shares the jobs of a preparation this way. Codec and recogniser are small
and trained on the main rank alone.
"""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from kit.base.errors import KitError
from kit.base.hardware import set_cuda_defaults
from kit.base.processes import SINGLE_PROCESS, Job, WorkGroup
from kit.recipes.active_run import ActiveRun
from kit.training.ranks import RankLost, Ranks, SeveralRanks

UNITS = 10**6  # the ranks' shared counters are integers: progress is counted in millionths
POLL_S = 0.2  # between two looks at the progress of the other ranks


def follow_orders(ranks: Ranks) -> None:
    """Follow the main rank's orders until there are none, or until the main rank has ended."""
    set_cuda_defaults()
    with contextlib.suppress(RankLost, KeyboardInterrupt):  # the main rank or torchrun says why
        order = broadcast_order(ranks)
        while order is not None:
            order.follow(ranks)
            order = broadcast_order(ranks)
    ranks.leave()


def broadcast_order(ranks: Ranks, order=None):
    """Broadcast the main rank's `order`; return it on every rank. None: nothing is left to do."""
    if ranks.is_main:
        ranks.call()
    else:
        with interruptible():  # it may wait for hours, and has nothing to finish
            ranks.await_call()
    return ranks.from_main(lambda: order)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block on SIGINT or SIGTERM.

    Elsewhere ranks other than the main one ignore both: the main one handles them.
    """

    def interrupt(number: int, frame) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def group_of(run: ActiveRun, load: Callable[[], object] | None = None) -> WorkGroup:
    """The processes that share `run`'s work. The others load their tools with `load`.

    With several ranks it is pickled: an importable function with plain arguments.
    """
    return RankGroup(run.ranks, load) if run.ranks.several else SINGLE_PROCESS


class RankGroup(WorkGroup):
    """All ranks of a run, seen from the main one."""

    def __init__(self, ranks: SeveralRanks, load: Callable[[], object] | None):
        self.ranks = ranks
        self.load = load
        self.size = ranks.world
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def do(self, jobs: Sequence[Job], tools, progress: Callable[[float], None]):
        ranks = self.ranks
        try:
            broadcast_order(ranks, JobOrder(load=self.load))
            shared = SharedProgress(ranks, progress)
            result = ranks.scatter(jobs).run(tools, shared.add)
            ranks.barrier(shared.poll)
            shared.report()
        except RankLost as error:
            raise KitError(
                f"{error} The reason is in its output or torchrun's. Finished work is kept: run "
                "the same command again, with any number of processes."
            ) from error
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOrder:
    """To do the job that is scattered next."""

    load: Callable[[], object] | None  # loads the job's tools; None: it needs none

    def follow(self, ranks: SeveralRanks) -> None:
        """Do this rank's job; send the main rank its progress, or why it failed."""
        job = ranks.scatter()
        name = work_name(ranks)
        with interruptible():
            try:
                tools = self.load() if self.load else None
                job.run(tools, lambda more: ranks.add(f"{name} done", round(UNITS * more)))
            except (ValueError, RuntimeError, OSError) as error:
                if not type(error).__module__.startswith("kit."):
                    raise
                ranks.write(f"{name} failure", str(error))
                ranks.add(f"{name} failed", 1)
            ranks.barrier()


def work_name(ranks: SeveralRanks) -> str:
    return f"work {ranks.calls}"  # the same on every rank


class SharedProgress:
    """The progress of all ranks, reported by the main one."""

    def __init__(self, ranks: SeveralRanks, progress: Callable[[float], None]):
        self.ranks = ranks
        self.name = work_name(ranks)
        self.progress = progress
        self.reported = 0
        self.polled_s = 0.0

    def add(self, more: float) -> None:
        """Add what the main rank has done."""
        self.ranks.add(f"{self.name} done", round(UNITS * more))
        self.poll()

    def poll(self) -> None:
        now_s = time.monotonic()
        if now_s - self.polled_s >= POLL_S:
            self.polled_s = now_s
            self.report()

    def report(self) -> None:
        """Report new progress; KitError with the message of a rank that failed."""
        if self.ranks.add(f"{self.name} failed", 0):
            raise KitError(self.ranks.read(f"{self.name} failure"))
        done = self.ranks.add(f"{self.name} done", 0)
        if done > self.reported:
            self.reported = done
            self.progress(done / UNITS)
