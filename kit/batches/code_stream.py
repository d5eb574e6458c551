"""The stream training reads: effective batches of cached codes, resumed to the batch.

`CodeStream` is an IterableDataset over a `CodeCache`. Its position is an epoch and a batch, carried
by every batch it makes; resuming reads nothing of what was skipped, with any number of DataLoader
workers and ranks. A position also says which utterances and which order it belongs to, and is
refused by a stream of others. `loader_settings` says whether workers pay. Knows no audio and no
model: `collate` makes the batch.

Shapes: B batch, S packed sequence, M mels, T reference frames.
"""

import dataclasses
import hashlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from kit.base.files import digest
from kit.base.hardware import Hardware
from kit.batches.batching import (
    EXTRA_TOKENS,
    DataConfig,
    chunks,
    micro_batches,
    padded,
    plan_batches,
)
from kit.batches.code_cache import REHEARSAL, CacheError, CodeCache

# What a position must agree in, and how to say that it does not.
MARKS = {"corpus": "other utterances", "order": "other batches (seed, sizes, sorting, rehearsal)"}


class CodeStream(IterableDataset):
    """Effective batches of like lengths, in an order set by (seed, epoch), for ever.

    `collate(parts, position)` makes the batch; a part is one micro-batch: (text ids, codes,
    references (B, M, T)), and the length to pad to where `grid_lengths` are set. `position` says
    where to begin; the one a batch carries is that of the next. With DataLoader workers, each makes
    every n-th batch and the loader restores the order. With `world` ranks, each takes every
    `world`-th utterance of the same effective batch, so that together they see what one would see:
    sum gradients and target counts over the ranks. A rank's last batch of an epoch may be empty.
    `rehearsal` is the share of an epoch's rows that are of the cache's split "rehearsal", beside
    every row of `split`: the next so many of them, in an order of their own; 0 leaves them out.
    """

    def __init__(
        self,
        cache: CodeCache,
        split: str,
        config: DataConfig,
        collate: Callable,
        position: dict | None = None,
        *,
        rank: int = 0,
        world: int = 1,
        rehearsal: float = 0.0,
    ):
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world} ranks: it must lie in 0..{world - 1}.")
        self.cache = cache
        self.config = config
        self.collate = collate
        self.rank = rank
        self.world = world
        self.members = cache.of_split(split)
        if not self.members:
            raise CacheError(
                f"The code cache holds no utterance of the split `{split}`: were all refused? "
                "With a higher `held_out_percent` (section manifest), prepare holds out more."
            )
        self.rehearsed = cache.of_split(REHEARSAL) if rehearsal else []
        self.rehearsed_an_epoch = 0
        if self.rehearsed:
            self.rehearsed_an_epoch = round(rehearsal / (1 - rehearsal) * len(self.members))
        self.lengths = self.lengths_of(self.members)
        self.voices: dict[str, list[int]] = {}
        for i in self.members:
            self.voices.setdefault(cache.rows[i]["speaker"], []).append(i)
        self._require_grid()
        self.identity = identity(cache, [*self.members, *self.rehearsed], config, rehearsal)
        self.load_state_dict(position or {})

    def _require_grid(self) -> None:
        grid = self.config.grid_lengths
        lengths = [*self.lengths, *self.lengths_of(self.rehearsed)]
        longest = max(lengths)
        if grid and longest > grid[-1]:
            over = sum(length > grid[-1] for length in lengths)
            raise CacheError(
                f"{over} of {len(lengths)} utterances are longer than the longest of "
                f"`grid_lengths` ({grid[-1]} tokens; the longest has {longest}): add a length, or "
                "leave those rows out of the manifest. `length_report` lists them."
            )

    def load_state_dict(self, position: dict) -> None:
        """Begin at `position`. Raises CacheError for one of other utterances or another order.

        A position without a mark of either, as written by early versions, is taken as it is.
        """
        for mark, what in MARKS.items():
            if position.get(mark, self.identity[mark]) != self.identity[mark]:
                raise CacheError(
                    f"This position in the data is of {what}: going on from it would repeat some "
                    "utterances and leave others out. Put them back as they were, or begin the "
                    "data anew by giving no position (in a notebook: choose another KIT_RUN)."
                )
        self.position = {"epoch": 0, "batch": 0}
        self.position.update(position)
        self.position.update(self.identity)
        self._next = self.position

    def state_dict(self) -> dict:
        """The position after the last batch this process has made.

        A DataLoader's workers make theirs elsewhere: with workers, take the one a batch carries.
        """
        return dict(self._next)

    def lengths_of(self, rows: list[int]) -> list[int]:
        """The tokens of each of `rows`."""
        return [self.cache.length(i) + EXTRA_TOKENS for i in rows]

    def plan(self, epoch: int) -> list[list[int]]:
        """The batches of `epoch` as lists of utterances; every utterance once, none left out.

        Among them are the rows to rehearse in this epoch.
        """
        rows = [*self.members, *self.rehearsed_in(epoch)]
        batches = plan_batches(self.lengths_of(rows), self.config, epoch)
        return [[rows[i] for i in batch] for batch in batches]

    def rehearsed_in(self, epoch: int) -> list[int]:
        """The rows to rehearse in `epoch`: over the epochs each as often as the others."""
        count = len(self.rehearsed)
        order = random.Random(f"{self.config.seed} rehearsal").sample(self.rehearsed, count)
        first = epoch * self.rehearsed_an_epoch
        return [order[n % count] for n in range(first, first + self.rehearsed_an_epoch)]

    def usual(self, count: int) -> list:
        """`count` batches of the first epoch, their sizes spread as those of all: to time steps."""
        batches = sorted(self.plan(0), key=lambda batch: sum(self.lengths_of(batch)))
        middles = [(2 * i + 1) * len(batches) // (2 * count) for i in range(count)]
        random.Random(0).shuffle(middles)  # the first step is not timed: it is not the shortest
        return [self.batch(batches[i], 0, i, self.position) for i in middles]

    def __iter__(self) -> Iterator:
        worker = get_worker_info()
        role = worker.id if worker else 0
        roles = worker.num_workers if worker else 1
        epoch = self.position["epoch"]
        first = self.position["batch"]
        count = 0
        while True:
            batches = self.plan(epoch)
            for number in range(first, len(batches)):
                if count % roles == role:
                    ended = number + 1 == len(batches)
                    position = dict(self.identity)
                    position["epoch"] = epoch + ended
                    position["batch"] = 0 if ended else number + 1
                    batch = self.batch(batches[number], epoch, number, dict(position))
                    self._next = position
                    yield batch
                count += 1
            epoch += 1
            first = 0

    def batch(self, members: list[int], epoch: int, number: int, position: dict):
        """Batch `number` of `epoch`: each utterance with a reference clip of the same speaker."""
        rng = random.Random(f"{self.config.seed} {epoch} {number}")
        voice = {i: rng.choice(self.voices[self.cache.rows[i]["speaker"]]) for i in members}
        mine = members[self.rank :: self.world]
        lengths = {i: self.cache.length(i) + EXTRA_TOKENS for i in mine}
        parts = [
            self.part(rows, [voice[i] for i in rows], max(lengths[i] for i in rows))
            for rows in micro_batches(mine, lengths, self.config)
        ]
        return self.collate(parts, position)

    def part(self, rows: list[int], voices: list[int], longest: int) -> tuple:
        """One micro-batch, as `collate` takes it; `longest` is the tokens of its longest row."""
        cond = torch.from_numpy(np.stack([self.cache.references[v] for v in voices])).float()
        texts = [self.cache.texts[i].tolist() for i in rows]
        codes = [self.cache.codes[i].tolist() for i in rows]
        return (texts, codes, cond, padded(longest, self.config))


def identity(
    cache: CodeCache, members: list[int], config: DataConfig, rehearsal: float = 0.0
) -> dict[str, str]:
    """Marks of the utterances and of their order: 8 hex digits each, alike for any micro-batch."""
    corpus = hashlib.sha256("\n".join(cache.rows[i]["id"] for i in members).encode())
    corpus.update(np.array([cache.length(i) for i in members]).tobytes())
    size = config.effective_tokens or config.effective_batch
    order = [size, bool(config.effective_tokens), config.sort_window, config.short_first]
    order.append(config.seed)
    if rehearsal:  # without it, a position is what it was before there was any
        order.append(rehearsal)
    return {"corpus": corpus.hexdigest()[:8], "order": digest(*order)[:8]}


def validation_batches(stream: CodeStream) -> list:
    """Every utterance of `stream` once, sorted by length, each with a fixed reference."""
    order = sorted(stream.members, key=stream.cache.length)
    parts = chunks(order, stream.config.effective_batch)
    return [stream.batch(part, 0, number, stream.position) for number, part in enumerate(parts)]


def timed_batches(stream: CodeStream, count: int = 10) -> tuple:
    """The first batch of `stream`, and the seconds that each of the first `count` takes to make."""
    began_s = time.perf_counter()
    batches = list(itertools.islice(stream, count))
    return batches[0], (time.perf_counter() - began_s) / count


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """What to give a DataLoader, and why."""

    workers: int  # `num_workers`; 0: batches are made between two steps
    prefetch: int | None  # batches a worker makes ahead (`prefetch_factor`); None without workers
    reason: str


def loader_settings(hw: Hardware, batch_s: float, step_s: float) -> LoaderSettings:
    """Workers for a stream whose batches take `batch_s` to make, beside steps of `step_s`.

    As many as keep up with the steps with a half to spare; at most what RAM (a worker is a process
    of some 0.5 GB) and cores allow; none while batches cost less than a fiftieth of the step.
    """
    share = batch_s / step_s
    ram_gib = hw.ram_bytes / 2**30
    cost = f"a batch takes {1000 * batch_s:.1f} ms to make, {share:.1%} of a step"
    if share < 0.02:
        return LoaderSettings(workers=0, prefetch=None, reason=f"{cost}: not worth a process")
    if hw.cores <= 2:
        reason = f"{cost}, but {hw.cores} cores leave none beside the training"
        return LoaderSettings(workers=0, prefetch=None, reason=reason)
    # A 16 GB machine reports a little less than 16 GiB.
    by_ram = next(n for floor, n in ((30, 8), (15, 4), (7, 2), (0, 1)) if ram_gib >= floor)
    workers = min(math.ceil(1.5 * share), by_ram, hw.cores - 1)
    reason = f"{cost}; {ram_gib:.0f} GiB of RAM allow {by_ram}, {hw.cores} cores {hw.cores - 1}"
    return LoaderSettings(workers=workers, prefetch=2 if ram_gib < 15 else 4, reason=reason)
