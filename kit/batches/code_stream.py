"""The stream training reads: effective batches of cached codes, resumed to the batch.

A position is an epoch and a batch, carried by every batch, with digests of the utterances and the
order it belongs to; a stream of others raises an error. Resuming does not read what was skipped,
with any number of DataLoader workers and ranks.

Shapes: B batch, M mels, T reference frames.
"""

import functools
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from kit.base.errors import DamagedFileError
from kit.base.files import digest
from kit.base.hardware import Hardware
from kit.batches import batching
from kit.batches.batching import EXTRA_TOKENS
from kit.batches.code_cache import CodeCache
from kit.batches.word_spans import WHOLE, Cut, WordSpans
from kit.settings import DataConfig

# What a position must agree in, and how to say that it does not.
MARKS = {"corpus": "other utterances", "order": "other batches (seed, sizes, sorting)"}


class CodeStream(IterableDataset):
    """Effective batches of like lengths, in an order set by (seed, epoch), for ever.

    `collate(parts, position)` makes the batch; a part is one micro-batch: (text ids, codes,
    references (B, M, T), length to pad to where `grid_lengths` are set). `position` says where to
    begin; the one a batch carries is that of the next. Of n DataLoader workers each makes every
    n-th batch, and the loader restores the order. Of `world` ranks each takes every `world`-th
    utterance of the same effective batch, so that together they see what one would see: sum
    gradients and target counts over the ranks. A rank's last batch of an epoch may be empty.
    `text_dropout` is the share of rows, by chance, that come without their text.
    With `spans` a row is a run of an utterance's words, another one in each epoch. `at_speeds` are
    caches of the same utterances at other speeds: each row is of one of them or of `cache`, by
    chance.
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
        text_dropout: float = 0.0,
        spans: WordSpans | None = None,
        at_speeds: Sequence[CodeCache] = (),
    ):
        self.cache = cache
        self.config = config
        self.collate = collate
        self.text_dropout = text_dropout
        self.spans = spans
        self.caches = [cache, *at_speeds]
        self.rank = rank
        self.world = world
        self.split = split
        if not len(self.members):
            raise DamagedFileError(
                f"The code cache holds no utterance of the split `{split}`: were all refused? "
                "With a higher `held_out_percent` (section manifest), prepare holds out more."
            )
        self._require_grid()
        order = [config.effective_batch, False, config.sort_window, config.short_first, config.seed]
        marks = [spans.mark] if spans else []
        marks += [other.corpus for other in at_speeds]
        utterances = b"\n".join(cache.ids(self.members)) + cache.lengths(self.members).tobytes()
        self.identity = {
            "corpus": hashlib.sha256(utterances).hexdigest()[:8],
            "order": digest(*order, *marks)[:8],  # the same for every micro-batch
        }
        self.load_state_dict(position or {})

    def load_state_dict(self, position: dict) -> None:
        """Start at `position`; DamagedFileError for one of other utterances or another order."""
        for mark, what in MARKS.items():
            if position and position.get(mark) != self.identity[mark]:
                raise DamagedFileError(
                    f"This position in the data is of {what}: resuming from it would repeat some "
                    "utterances and leave others out. Restore the data as it was, or start from "
                    "the beginning by giving no position (in a notebook: choose another KIT_RUN)."
                )
        self.position = {"epoch": 0, "batch": 0} | position | self.identity

    @property
    def members(self) -> np.ndarray:
        """The utterances of the split, in the order of the manifest."""
        return self.cache.rows_in_split(self.split)

    def _require_grid(self) -> None:
        grid = self.config.grid_lengths
        lengths = self.lengths_of(self.members)
        over = int((lengths > grid[-1]).sum()) if grid else 0
        if over:
            raise DamagedFileError(
                f"{over} of {len(lengths)} utterances are longer than the longest of "
                f"`grid_lengths` ({grid[-1]} tokens; the longest has {lengths.max()}): add a "
                "length, or lower `max_clip_s` (section manifest)."
            )

    def lengths_of(self, rows: Sequence[int]) -> np.ndarray:
        """The tokens of each of `rows`, with the special ones."""
        return self.cache.lengths(rows) + EXTRA_TOKENS

    def cuts(self, rows: Iterable[int], epoch: int) -> dict[int, Cut]:
        """The part of each of `rows` that is learnt in `epoch`; all of one that is not in it."""
        if self.spans is None and len(self.caches) == 1:
            return {}
        cuts = {i: self.cut(i, epoch) for i in rows}
        return {i: cut for i, cut in cuts.items() if cut != WHOLE}

    def cut(self, i: int, epoch: int) -> Cut:
        """The part of row i that is learnt in `epoch`."""
        cut = WHOLE
        if self.spans is not None:
            share = min(1.0, epoch * len(self.members) / self.spans.rows)
            cut = self.spans.cut(i, epoch, share)
        chance = random.Random(f"{self.config.seed} {epoch} {i} speed")
        number = int(chance.random() * len(self.caches))
        if number == 0:
            return cut
        codes, tokens = (int(self.caches[number].lengths([i], n)[0]) for n in ("codes", "tokens"))
        if codes > self.longest["codes"] or tokens > self.longest["tokens"]:
            return cut
        recorded = int(self.cache.lengths([i], "codes")[0])
        return cut.at_speed(number, tokens - codes, recorded, codes)

    def parts(self, i: int, count: int) -> list[Cut]:
        """Parts of row i that are learnt in up to `count` epochs, from early to late ones."""
        epochs = self.spans.rows / len(self.members) if self.spans else count
        drawn = [round((number + 0.5) / count * epochs) for number in range(count)]
        return [cut for epoch in drawn for cut in self.cuts([i], epoch).values()]

    @functools.cached_property
    def longest(self) -> dict[str, int]:
        """The codes and tokens of the longest rows as recorded: the model and memory fit them."""
        return {name: self.cache.longest(name) for name in ("codes", "tokens")}

    def lengths_in(self, rows: Sequence[int], cuts: dict[int, Cut]) -> list[int]:
        """The tokens of each of `rows`, of which `cuts` are learnt, with the special ones."""
        whole = zip(rows, self.lengths_of(rows).tolist())
        return [cuts[i].tokens + EXTRA_TOKENS if i in cuts else length for i, length in whole]

    @property
    def lengths(self) -> list[int]:
        """The tokens of the split's utterances; of a giant one, of an even sample of them."""
        return self.lengths_of(self.cache.sample_of_split(self.split)).tolist()

    def plan(self, epoch: int) -> list[list[int]]:
        """The batches of `epoch` as lists of utterances."""
        rows = self.members.tolist()
        lengths = self.lengths_in(rows, self.cuts(rows, epoch))
        batches = batching.plan_batches(lengths, self.config, epoch)
        return [[rows[i] for i in batch] for batch in batches]

    @property
    def batches_an_epoch(self) -> int:
        size = self.config.effective_batch
        windows, left = divmod(len(self.members), self.config.sort_window)
        return windows * math.ceil(self.config.sort_window / size) + math.ceil(left / size)

    def representative_batches(self, count: int, steps: int) -> list:
        """`count` batches to time a training of `steps` steps with, evenly of all their sizes."""
        epochs = [0]
        if self.spans is not None:  # rows become longer
            whole = steps / self.batches_an_epoch
            epochs = [int(whole * (2 * n + 1) / 6) for n in range(3)]
        batches = [(epoch, batch) for epoch in epochs for batch in self.plan(epoch)]
        batches.sort(key=lambda planned: self._tokens(*planned))
        middles = [(2 * i + 1) * len(batches) // (2 * count) for i in range(count)]
        random.Random(0).shuffle(middles)  # the first step is not timed: it is not the shortest
        return [self.batch(batches[n][1], batches[n][0], n) for n in middles]

    def _tokens(self, epoch: int, batch: list[int]) -> int:
        return sum(self.lengths_in(batch, self.cuts(batch, epoch)))

    def __iter__(self) -> Iterator:
        worker = get_worker_info()
        first = self.position["batch"]
        made = 0  # by all workers
        for epoch in itertools.count(self.position["epoch"]):
            batches = self.plan(epoch)
            for number in range(first, len(batches)):
                if worker is None or made % worker.num_workers == worker.id:
                    after = {"epoch": epoch, "batch": number + 1}
                    if number + 1 == len(batches):
                        after = {"epoch": epoch + 1, "batch": 0}
                    yield self.batch(batches[number], epoch, number, self.identity | after)
                made += 1
            first = 0

    def batch(self, members: list[int], epoch: int, number: int, position: dict | None = None):
        """Batch `number` of `epoch`, of `members`, each with a reference clip of its speaker."""
        key = f"{self.config.seed} {epoch} {number}"
        rng = random.Random(key)
        references = {}  # row of each member's reference clip
        for i, speaker in zip(members, self.cache.speakers(members).tolist()):
            references[i] = rng.choice(self.cache.of_speaker(speaker, self.split))
        chance = random.Random(f"{key} texts")  # its own, so that references stay the same
        without_text = {i for i in members if chance.random() < self.text_dropout}
        mine = members[self.rank :: self.world]
        cuts = self.cuts(mine, epoch)
        lengths = dict(zip(mine, self.lengths_in(mine, cuts)))
        micro = []
        for rows in batching.chunks(mine, self.config.micro_batch):
            parts = [cuts.get(i, WHOLE) for i in rows]
            caches = [self.caches[part.speed] for part in parts]
            texts = [
                [] if i in without_text else self.cache.texts[i][part.texts]
                for i, part in zip(rows, parts)
            ]
            codes = [cache.codes[i][part.codes] for cache, i, part in zip(caches, rows, parts)]
            mels = [cache.references[references[i]] for cache, i in zip(caches, rows)]
            cond = torch.from_numpy(np.stack(mels)).float()
            longest = max(lengths[i] for i in rows)
            micro.append((texts, codes, cond, batching.padded(longest, self.config)))
        return self.collate(micro, position or self.position)


def validation_batches(stream: CodeStream) -> list:
    """Every utterance of `stream` once, sorted by length, each with a fixed reference."""
    rows = stream.members
    order = rows[np.argsort(stream.cache.lengths(rows), kind="stable")].tolist()
    return [
        stream.batch(part, 0, number)
        for number, part in enumerate(batching.chunks(order, stream.config.effective_batch))
    ]


def prefetched(stream: CodeStream, config: DataConfig) -> Iterable:
    """Return `stream`, its batches prefetched by `workers` processes: the same, in their order."""
    if not config.workers:
        return stream
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=config.workers,
        prefetch_factor=config.prefetch_factor,
        multiprocessing_context="spawn",  # not forked: threads and a CUDA context do not survive it
    )


def loader_workers(hw: Hardware, batch_s: float, step_s: float) -> int:
    """How many workers keep up with steps of `step_s` where a batch takes `batch_s` to make.

    With a half to spare; at most what cores and RAM (a worker is a process of 0.5 GB) allow.
    """
    # A 16 GB machine reports a little less than 16.
    ram_gib = hw.ram_bytes / 2**30
    by_ram = next(n for floor, n in ((30, 8), (15, 4), (7, 2), (0, 1)) if ram_gib >= floor)
    return max(1, min(math.ceil(1.5 * batch_s / step_s), by_ram, hw.cores - 1))
