"""The stream over a corpus too large to plan at once: group by group, and nothing is lost."""

import dataclasses
import hashlib
import itertools
import json
import random

import numpy as np
import pytest
import torch
from helpers import made_cache

from kit.base.errors import DamagedFileError
from kit.batches.batching import (
    GROUP_ROWS,
    DataConfig,
    drawn,
    group_bounds,
    group_count,
    neighbours_waste,
    permuted,
    wasted,
)
from kit.batches.code_stream import CodeStream

DATA = DataConfig(effective_batch=8, micro_batch=4, sort_window=32)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr("kit.batches.batching.GROUP_ROWS", 64)


def keep(parts, position):
    return parts, position


def cache(count: int = 301, rehearsed: int = 0):
    rng = random.Random(7)
    splits = ["train" if i % 10 else "held_out" for i in range(count)]
    rows = [{"id": f"u{i}", "speaker": f"v{i % 3}", "split": s} for i, s in enumerate(splits)]
    codes = [np.full(rng.randint(5, 60), i, np.int32) for i in range(count)]
    texts = [np.arange(rng.randint(3, 20), dtype=np.int32) for _ in range(count)]
    references = [np.full((2, 3), i, np.float16) for i in range(count)]
    made = made_cache(rows, texts, codes, references)
    spoken = [np.full(9 + i, count + i, np.int32) for i in range(rehearsed)]
    made.add_rehearsal([f"v{i % 2}" for i in range(rehearsed)], spoken, spoken)
    return made


def stream(position=None, rank=0, world=1, count=301, rehearsal=0.0, **over) -> CodeStream:
    config = dataclasses.replace(DATA, **over)
    made = cache(count, rehearsed=40 if rehearsal else 0)
    return CodeStream(
        made, "train", config, keep, position, rank=rank, world=world, rehearsal=rehearsal
    )


def members(batch) -> list[int]:
    return [codes[0] for part in batch[0] for codes in part[1]]


def same(a, b) -> bool:
    parts = zip(a[0], b[0], strict=True)
    return a[1] == b[1] and all(x[:2] == y[:2] and torch.equal(x[2], y[2]) for x, y in parts)


def epoch_of(s: CodeStream, epoch: int) -> list[list[int]]:
    return [batch for group in range(s.groups) for batch in s.plan(epoch, group)]


def test_a_group_is_drawn_from_the_whole_corpus_in_each_epoch():
    s = stream()
    groups = [{i for batch in s.plan(e, g) for i in batch} for e in (0, 1) for g in (0, 1)]
    assert all(min(group) < 60 and max(group) > 240 for group in groups)
    assert 5 < len(groups[0] & groups[2]) < 35


def test_neighbours_in_length_stay_together():
    s = stream(count=1201)
    lengths = s.lengths_of(range(1201)).tolist()
    planned = [batch[at : at + 4] for batch in epoch_of(s, 0) for at in range(0, len(batch), 4)]
    assert wasted(planned, lengths, DATA) < 1.15 * neighbours_waste(s.lengths, DATA)


def test_a_position_is_a_few_numbers():
    s = stream()
    positions = [batch[1] for batch in itertools.islice(s, s.batches_an_epoch)]
    groups = [position["group"] for position in positions]
    assert groups == [*sorted(groups[:-1]), 0] and positions[-1]["epoch"] == 1
    assert all(len(json.dumps(position)) < 200 for position in positions)
    assert s.state_dict() == positions[-1]


@pytest.mark.parametrize("count", [73, 150, 301])
@pytest.mark.parametrize("over", [{}, {"sort_window": 7}, {"rehearsal": 0.2}])
def test_batches_of_an_epoch_are_known_without_planning_it(count, over):
    s = stream(count=count, **over)
    assert s.batches_an_epoch == len(epoch_of(s, 0))
    s = stream(count=count, effective_tokens=500, **over)
    assert s.batches_an_epoch == pytest.approx(len(epoch_of(s, 0)), rel=0.15)


def test_positions_of_one_group_and_of_several_are_not_taken_for_each_other(monkeypatch):
    grouped = next(iter(stream()))[1]
    monkeypatch.setattr("kit.batches.batching.GROUP_ROWS", 1000)
    one = next(iter(stream()))[1]
    refused = r"of other batches \(seed, sizes, sorting, rehearsal\).*giving no position"
    with pytest.raises(DamagedFileError, match="of other"):
        stream(grouped)
    monkeypatch.setattr("kit.batches.batching.GROUP_ROWS", 64)
    with pytest.raises(DamagedFileError, match=refused):
        stream(dict(one, corpus=grouped["corpus"]))


def test_short_first_sorts_the_first_group_alone():
    s, plain = stream(short_first=1.0), stream()
    shortest = [s.cache.length(batch[0]) for batch in s.plan(0, 0)]
    assert shortest == sorted(shortest)
    assert [s.plan(0, 1), s.plan(1, 0)] == [plain.plan(0, 1), plain.plan(1, 0)]


# --- a random permutation that nobody writes down --------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 257, 1000, 4097, 70_001])
def test_every_number_comes_up_once(count):
    found = permuted(np.arange(count), count, "0 1")
    assert np.array_equal(np.sort(found), np.arange(count))


def test_a_part_costs_only_itself():
    whole = permuted(np.arange(5000), 5000, "k")
    some = np.array([4999, 17, 17, 0])
    assert permuted(some, 5000, "k").tolist() == whole[some].tolist()
    far = permuted(np.arange(30_000_000 - 5, 30_000_000), 30_000_000, "k")
    assert len(set(far.tolist())) == 5 and far.max() < 30_000_000


@pytest.mark.parametrize("count, groups", [(10, 3), (1000, 7), (999, 1), (5, 5)])
def test_groups_share_all_out_evenly(count, groups):
    found = [drawn(count, group, groups, "k") for group in range(groups)]
    assert sorted(np.concatenate(found).tolist()) == list(range(count))
    sizes = [len(group) for group in found]
    assert max(sizes) - min(sizes) <= 1
    assert group_bounds(count, groups - 1, groups)[1] == count


def test_there_are_as_few_groups_as_can_be(monkeypatch):
    monkeypatch.setattr("kit.batches.batching.GROUP_ROWS", GROUP_ROWS)
    counts = [group_count(rows) for rows in (1, GROUP_ROWS, GROUP_ROWS + 1, 30_000_000)]
    assert counts == [1, 1, 2, 229]


def test_keys_and_neighbours_have_nothing_to_do_with_each_other():
    count = 100_003
    one, other = (permuted(np.arange(count), count, key) for key in ("0 0", "0 1"))
    assert (one == other).sum() < 10
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.02
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(one, np.arange(count))[0, 1]) < 0.02


def test_a_group_is_a_fair_draw():
    # Of each hundredth of the corpus a group of a tenth has about a tenth.
    group = drawn(100_000, 3, 10, "7 2 groups")
    found = np.bincount(group // 1000, minlength=100)
    assert found.sum() == 10_000
    chi_square = ((found - 100) ** 2 / 90).sum()  # 99 degrees of freedom: mean 99, deviation 14
    assert 50 < chi_square < 170


def test_the_order_of_a_run_never_changes_with_the_kit():
    found = drawn(1_000_003, 2, 8, "3 1 groups").astype("<i8").tobytes()
    assert hashlib.sha256(found).hexdigest()[:16] == "5057bf5f010a399e"
