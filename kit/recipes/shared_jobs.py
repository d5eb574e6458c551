"""Sharing work between the ranks that torchrun has started for one run.

The main rank runs the recipe. Where the others can help it broadcasts an `Order`, which each of
them follows; then they wait for the next, until there is none. Orders are pickled, so they hold
plain values. `RankGroup` shares the jobs of a preparation this way: each rank leaves its results in
files, so a killed preparation resumes. Codec and recogniser are small and trained on the main rank
alone.
"""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from kit.audio.codec import load_codec
from kit.audio.recognizer import SpeechRecognizer, load_recognizer
from kit.audio.spectrogram import MelConfig, make_front_end
from kit.base.errors import KitError
from kit.base.hardware import set_cuda_defaults
from kit.base.work_group import SINGLE_PROCESS, Job, WorkGroup
from kit.batches.encoding import EncodingTools
from kit.recipes.active_run import ActiveRun
from kit.text.tokenizer import load_tokenizer
from kit.training.ranks import RankLost, Ranks, SeveralRanks

UNITS = 10**6  # the ranks' shared counters are integers: progress is counted in millionths
POLL_S = 0.2  # between two looks at the progress of the other ranks


class Order(Protocol):
    """Something that the main rank has the others do along with it."""

    def follow(self, ranks: Ranks) -> None:
        """Do it, on a rank other than the main one."""


def follow_orders(ranks: Ranks) -> None:
    """Follow the main rank's orders until there are none, or until the main rank has ended."""
    set_cuda_defaults()
    with contextlib.suppress(RankLost, KeyboardInterrupt):  # the main rank or torchrun says why
        order = broadcast_order(ranks)
        while order is not None:
            order.follow(ranks)
            order = broadcast_order(ranks)
    ranks.leave()


def broadcast_order(ranks: Ranks, give: Callable[[], Order | None] = lambda: None) -> Order | None:
    """Broadcast the main rank's `give()`; return it on every rank. None: nothing is left to do."""
    if ranks.is_main:
        ranks.call()
    else:
        with interruptible():  # it may wait for hours, and has nothing to finish
            ranks.await_call()
    return ranks.from_main(give)


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


def no_tools() -> None:
    """Loads nothing; a lambda could not be pickled."""


def group_of(run: ActiveRun, load: Callable[[], object] = no_tools) -> WorkGroup:
    """The processes that share `run`'s work. The other ranks load their tools with `load()`.

    With several ranks `load` is pickled: an importable function with plain arguments.
    """
    return RankGroup(run.ranks, load) if run.ranks.several else SINGLE_PROCESS


def recognizer_group(run: ActiveRun) -> WorkGroup:
    """The processes that share work with the run's recogniser."""
    path = run.path("recognizer.safetensors").absolute()
    return group_of(run, partial(load_rank_recognizer, path, run.hw.device))


def encoding_group(run: ActiveRun, front_end: MelConfig, language: str) -> WorkGroup:
    """The processes that share work with the run's codec and tokenizer, and `front_end`."""
    codec = run.path("codec.safetensors").absolute()
    tokenizer = run.path("tokenizer.model").absolute()
    load = partial(load_encoding_tools, codec, front_end, tokenizer, language, run.hw.device)
    return group_of(run, load)


def load_rank_recognizer(path: Path, device: str) -> SpeechRecognizer:
    return load_recognizer(path).to(rank_device(device))


def load_encoding_tools(
    codec: Path, front_end: MelConfig, tokenizer: Path, language: str, device: str
) -> EncodingTools:
    rank_own = rank_device(device)
    return EncodingTools(
        codec=load_codec(codec).to(rank_own),
        front_end=make_front_end(front_end).to(rank_own),
        tokenizer=load_tokenizer(tokenizer, language),
    )


def rank_device(device: str) -> str:
    """This rank's device. With "cuda" each rank has its own GPU; ranks beyond them share."""
    if device != "cuda":
        return device
    return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"


class RankGroup(WorkGroup):
    """All ranks of a run, seen from the main one."""

    def __init__(self, ranks: SeveralRanks, load: Callable[[], object]):
        self.ranks = ranks
        self.load = load
        self.size = ranks.world
        self.here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def do(self, jobs: Sequence[Job], tools, progress: Callable[[float], None]):
        ranks = self.ranks
        try:
            order = broadcast_order(ranks, lambda: JobOrder(number=ranks.calls, load=self.load))
            total = TotalProgress(ranks, order.name, progress)
            job = ranks.scatter(jobs)
            result = job.run(tools, total.add)
            ranks.barrier(total.poll)
            total.report()
        except RankLost as error:
            raise KitError(
                f"{error} The reason is in its output or torchrun's. Finished work is kept: run "
                "the same command again, with any number of processes."
            ) from error
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOrder:
    """The order to do the job that is scattered next."""

    number: int  # of this order
    load: Callable[[], object]  # loads the job's tools

    @property
    def name(self) -> str:
        return f"work {self.number}"

    def follow(self, ranks: SeveralRanks) -> None:
        """Do this rank's job; send the main rank its progress, or why it failed."""
        job = ranks.scatter()
        with interruptible():
            try:
                job.run(
                    self.load(), lambda more: ranks.add(f"{self.name} done", round(UNITS * more))
                )
            except (ValueError, RuntimeError, OSError) as error:
                if not type(error).__module__.startswith("kit."):
                    raise
                ranks.write(f"{self.name} failure", str(error))
                ranks.add(f"{self.name} failed", 1)
            ranks.barrier()


class TotalProgress:
    """The progress of all ranks, reported by the main one."""

    def __init__(self, ranks: SeveralRanks, name: str, progress: Callable[[float], None]):
        self.ranks = ranks
        self.name = name
        self.progress = progress
        self.own = 0.0  # units that the main rank has done
        self.reported = 0.0
        self.polled_s = 0.0

    def add(self, more: float) -> None:
        """Add `more` units that the main rank has done."""
        self.own += more
        self.poll()

    def poll(self) -> None:
        """`report`, every POLL_S."""
        now_s = time.monotonic()
        if now_s - self.polled_s >= POLL_S:
            self.polled_s = now_s
            self.report()

    def report(self) -> None:
        """Report new progress; KitError with the message of a rank that failed."""
        if self.ranks.add(f"{self.name} failed", 0):
            raise KitError(self.ranks.read(f"{self.name} failure"))
        done = self.own + self.ranks.add(f"{self.name} done", 0) / UNITS
        if done > self.reported:
            self.reported = done
            self.progress(done)
