"""The length report: what limits keep, and that what they refuse is listed, row by row."""

import itertools

import numpy as np
import pytest
from helpers import made_cache

from kit.batches.batching import best_grids
from kit.batches.code_cache import CodeCache, fixed_lengths, length_report


def cache(codes: list[int], texts: list[int], last_split: str = "train") -> CodeCache:
    """A cache of nothing but lengths; the last row is of the split `last_split`."""
    rows = [{"id": f"u{i}", "speaker": "a", "split": "train"} for i in range(len(codes))]
    rows[-1]["split"] = last_split
    return made_cache(rows, *([np.zeros(n, np.int32) for n in column] for column in (texts, codes)))


def report(codes, texts, **over):
    return length_report(cache(codes, texts), codes_per_s=28.7, **over)


def test_limits_keep_what_they_promise_and_count_the_rest():
    found = report([50] * 997 + [170, 171, 900], [15] * 1000)
    assert found.limit_codes == 64
    assert found.limit_tokens == 128  # 64 codes, 15 text ids and 6 more, in steps of 64
    assert (found.beyond, found.beyond_share) == (3, 0.003)
    assert report([50] * 300, [15] * 299 + [400]).beyond == 1, "a long text with little sound"


def test_at_least_so_many_percent_are_kept():
    rng = np.random.default_rng(0)
    codes, texts = (np.maximum(1, rng.lognormal(4, 0.6, 3000)).astype(int) for _ in range(2))
    found = report(codes.tolist(), texts.tolist())
    assert found.limit_codes % 64 == 0 and found.limit_tokens % 64 == 0
    assert (codes <= found.limit_codes).mean() >= 0.995
    over = (codes > found.limit_codes) | (codes + texts + 6 > found.limit_tokens)
    assert found.beyond == over.sum()


def test_the_report_has_a_line_for_every_quantity():
    lines = report([10, 20, 30], [1, 2, 3]).percentiles
    assert list(lines) == ["text ids", "codes", "tokens", "seconds"]
    assert lines["codes"].startswith("50 %: 20,") and lines["codes"].endswith("100 %: 30")


def test_a_percentile_is_a_length_that_occurs():
    assert percentile(np.array([1, 2, 3, 400]), 75) == 400


def test_a_split_nobody_has_is_reported():
    with pytest.raises(ValueError, match="split `test`"):
        report([1], [1], split="test")


def best_grid(lengths: list[int], shapes: int, multiple: int) -> tuple[int, ...]:
    """The best of so many lengths, or of as many as save anything."""
    return list(itertools.islice(best_grids(np.bincount(lengths), multiple), shapes))[-1][0]


def test_grid_lengths_are_the_best_there_are():
    lengths = [10] * 90 + [100] * 9 + [250]
    assert best_grid(lengths, shapes=1, multiple=64) == (256,)
    assert best_grid(lengths, shapes=2, multiple=64) == (64, 256)
    assert best_grid(lengths, shapes=3, multiple=64) == (64, 128, 256)
    assert best_grid(lengths, shapes=9, multiple=64) == (64, 128, 256)


def test_no_other_lengths_make_fewer_cells():
    lengths = np.random.default_rng(1).integers(3, 90, 200).tolist()
    wanted = sorted({-(-n // 8) * 8 for n in lengths})
    grids = itertools.islice(best_grids(np.bincount(lengths), 8), 4)
    for shapes, (grid, cells) in enumerate(grids, 1):
        others = itertools.combinations(wanted[:-1], shapes - 1)
        made = {(*o, wanted[-1]): 0 for o in others}
        for other in made:
            made[other] = sum(min(n for n in other if n >= length) for length in lengths)
        assert cells == made[grid] == min(made.values())


def test_fixed_lengths_hold_the_rows_of_every_split():
    made = cache([10] * 50 + [30] * 50 + [200], [5] * 101, last_split="held_out")
    assert fixed_lengths(made) == (24, 48, 216)


def test_fixed_lengths_are_few_and_cost_little():
    rng = np.random.default_rng(0)
    made = cache(rng.integers(60, 500, 2000).tolist(), rng.integers(20, 60, 2000).tolist())
    tokens = [made.length(i) + 6 for i in range(2000)]
    fixed = fixed_lengths(made)
    assert all(length % 8 == 0 for length in fixed) and fixed[-1] >= max(tokens)

    def padding(grid: tuple) -> float:
        return sum(min(n for n in grid if n >= length) for length in tokens) / sum(tokens) - 1

    assert padding(fixed) <= 0.04 < padding(best_grid(tokens, len(fixed) - 1, 8))


def test_a_wide_spread_still_ends_at_its_longest():
    grid = best_grid(list(range(1, 5000)), shapes=3, multiple=8)
    assert grid[-1] == 5000 and len(grid) == 3 and list(grid) == sorted(grid)
