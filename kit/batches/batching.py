"""Plan which utterances go through the model together, from their lengths alone.

`plan_batches` plans the effective batches of an epoch; `micro_batches` splits them into forward
passes. A large corpus is planned in groups of up to GROUP_ROWS utterances, each `drawn` at random
from all of them. Compiled models and CUDA graphs want few, fixed lengths: `padding_lengths` chooses
them.
"""

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Sequence

import numpy as np

from kit.settings import DataConfig

EXTRA_TOKENS = 6  # of a row beside text ids and codes: START, STOP, START and three times STOP
GROUP_ROWS = 2**17  # utterances; changing it changes the order of every larger corpus
LENGTH_MULTIPLE = 8  # of fixed lengths, in tokens
MAX_PADDING = 0.04  # share of tokens that fixed lengths may add


def chunks(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[i : i + size] for i in range(0, len(items), size))


def plan_batches(
    lengths: Sequence[int], config: DataConfig, epoch: int, group: int = 0, groups: int = 1
) -> list[list[int]]:
    """Return the effective batches of `epoch`: lists of indices into `lengths`, from short to long.

    A batch is padded to its longest row, so like lengths go together: an epoch is shuffled, sorted
    a window at a time and split into batches (of so many utterances or padded tokens), which are
    shuffled. Where an epoch has several `groups`, `lengths` are those of `group`.
    """
    rng = random.Random(order_key(config, epoch, group, groups))
    order = rng.sample(range(len(lengths)), len(lengths))
    batches = []
    unfilled = []
    for window in chunks(order, config.sort_window):
        by_length = sorted([*unfilled, *window], key=lengths.__getitem__)
        if config.effective_tokens:
            batches += split_by_tokens(by_length, lengths, config.effective_tokens)
            unfilled = batches.pop()  # joins the next window
        else:
            batches += chunks(by_length, config.effective_batch)
    if unfilled:
        batches.append(unfilled)
    rng.shuffle(batches)
    if config.short_first and epoch == 0 and group == 0:
        batches.sort(key=lambda batch: lengths[batch[0]])
        first = round(config.short_first * len(batches))
        rest = batches[first:]
        rng.shuffle(rest)
        batches[first:] = rest
    return batches


def order_key(config: DataConfig, epoch: int, group: int, groups: int) -> str:
    """Return the seed of the order of a group of an epoch."""
    if groups == 1:  # as before there were groups, so that older runs resume in their order
        return f"{config.seed} {epoch}"
    return f"{config.seed} {epoch} {group}/{groups}"


def micro_batches(batch: list, lengths: Sequence[int], config: DataConfig) -> list[list]:
    """Split an effective batch (indices into `lengths`, short to long) into forward passes."""
    if config.effective_tokens:
        return split_by_tokens(batch, lengths, config.micro_tokens)
    return list(chunks(batch, config.micro_batch))


def split_by_tokens(order: list, lengths: Sequence[int], budget_tokens: int) -> list[list]:
    """Group neighbours in `order` so that rows x longest row stays within the budget.

    A longer utterance gets a group of its own.
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


def padded(length: int, config: DataConfig) -> int:
    """Return the tokens that a batch with a longest row of `length` is padded to."""
    multiple = -(-length // config.length_multiple) * config.length_multiple
    return next((n for n in config.grid_lengths if n >= length), multiple)


def passes(lengths: Sequence[int], config: DataConfig, epoch: int = 0) -> list[list[int]]:
    """Return every forward pass of an epoch, as indices into `lengths`."""
    batches = plan_batches(lengths, config, epoch)
    return [part for batch in batches for part in micro_batches(batch, lengths, config)]


def wasted(parts: list[list[int]], lengths: Sequence[int], config: DataConfig) -> float:
    """Return the share of padding when each of `parts` is a padded batch."""
    cells = sum(len(part) * padded(max(lengths[i] for i in part), config) for part in parts)
    return 1 - sum(lengths[i] for part in parts for i in part) / cells


def padding_waste(lengths: Sequence[int], config: DataConfig) -> dict[str, float]:
    """Return the share of padding for every way to form batches."""
    average = -(-config.effective_batch * sum(lengths) // len(lengths))
    budget = dataclasses.replace(config, effective_tokens=config.effective_tokens or average)
    order = random.Random(config.seed).sample(range(len(lengths)), len(lengths))
    return {
        "any order": wasted(list(chunks(order, config.micro_batch)), lengths, config),
        "neighbours in length": neighbours_waste(lengths, config),
        "token budget": wasted(passes(lengths, budget), lengths, config),
    }


def neighbours_waste(lengths: Sequence[int], config: DataConfig) -> float:
    """Return the share of padding where a pass has `micro_batch` rows of like length."""
    return wasted(passes(lengths, dataclasses.replace(config, effective_tokens=0)), lengths, config)


def group_count(rows: int) -> int:
    return max(1, -(-rows // GROUP_ROWS))


def group_bounds(count: int, group: int, groups: int) -> tuple[int, int]:
    """Return start and end of part `group` when `count` items are split into `groups` parts."""
    return group * count // groups, (group + 1) * count // groups


def drawn(count: int, group: int, groups: int, key: str) -> np.ndarray:
    """Return the numbers of 0..count-1 that are in `group`, at random by `key`."""
    seed = np.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u4")
    # NumPy keeps the order of RandomState for ever, that of its newer generators not.
    order = np.random.RandomState(seed).permutation(count)
    return order[slice(*group_bounds(count, group, groups))]


def padding_lengths(histogram: np.ndarray) -> tuple[int, ...]:
    """Return the fewest lengths, multiples of LENGTH_MULTIPLE, that add at most MAX_PADDING.

    `histogram` counts the rows with 0, 1, 2... tokens.
    """
    max_cells = (1 + MAX_PADDING) * int(histogram @ np.arange(len(histogram)))
    for grid, cells in best_grids(histogram, LENGTH_MULTIPLE):
        best = grid
        if cells <= max_cells:
            break
    return best


def best_grids(histogram: np.ndarray, multiple: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the best one, two, ... row lengths and their padded tokens, while these decrease."""
    candidates = np.unique(-(-np.flatnonzero(histogram) // multiple) * multiple)  # (W,)
    up_to = histogram.cumsum()
    rows = up_to[np.minimum(candidates, len(up_to) - 1)]  # that each has room for
    grids = [(int(length),) for length in candidates]  # the best that end with each length
    cells = rows * candidates
    while True:  # dynamic programming over the last length but one
        yield grids[-1], int(cells[-1])
        longer = cells[:, None] + (rows - rows[:, None]) * candidates  # (W below, W)
        longer[np.tril_indices(len(candidates))] = np.iinfo(np.int64).max
        below = longer.argmin(axis=0)
        better = longer.min(axis=0) < cells
        if not better[-1]:
            return
        grids = [
            (*grids[i], int(length)) if saves else grid
            for i, length, saves, grid in zip(below, candidates, better, grids)
        ]
        cells = np.minimum(cells, longer.min(axis=0))
