"""The stream training reads: effective batches of cached codes, resumed to the batch.

A position is an epoch, a group of it (see batching.py) and a batch, carried by every batch, with
digests of the utterances and the order it belongs to; a stream of others raises an error. Resuming
does not read what was skipped, with any number of DataLoader workers and ranks.

Shapes: B batch, M mels, T reference frames.
"""

import functools
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

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
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world} ranks: it must lie in 0..{world - 1}.")
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
        self.groups = batching.group_count(len(self.members))
        self._require_grid()
        parts = [spans.mark] if spans else []
        parts += [other.corpus for other in at_speeds]
        self.identity = {
            "corpus": corpus_mark(cache, self.members, split, self.groups),
            "order": order_mark(config, self.groups, parts),
        }
        self.load_state_dict(position or {})

    @property
    def members(self) -> np.ndarray:
        """The utterances of the split, in the order of the manifest."""
        return self.cache.rows_in_split(self.split)

    def _require_grid(self) -> None:
        grid = self.config.grid_lengths
        if not grid:
            return
        rows = np.pad(self.cache.histogram("tokens", self.split), (EXTRA_TOKENS, 0))
        over = int(rows[grid[-1] + 1 :].sum())
        if over:
            raise DamagedFileError(
                f"{over} of {rows.sum()} utterances are longer than the longest of `grid_lengths` "
                f"({grid[-1]} tokens; the longest has {np.flatnonzero(rows)[-1]}): add a length, "
                "or lower `max_clip_s` (section manifest)."
            )

    def load_state_dict(self, position: dict) -> None:
        """Start at `position`; DamagedFileError for one of other utterances or another order."""
        for mark, what in MARKS.items():
            if position and position.get(mark) != self.identity[mark]:
                raise DamagedFileError(
                    f"This position in the data is of {what}: resuming from it would repeat some "
                    "utterances and leave others out. Restore the data as it was, or start from "
                    "the beginning by giving no position (in a notebook: choose another KIT_RUN)."
                )
        self.position = {"epoch": 0, "group": 0, "batch": 0} | position | self.identity
        self._next = self.position

    def state_dict(self) -> dict:
        """The position after the last batch this process made; with workers, take the batch's."""
        return dict(self._next)

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
            cut = self.spans.cut(i, epoch, share) or WHOLE
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

    def lengths_in(self, rows: Sequence[int], cuts: dict[int, Cut]) -> dict[int, int]:
        """The tokens of each of `rows`, of which `cuts` are learnt, with the special ones."""
        lengths = dict(zip(rows, self.lengths_of(rows).tolist()))
        return lengths | {i: cut.tokens + EXTRA_TOKENS for i, cut in cuts.items()}

    @property
    def lengths(self) -> list[int]:
        """The tokens of the split's utterances; of a giant one, of an even sample of them."""
        return self.lengths_of(self.cache.sample_of_split(self.split)).tolist()

    def plan(self, epoch: int, group: int = 0) -> list[list[int]]:
        """The batches of a group of `epoch` as lists of utterances."""
        rows = self.members
        if self.groups > 1:
            key = f"{self.config.seed} {epoch} groups"
            rows = rows[batching.drawn(len(rows), group, self.groups, key)]
        rows = rows.tolist()
        by_row = self.lengths_in(rows, self.cuts(rows, epoch))
        lengths = [by_row[i] for i in rows]
        batches = batching.plan_batches(lengths, self.config, epoch, group, self.groups)
        return [[rows[i] for i in batch] for batch in batches]

    @functools.cached_property
    def batches_an_epoch(self) -> int:
        """How many batches an epoch has; planned only where that is quick, or tokens decide."""
        if self.groups == 1 or self.config.effective_tokens:
            return sum(len(self.plan(0, group)) for group in range(self.groups))
        size = self.config.effective_batch
        batches = 0
        for group in range(self.groups):
            first, end = batching.group_bounds(len(self.members), group, self.groups)
            windows, left = divmod(end - first, self.config.sort_window)
            batches += windows * math.ceil(self.config.sort_window / size) + math.ceil(left / size)
        return batches

    def representative_batches(self, count: int, steps: int) -> list:
        """`count` batches to time a training of `steps` steps with, evenly of all their sizes."""
        epochs = [0]
        if self.spans is not None:  # rows become longer
            whole = steps / self.batches_an_epoch
            epochs = [int(whole * (2 * n + 1) / 6) for n in range(3)]
        batches = [(epoch, batch) for epoch in epochs for batch in self.plan(epoch)]
        batches.sort(key=self._tokens)
        middles = [(2 * i + 1) * len(batches) // (2 * count) for i in range(count)]
        random.Random(0).shuffle(middles)  # the first step is not timed: it is not the shortest
        made = []
        for number in middles:
            epoch, batch = batches[number]
            made.append(self.batch(batch, self._key(epoch, 0, number), self.position, epoch))
        return made

    def _tokens(self, planned: tuple[int, list[int]]) -> int:
        """The tokens of a batch of an epoch."""
        epoch, batch = planned
        return sum(self.lengths_in(batch, self.cuts(batch, epoch)).values())

    def __iter__(self) -> Iterator:
        worker = get_worker_info()
        role = worker.id if worker else 0
        roles = worker.num_workers if worker else 1
        first = self.position["batch"]
        count = 0
        first_group = self.position["epoch"] * self.groups + self.position["group"]
        for epoch, group in (divmod(n, self.groups) for n in itertools.count(first_group)):
            batches = self.plan(epoch, group)
            for number in range(first, len(batches)):
                if count % roles == role:
                    ended = number + 1 == len(batches)  # the next batch is of the next group
                    after = {"batch": 0 if ended else number + 1}
                    groups_done = epoch * self.groups + group + ended
                    after["epoch"], after["group"] = divmod(groups_done, self.groups)
                    position = self.identity | after
                    key = self._key(epoch, group, number)
                    batch = self.batch(batches[number], key, dict(position), epoch)
                    self._next = position
                    yield batch
                count += 1
            first = 0

    def _key(self, epoch: int, group: int, number: int) -> str:
        """Return the seed of the references of batch `number` of a group."""
        return f"{batching.order_key(self.config, epoch, group, self.groups)} {number}"

    def batch(self, members: list[int], key: str, position: dict, epoch: int = 0):
        """Return a batch of `members`, each with a reference clip of its speaker drawn by `key`."""
        rng = random.Random(key)
        references = {}  # row of each member's reference clip
        for i, speaker in zip(members, self.cache.speakers(members).tolist()):
            references[i] = rng.choice(self.cache.of_speaker(speaker, self.split))
        chance = random.Random(f"{key} texts")  # its own, so that references stay the same
        without_text = {i for i in members if chance.random() < self.text_dropout}
        mine = members[self.rank :: self.world]
        cuts = self.cuts(mine, epoch)
        lengths = self.lengths_in(mine, cuts)
        parts = []
        for rows in batching.micro_batches(mine, lengths, self.config):
            own = [references[i] for i in rows]
            longest = max(lengths[i] for i in rows)
            parts.append(self.part(rows, own, longest, without_text, cuts))
        return self.collate(parts, position)

    def part(
        self,
        rows: list[int],
        references: list[int],
        longest: int,
        without_text: Container[int] = (),
        cuts: Mapping[int, Cut] = MappingProxyType({}),
    ) -> tuple:
        """Return one micro-batch for `collate`: of `rows` with `cuts` those parts, else all.

        `references` are the rows of the reference clips, `longest` the tokens of the longest row.
        """
        parts = [cuts.get(i, WHOLE) for i in rows]
        caches = [self.caches[part.speed] for part in parts]
        mels = [cache.references[i] for cache, i in zip(caches, references)]
        cond = torch.from_numpy(np.stack(mels)).float()
        texts = [
            [] if i in without_text else self.cache.texts[i][p.texts] for i, p in zip(rows, parts)
        ]
        codes = [cache.codes[i][part.codes] for cache, i, part in zip(caches, rows, parts)]
        return texts, codes, cond, batching.padded(longest, self.config)


def corpus_mark(cache: CodeCache, members: np.ndarray, split: str, groups: int) -> str:
    """8 hex digits that change with the utterances: their ids, lengths and order."""
    if groups > 1:  # the index's own mark instead of all members
        marks = f"{split} {cache.corpus}".encode()
    else:
        ids = b"\n".join(cache.rows[i]["id"].encode() for i in members)
        marks = ids + cache.lengths(members).tobytes()
    return hashlib.sha256(marks).hexdigest()[:8]


def order_mark(config: DataConfig, groups: int, parts: Sequence[str] = ()) -> str:
    """8 hex digits that change with the order of an epoch, but not with the micro-batch.

    `parts` are marks of what decides which parts of utterances are learnt.
    """
    tokens = config.effective_tokens
    order = [tokens or config.effective_batch, bool(tokens)]
    order += [config.sort_window, config.short_first, config.seed]
    if groups > 1:  # without them, positions from before groups existed stay valid
        order.append(f"groups of {batching.GROUP_ROWS} of a permutation")
    return digest(*order, *parts)[:8]


def validation_batches(stream: CodeStream) -> list:
    """Every utterance of `stream` once, sorted by length, each with a fixed reference."""
    rows = stream.members
    order = rows[np.argsort(stream.cache.lengths(rows), kind="stable")].tolist()
    return [
        stream.batch(part, f"{stream.config.seed} 0 {number}", stream.position)
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
