"""Plan which utterances go through the model together, from their lengths alone.

`plan_batches` plans the effective batches of an epoch; `chunks` of `micro_batch` rows are their
forward passes. Compiled models and CUDA graphs want few, fixed lengths: `padding_lengths` chooses
them.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np

from kit.settings import DataConfig

EXTRA_TOKENS = 6  # of a row beside text ids and codes: START, STOP, START and three times STOP
LENGTH_MULTIPLE = 8  # of fixed lengths, in tokens
MAX_PADDING = 0.04  # share of tokens that fixed lengths may add


def chunks(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[i : i + size] for i in range(0, len(items), size))


def plan_batches(lengths: Sequence[int], config: DataConfig, epoch: int) -> list[list[int]]:
    """Return the effective batches of `epoch`: lists of indices into `lengths`, from short to long.

    A batch is padded to its longest row, so like lengths go together: an epoch is shuffled, sorted
    a window at a time and split into batches, which are shuffled.
    """
    rng = random.Random(f"{config.seed} {epoch}")
    order = rng.sample(range(len(lengths)), len(lengths))
    batches = []
    for window in chunks(order, config.sort_window):
        batches += chunks(sorted(window, key=lengths.__getitem__), config.effective_batch)
    rng.shuffle(batches)
    if config.short_first and epoch == 0:
        batches.sort(key=lambda batch: lengths[batch[0]])
        first = round(config.short_first * len(batches))
        rest = batches[first:]
        rng.shuffle(rest)
        batches[first:] = rest
    return batches


def padded(length: int, config: DataConfig) -> int:
    """Return the tokens that a batch with a longest row of `length` is padded to."""
    multiple = -(-length // config.length_multiple) * config.length_multiple
    return next((n for n in config.grid_lengths if n >= length), multiple)


def passes(lengths: Sequence[int], config: DataConfig, epoch: int = 0) -> list[list[int]]:
    """Return every forward pass of an epoch, as indices into `lengths`."""
    batches = plan_batches(lengths, config, epoch)
    return [part for batch in batches for part in chunks(batch, config.micro_batch)]


def wasted(parts: list[list[int]], lengths: Sequence[int], config: DataConfig) -> float:
    """Return the share of padding when each of `parts` is a padded batch."""
    cells = sum(len(part) * padded(max(lengths[i] for i in part), config) for part in parts)
    return 1 - sum(lengths[i] for part in parts for i in part) / cells


def padding_waste(lengths: Sequence[int], config: DataConfig) -> dict[str, float]:
    """Return the share of padding with rows in any order, and sorted by length."""
    order = random.Random(config.seed).sample(range(len(lengths)), len(lengths))
    return {
        "any order": wasted(list(chunks(order, config.micro_batch)), lengths, config),
        "neighbours in length": wasted(passes(lengths, config), lengths, config),
    }


def padding_lengths(histogram: np.ndarray) -> tuple[int, ...]:
    """Return the fewest lengths, multiples of LENGTH_MULTIPLE, that add at most MAX_PADDING.

    `histogram` counts the rows with 0, 1, 2... tokens.
    """
    max_cells = (1 + MAX_PADDING) * int(histogram @ np.arange(len(histogram)))
    for grid, cells in best_grids(histogram):
        if cells <= max_cells:
            return grid
    return grid  # nothing adds less


def best_grids(histogram: np.ndarray) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the best one, two, ... row lengths and their padded tokens, while these decrease."""
    lengths = np.flatnonzero(histogram)
    candidates = np.unique(-(-lengths // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)  # (W,)
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
