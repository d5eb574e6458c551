"""Which utterances go together: every one once, within the budget, with little padding."""

import itertools
import random
import re

import numpy as np
import pytest

from kit.base.errors import KitError
from kit.batches import batching
from kit.batches.batching import padding_waste, passes, plan_batches
from kit.settings import DataConfig


def config(**over) -> DataConfig:
    return DataConfig(**{"effective_batch": 8, "micro_batch": 4, "sort_window": 32} | over)


def toy_lengths(count=91, seed=7) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(5, 80) for _ in range(count)]


@pytest.mark.parametrize(
    "over", [{}, {"micro_batch": 2}, {"sort_window": 10_000}, {"short_first": True}]
)
@pytest.mark.parametrize("count", [1, 32, 33, 200])
@pytest.mark.parametrize("epoch", [0, 3])
def test_every_utterance_exactly_once_an_epoch(over, count, epoch):
    lengths, c = toy_lengths(count), config(**over)
    batches = plan_batches(lengths, c, epoch)
    assert sorted(itertools.chain(*batches)) == list(range(count))
    assert sorted(itertools.chain(*passes(lengths, c, epoch))) == list(range(count))
    assert batches == plan_batches(lengths, c, epoch)
    assert all([lengths[i] for i in b] == sorted(lengths[i] for i in b) for b in batches)


WRONG = [("micro_batch", 5, r"must divide .*\(8\)"), ("micro_batch", 0, "must be 1 or more")]
WRONG += [("sort_window", 0, ""), ("max_cache_gib", 0.0, "")]
WRONG += [("grid_lengths", (64, 32), ".*from short to long")]


@pytest.mark.parametrize(("field", "value", "fix"), WRONG)
def test_settings_that_cannot_be_are_named(field, value, fix):
    with pytest.raises(KitError, match=rf"{field} = {re.escape(str(value))}: {fix}"):
        config(**{field: value})


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_share_of_the_first_epoch_comes_short_first_and_the_rest_in_any_order(share):
    lengths, part = toy_lengths(400), config(short_first=share)
    shortest = [lengths[b[0]] for b in plan_batches(lengths, part, 0)]
    first = round(share * len(shortest))
    assert shortest[:first] == sorted(shortest)[:first]
    assert share == 1.0 or shortest[first:] != sorted(shortest[first:])
    assert sorted(i for batch in plan_batches(lengths, part, 0) for i in batch) == list(range(400))
    assert plan_batches(lengths, part, 1) == plan_batches(lengths, config(), 1)


def test_no_other_lengths_make_fewer_cells():
    lengths = np.random.default_rng(1).integers(3, 90, 200).tolist()
    wanted = sorted({-(-n // 8) * 8 for n in lengths})
    grids = itertools.islice(batching.best_grids(np.bincount(lengths)), 4)
    for shapes, (grid, cells) in enumerate(grids, 1):
        made = {}
        for some in itertools.combinations(wanted[:-1], shapes - 1):
            other = (*some, wanted[-1])
            made[other] = sum(min(n for n in other if n >= length) for length in lengths)
        assert cells == made[grid] == min(made.values())


def test_padding_is_counted_and_that_of_speech_is_little():
    spread = np.log(1 + (2.5 / 5) ** 2)  # of seconds that are log-normal, mean 5 and spread 2.5
    seconds = np.random.default_rng(0).lognormal(np.log(5) - spread / 2, spread**0.5, 10_007)
    lengths = [round(s * (21.5 + 7)) + 6 for s in seconds]  # codes and text ids a second
    waste = padding_waste(lengths, DataConfig(effective_batch=16, micro_batch=16))
    assert waste["any order"] > 0.45
    assert waste["neighbours in length"] < 0.04
    for grid, cells in (((), 8), ((8,), 16)):
        waste = padding_waste([2, 4], config(grid_lengths=grid))
        assert waste["neighbours in length"] == pytest.approx(1 - 6 / cells)
