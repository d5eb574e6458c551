"""Groups of an epoch: a random permutation that nobody writes down."""

import hashlib

import numpy as np
import pytest

from kit.batches.batching import GROUP_ROWS, drawn, group_bounds, group_count, permuted


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


def test_there_are_as_few_groups_as_can_be():
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
