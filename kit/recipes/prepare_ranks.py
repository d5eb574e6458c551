"""A preparation that torchrun has started in several processes: each does a share of the long work.

The main rank takes every step; where clips are measured, heard, cut or encoded, or texts made ids
of, it hands out a job a rank and does its own. Networks it trains while the others wait: they are
small. What a rank has done it leaves in files, so a killed preparation resumes from them. Where
there are GPUs every rank encodes and listens on one; ranks share them where they are fewer.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from kit.audio.codec import load_codec
from kit.audio.recognizer import SpeechRecognizer, load_recognizer
from kit.audio.spectrogram import MelConfig, make_front_end
from kit.base.errors import KitError
from kit.base.work_group import SINGLE_PROCESS, Job, WorkGroup
from kit.batches.encoding import EncodingTools
from kit.recipes.active_run import ActiveRun
from kit.recipes.orders import ending_when_told, next_order
from kit.text.tokenizer import load_tokenizer
from kit.training.ranks import RankLost, SeveralRanks

PARTS = 10**6  # the ranks' common numbers are whole: a millionth of what is counted is one
LOOK_S = 0.2  # between two looks at what the other ranks have done


def no_tools() -> None:
    """What work is done with that needs nothing."""


def group_of(run: ActiveRun, load: Callable[[], object] = no_tools) -> WorkGroup:
    """The processes that share `run`'s work; another rank comes by its tools with `load()`.

    `load` travels: a function that can be imported, with plain arguments.
    """
    return RankGroup(run.ranks, load) if run.ranks.several else SINGLE_PROCESS


def listening_group(run: ActiveRun) -> WorkGroup:
    """For work that asks the run's recogniser."""
    path = run.path("recognizer.safetensors").absolute()
    return group_of(run, partial(load_rank_recognizer, path, run.hw.device))


def encoding_group(run: ActiveRun, front_end: MelConfig, language: str) -> WorkGroup:
    """For work that asks the run's codec and tokenizer, and `front_end`."""
    codec = run.path("codec.safetensors").absolute()
    tokenizer = run.path("tokenizer.model").absolute()
    load = partial(load_encoding_tools, codec, front_end, tokenizer, language, run.hw.device)
    return group_of(run, load)


def load_rank_recognizer(path: Path, device: str) -> SpeechRecognizer:
    """The recogniser at `path`, on this rank's own device of the kind `device`."""
    return load_recognizer(path).to(rank_device(device))


def load_encoding_tools(
    codec: Path, front_end: MelConfig, tokenizer: Path, language: str, device: str
) -> EncodingTools:
    """What the main rank encodes with, from its files, on this rank's own device."""
    own = rank_device(device)
    return EncodingTools(
        codec=load_codec(codec).to(own),
        front_end=make_front_end(front_end).to(own),
        tokenizer=load_tokenizer(tokenizer, language),
    )


def rank_device(device: str) -> str:
    """The device of this rank where the main one has `device`: of several GPUs, one for each.

    Ranks that outnumber the GPUs share them.
    """
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
            order = next_order(ranks, lambda: WorkOrder(number=ranks.calls, load=self.load))
            tally = Tally(ranks, order.name, progress)
            own = ranks.hand_out(jobs)
            result = own.run(tools, tally.tell)
            ranks.meet(tally.look)
            tally.end()
        except RankLost as error:
            raise KitError(
                f"{error} Why, its own words or torchrun's tell. What was done is kept: give the "
                "same command again, with as many processes as you like."
            ) from error
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkOrder:
    """To do the job that is handed out next."""

    number: int  # of this order
    load: Callable[[], object]  # what the job is done with

    @property
    def name(self) -> str:
        return f"work {self.number}"

    def follow(self, ranks: SeveralRanks) -> None:
        """Do this rank's job, and tell the main one how far it is, or why it cannot."""
        job = ranks.hand_out()
        with ending_when_told():
            try:
                job.run(self.load(), partial(add_done, ranks, self.name))
            except (ValueError, RuntimeError, OSError) as error:
                if not type(error).__module__.startswith("kit."):
                    raise
                ranks.write(f"{self.name} failure", str(error))
                ranks.add(f"{self.name} failed", 1)
            ranks.meet()


def add_done(ranks: SeveralRanks, name: str, more: float) -> None:
    """Add to what the ranks other than the main one have done of the work `name`."""
    ranks.add(f"{name} done", round(PARTS * more))


class Tally:
    """What all ranks have done of some work, told by the main one as it does its own."""

    def __init__(self, ranks: SeveralRanks, name: str, progress: Callable[[float], None]):
        self.ranks = ranks
        self.name = name
        self.progress = progress
        self.own = 0.0
        self.told = 0.0
        self.looked_s = 0.0

    def tell(self, more: float) -> None:
        """Count what this rank has done."""
        self.own += more
        self.look()

    def look(self) -> None:
        """Tell of what is new; KitError with the words of a rank that failed."""
        now_s = time.monotonic()
        if now_s - self.looked_s >= LOOK_S:
            self.looked_s = now_s
            self.end()

    def end(self) -> None:
        """As `look`, at once."""
        ranks = self.ranks
        if ranks.add(f"{self.name} failed", 0):
            raise KitError(ranks.read(f"{self.name} failure"))
        done = self.own + ranks.add(f"{self.name} done", 0) / PARTS
        if done > self.told:
            self.told = done
            self.progress(done)
