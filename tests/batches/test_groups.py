"""The stream over a corpus too large to plan at once: group by group, and nothing is lost."""

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest
import torch
from helpers import made_cache
from torch.utils.data import DataLoader

from kit.base.errors import DamagedFileError
from kit.batches.batching import DataConfig
from kit.batches.code_stream import CodeStream
from kit.batches.lengths import neighbours_waste, wasted

DATA = DataConfig(effective_batch=8, micro_batch=4, sort_window=32)
WAYS = [{}, {"effective_tokens": 500}, {"short_first": 0.5}, {"sort_window": 7}]


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


@pytest.mark.parametrize("over", WAYS)
@pytest.mark.parametrize("count", [73, 150, 301])
def test_every_utterance_exactly_once_an_epoch(over, count):
    s = stream(count=count, **over)
    assert s.groups > 1
    plans = [epoch_of(s, epoch) for epoch in (0, 1, 5)]
    for plan in plans:
        assert sorted(itertools.chain(*plan)) == list(s.members)
        for batch in plan:
            assert sorted(batch, key=s.cache.length) == batch
    assert len({json.dumps(plan) for plan in plans}) == 3
    read = list(itertools.islice(s, len(plans[0]) + len(plans[1])))
    found = [sorted(members(batch)) for batch in read]
    assert found == [sorted(batch) for batch in plans[0] + plans[1]]


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


@pytest.mark.parametrize("over", WAYS)
def test_any_position_resumes_exactly(over):
    whole = list(itertools.islice(stream(**over), 90))
    for at in range(0, 86, 3):
        rest = itertools.islice(stream(whole[at][1], **over), 3)
        assert all(same(x, y) for x, y in zip(rest, whole[at + 1 :]))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_and_ranks_keep_the_order_and_resume_exactly(workers):
    whole = list(itertools.islice(stream(), 50))
    for at in (0, 9, 40):  # the eighth batch is the first group's last
        loader = DataLoader(
            stream(whole[at][1]), batch_size=None, num_workers=workers, collate_fn=lambda x: x
        )
        read = list(itertools.islice(loader, 8))
        assert all(same(a, b) for a, b in zip(read, whole[at + 1 :], strict=False))
    ranks = [list(itertools.islice(stream(rank=r, world=3), 50)) for r in range(3)]
    for batch, *parts in zip(whole, *ranks, strict=True):
        assert sorted(members(batch)) == sorted(itertools.chain(*map(members, parts)))
        assert {json.dumps(part[1]) for part in parts} == {json.dumps(batch[1])}
    assert all(same(a, b) for a, b in zip(stream(ranks[1][20][1]), whole[21:24]))


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
    assert stream({"epoch": 0, "batch": 4}).position["group"] == 0  # of an early version
    monkeypatch.setattr("kit.batches.batching.GROUP_ROWS", 64)
    early = {"epoch": 0, "batch": 4}
    for position in (dict(one, corpus=grouped["corpus"]), early):
        with pytest.raises(DamagedFileError, match=refused):
            stream(position)


def test_other_utterances_or_another_order_are_refused():
    position = next(iter(stream()))[1]
    for over in ({"seed": 1}, {"effective_batch": 4}, {"sort_window": 8}):
        with pytest.raises(DamagedFileError, match="of other batches"):
            stream(position, **over)
    with pytest.raises(DamagedFileError, match="of other utterances"):
        stream(position, count=302)
    with pytest.raises(DamagedFileError, match="of other utterances"):
        CodeStream(cache(), "held_out", DATA, keep, position)


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_rehearsal_is_spread_over_the_groups_and_every_row_comes_as_often(share):
    s = stream(rehearsal=share)
    seen = []
    for epoch in range(5):
        plan = epoch_of(s, epoch)
        found = [i for i in itertools.chain(*plan) if i in s.rehearsed]
        assert sorted(i for i in itertools.chain(*plan) if i not in s.rehearsed) == list(s.members)
        assert len(found) == s.rehearsal_rows_per_epoch
        seen += found
    times = [seen.count(i) for i in s.rehearsed]
    assert max(times) - min(times) <= 1
    counts = [len(s.rehearsed_in(2, group)) for group in range(s.groups)]
    assert max(counts) - min(counts) <= 1
    whole = list(itertools.islice(stream(rehearsal=share), 60))
    rest = itertools.islice(stream(whole[37][1], rehearsal=share), 5)
    assert all(same(a, b) for a, b in zip(rest, whole[38:]))


def test_short_first_sorts_the_first_group_alone():
    s, plain = stream(short_first=1.0), stream()
    shortest = [s.cache.length(batch[0]) for batch in s.plan(0, 0)]
    assert shortest == sorted(shortest)
    assert [s.plan(0, 1), s.plan(1, 0)] == [plain.plan(0, 1), plain.plan(1, 0)]
