"""Which utterances go through the model together: a pure function of their lengths.

A batch is a grid as wide as its longest row, so like lengths belong together. `plan_batches`
shuffles an epoch (of a large corpus a group of it, see epoch_order), sorts it a window at a time,
cuts it into effective batches and shuffles those: every utterance once, none left out, the same for
the same seed. An effective batch is a number of
utterances, or a number of padded tokens; `micro_batches` cuts it into passes. `padding_waste` says
what each way wastes. Knows lengths alone: no audio, no codes, no file, no model.
"""

import bisect
import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

from kit.base.config import MAX_SEED, require, require_within

EXTRA_TOKENS = 6  # of a row beside text ids and codes: START, STOP, START and three times STOP


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    effective_batch: int = 32  # utterances per optimiser step, however they are split
    micro_batch: int = 32  # utterances per forward pass
    effective_tokens: int = 0  # padded tokens per optimiser step instead; 0: count utterances
    sort_window: int = 1024  # shuffled utterances sorted by length at a time
    short_first: float = 0.0  # share of the first epoch that comes first, from short to long
    # (SortaGrad, Amodei et al. 2016); of a corpus planned in groups, share of the first group
    grid_lengths: tuple = ()  # tokens: pad each grid to the next of these; (): to its longest row
    length_multiple: int = 1  # tokens: without grid_lengths, pad to a multiple of this
    reference_frames: int = 86  # mel frames of the reference clip (86 is a second at 22 050 Hz)
    shard: int = 2000  # utterances per cache file
    max_cache_gib: float = 50.0  # of the folder with the cache; the longest unused goes first
    seed: int = 0

    def __post_init__(self):
        sizes = ("effective_batch", "micro_batch", "sort_window", "reference_frames", "shard")
        for name in (*sizes, "length_multiple"):
            require(getattr(self, name) > 0, self, name, "must be at least 1.")
        require(0 <= self.short_first <= 1, self, "short_first", "a share, from 0 to 1.")
        whole = self.effective_batch % self.micro_batch == 0
        require(
            whole, self, "micro_batch", f"must divide effective_batch ({self.effective_batch})."
        )
        require(self.effective_tokens >= 0, self, "effective_tokens", "must be 0 or more.")
        require(self.max_cache_gib > 0, self, "max_cache_gib", "must be above 0.")
        rising = list(self.grid_lengths) == sorted({*self.grid_lengths})
        require(rising, self, "grid_lengths", "must rise from short to long.")
        require_within(self, 1, 1e6, "grid_lengths", "length_multiple", "reference_frames")
        require_within(self, 1, 1e9, "effective_batch", "micro_batch", "sort_window", "shard")
        require_within(self, 0, 1e9, "effective_tokens", "max_cache_gib")
        require_within(self, 0, MAX_SEED, "seed")

    @property
    def grad_accum(self) -> int:
        return self.effective_batch // self.micro_batch

    @property
    def micro_tokens(self) -> int:
        """Padded tokens per forward pass; 0 where utterances are counted."""
        return self.effective_tokens // self.grad_accum

    def split(self, grad_accum: int) -> "DataConfig":
        """The same effective batch in `grad_accum` passes; KitError when it won't divide."""
        return dataclasses.replace(self, micro_batch=max(1, self.effective_batch // grad_accum))


def chunks(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[i : i + size] for i in range(0, len(items), size))


def plan_batches(
    lengths: Sequence[int], config: DataConfig, epoch: int, group: int = 0, groups: int = 1
) -> list[list[int]]:
    """The effective batches of `epoch` as lists of indices into `lengths`, each index once.

    Where an epoch has several `groups`, `lengths` are those of utterances of `group`. A batch lies
    from short to long. Counting tokens, a window's last and unfilled batch joins the next window,
    so one batch a group is short, and it is none of the many middling ones.
    """
    rng = random.Random(order_key(config, epoch, group, groups))
    order = rng.sample(range(len(lengths)), len(lengths))
    batches = []
    left = []
    for window in chunks(order, config.sort_window):
        groups = effective_batches(
            sorted([*left, *window], key=lengths.__getitem__), lengths, config
        )
        left = groups.pop() if config.effective_tokens else []
        batches += groups
    if left:
        batches.append(left)
    rng.shuffle(batches)
    if config.short_first and epoch == 0 and group == 0:
        batches.sort(key=lambda batch: lengths[batch[0]])
        rest = batches[round(config.short_first * len(batches)) :]
        rng.shuffle(rest)
        batches[len(batches) - len(rest) :] = rest
    return batches


def order_key(config: DataConfig, epoch: int, group: int, groups: int) -> str:
    """What sets the order of a group of an epoch."""
    if groups == 1:  # what it was before there were groups: runs go on in the order they began in
        return f"{config.seed} {epoch}"
    return f"{config.seed} {epoch} {group}/{groups}"


def batches_planned(rows: int, config: DataConfig) -> int:
    """How many batches `plan_batches` makes of `rows` utterances where it counts utterances."""
    windows, left = divmod(rows, config.sort_window)
    of_window = -(-config.sort_window // config.effective_batch)
    return windows * of_window + -(-left // config.effective_batch)


def effective_batches(order: list, lengths: Sequence[int], config: DataConfig) -> list[list]:
    if config.effective_tokens:
        return cut_by_tokens(order, lengths, config.effective_tokens)
    return list(chunks(order, config.effective_batch))


def micro_batches(batch: list, lengths: Sequence[int], config: DataConfig) -> list[list]:
    """An effective batch (indices into `lengths`, short to long) in forward passes."""
    if config.effective_tokens:
        return cut_by_tokens(batch, lengths, config.micro_tokens)
    return list(chunks(batch, config.micro_batch))


def cut_by_tokens(order: list, lengths: Sequence[int], budget_tokens: int) -> list[list]:
    """Neighbours in `order` grouped so that rows x longest row stays within the budget.

    An utterance longer than the budget stands alone: it is neither cut nor left out.
    """
    groups = []
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if groups and (len(groups[-1]) + 1) * longest <= budget_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = lengths[i]
    return groups


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Indices into `lengths`, put together into rows of at most `row_tokens` (best fit decreasing).

    A plan alone. Attention must then be kept from crossing from one utterance into the next, and a
    mask for that costs the fused causal kernels and a square of the row: more than the padding it
    saves, so the model takes one utterance a row. Raises ValueError for one that fits no row.
    """
    if lengths and max(lengths) > row_tokens:
        raise ValueError(
            f"An utterance of {max(lengths)} tokens fits no row of {row_tokens} tokens: raise "
            "`row_tokens`."
        )
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        at = bisect.bisect_left(room, (lengths[i], 0))  # the fullest row that still has room
        if at == len(room):
            rows.append([])
            left = row_tokens
            row = len(rows) - 1
        else:
            left, row = room.pop(at)
        rows[row].append(i)
        bisect.insort(room, (left - lengths[i], row))
    return rows


def padded(length: int, config: DataConfig) -> int:
    """The tokens that a grid with a longest row of `length` is padded to."""
    multiple = -(-length // config.length_multiple) * config.length_multiple
    return next((n for n in config.grid_lengths if n >= length), multiple)


def wasted(parts: list[list[int]], lengths: Sequence[int], config: DataConfig) -> float:
    """The share of padding when each of `parts` is a grid, as wide as `config` pads its longest."""
    cells = sum(len(part) * padded(max(lengths[i] for i in part), config) for part in parts)
    return 1 - sum(lengths[i] for part in parts for i in part) / cells


def padding_waste(
    lengths: Sequence[int], config: DataConfig, row_tokens: int = 1024
) -> dict[str, float]:
    """The share of cells that hold no token, for every way to form batches; nothing is dropped.

    The token budget is the configuration's, or what its utterances hold on average.
    """
    average = -(-config.effective_batch * sum(lengths) // len(lengths))
    budget = dataclasses.replace(config, effective_tokens=config.effective_tokens or average)
    order = random.Random(config.seed).sample(range(len(lengths)), len(lengths))
    row_tokens = max(row_tokens, *lengths)
    packed = []
    for window in chunks(order, config.sort_window):
        packed += pack_rows([lengths[i] for i in window], row_tokens)
    return {
        "any order": wasted(list(chunks(order, config.micro_batch)), lengths, config),
        "neighbours in length": neighbours_waste(lengths, config),
        "token budget": wasted(passes(lengths, budget), lengths, config),
        "packed": 1 - sum(lengths) / (row_tokens * len(packed)),
    }


def neighbours_waste(lengths: Sequence[int], config: DataConfig) -> float:
    """The share of cells without a token where a pass has its number of rows of like length."""
    counted = dataclasses.replace(config, effective_tokens=0)
    return wasted(passes(lengths, counted), lengths, config)


def passes(lengths: Sequence[int], config: DataConfig, epoch: int = 0) -> list[list[int]]:
    """Every forward pass of an epoch, as indices into `lengths`."""
    parts = (
        micro_batches(batch, lengths, config) for batch in plan_batches(lengths, config, epoch)
    )
    return list(itertools.chain.from_iterable(parts))
