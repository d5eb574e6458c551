"""The stream over the code cache: nothing lost, nothing repeated, resumed exactly."""

import dataclasses
import hashlib
import itertools
import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from helpers import CPU, DATA, code_cache, made_cache, real_config
from torch.utils.data import DataLoader

from kit.base.errors import DamagedFileError
from kit.batches.code_cache import CodeCache
from kit.batches.code_stream import CodeStream, loader_workers, validation_batches
from kit.model.sequence import collate
from kit.settings import DataConfig


def keep(parts, place):
    """The parts with lists in place of arrays, which can be compared."""
    plain = []
    for *columns, references, length in parts:
        lists = [[np.asarray(ids).tolist() for ids in column] for column in columns]
        plain.append((*lists, references, length))
    return plain, place


def stream(position=None, split="train", rank=0, world=1, text_dropout=0.0, **over) -> CodeStream:
    config = dataclasses.replace(DATA, **over)
    more = {"rank": rank, "world": world, "text_dropout": text_dropout}
    return CodeStream(code_cache(), split, config, keep, position, **more)


def members(batch) -> list[tuple]:
    """Which utterances a batch holds, by their codes."""
    return [tuple(codes) for part in batch[0] for codes in part[1]]


def toy_cache(count=101) -> CodeCache:
    """Utterances of random length, whose references say which they are."""
    rng = random.Random(7)
    splits = ["train" if i % 10 else "held_out" for i in range(count)]
    rows = [{"id": f"u{i}", "speaker": f"v{i % 3}", "split": s} for i, s in enumerate(splits)]
    codes = [np.arange(rng.randint(5, 60), dtype=np.int32) for _ in range(count)]
    texts = [np.arange(rng.randint(3, 20), dtype=np.int32) for _ in range(count)]
    return made_cache(rows, texts, codes, [np.full((2, 3), i, np.float16) for i in range(count)])


FROZEN = [
    ({}, "86b58efe21452d44", "3af5ea23dbc7e69e"),
    ({"short_first": True}, "cc4a12cf9c701a28", "1c8137047f5baf63"),
    ({"seed": 3}, "48533616bf83056d", "8f4ee276c23624ba"),
]


@pytest.mark.parametrize("over, order, references", FROZEN)
def test_what_a_run_sees_never_changes_with_the_kit(over, order, references):
    # A run started with an earlier version resumes with exactly the batches it would have seen.
    config = DataConfig(effective_batch=8, micro_batch=4, sort_window=32, **over)
    s = CodeStream(toy_cache(), "train", config, keep)
    batches = itertools.islice(s, 25)
    taken = [[int(x) for part in parts for x in part[2][:, 0, 0]] for parts, _ in batches]
    for found, wanted in (([s.plan(e) for e in (0, 1, 5)], order), (taken, references)):
        assert hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] == wanted


def reported(rank=0, world=1, **over) -> dict[tuple, bool]:
    """Of each utterance of an epoch, by its place and codes: whether it comes with its text."""
    taken = stream(rank=rank, world=world, text_dropout=0.25, **over)
    found = {}
    for number, batch in enumerate(itertools.islice(taken, len(taken.plan(0)))):
        for texts, codes, *_ in batch[0]:
            found |= {(number, *code): bool(text) for text, code in zip(texts, codes)}
    return found


def test_some_rows_come_without_their_text_the_same_ones_however_they_are_split():
    whole = reported()
    assert len(whole) == 60 and 0.1 < 1 - sum(whole.values()) / 60 < 0.4
    assert reported(micro_batch=1) == whole
    assert reported(rank=0, world=2) | reported(rank=1, world=2) == whole


def test_rows_without_a_text_change_neither_order_nor_references():
    wanted, found = stream(), stream(text_dropout=0.5)
    assert found.identity == wanted.identity
    for (one, place), (other, its_place) in itertools.islice(zip(found, wanted), 12):
        assert place == its_place
        for mine, theirs in zip(one, other):
            assert mine[1] == theirs[1] and torch.equal(mine[2], theirs[2])
            assert mine[3] == theirs[3], "padded alike: the plan goes by what rows could hold"
            assert all(text in ([], its) for text, its in zip(mine[0], theirs[0]))


@pytest.mark.parametrize("over", [{}, {"sort_window": 7}])
def test_every_utterance_exactly_once_an_epoch_as_planned(over):
    s = stream(**over)
    plans = [s.plan(epoch) for epoch in (0, 1, 7)]
    lengths = s.cache.lengths(range(len(s.cache.rows)))
    for plan in plans:
        assert len(plan) == s.batches_an_epoch
        assert sorted(itertools.chain(*plan)) == list(s.members) and len(s.members) == 60
        assert all(sorted(batch, key=lengths.__getitem__) == batch for batch in plan)
    assert len({json.dumps(plan) for plan in plans}) == 3
    read = list(itertools.islice(s, len(plans[0]) + len(plans[1])))
    wanted = [[tuple(s.cache.codes[i].tolist()) for i in batch] for batch in plans[0] + plans[1]]
    assert [sorted(members(batch)) for batch in read] == [sorted(batch) for batch in wanted]


def same(a, b) -> bool:
    parts = zip(a[0], b[0], strict=True)
    return a[1] == b[1] and all(x[:2] == y[:2] and torch.equal(x[2], y[2]) for x, y in parts)


@pytest.mark.parametrize("over", [{}, {"short_first": True}, {"rank": 0, "world": 2}])
def test_any_position_resumes_exactly(over):
    whole = list(itertools.islice(stream(**over), 20))
    for at in range(18):
        rest = itertools.islice(stream(whole[at][1], **over), 2)
        assert all(same(x, y) for x, y in zip(rest, whole[at + 1 :]))


def identity(batch):
    return batch


def loaded(s: CodeStream, workers: int, count: int) -> list:
    loader = DataLoader(s, batch_size=None, num_workers=workers, collate_fn=identity)
    return list(itertools.islice(loader, count))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.parametrize("over", [{}, {"rank": 1, "world": 2}])
def test_workers_keep_the_order_and_resume_exactly_as_do_others(over):
    whole = list(itertools.islice(stream(**over), 21))
    read = loaded(stream(**over), 2, 21)
    assert all(same(a, b) for a, b in zip(read, whole, strict=True))
    for at in (4, 13):
        rest = loaded(stream(read[at][1], **over), 2, 3)
        assert all(same(a, b) for a, b in zip(rest, whole[at + 1 :]))
    # A run may resume with other workers and ranks.
    rest = loaded(stream(read[4][1]), 1, 5)
    assert all(same(a, b) for a, b in zip(rest, itertools.islice(stream(), 5, 10), strict=True))


@pytest.mark.parametrize("over", [{}, {"micro_batch": 8}])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_together_see_what_one_would(over, world):
    one = list(itertools.islice(stream(**over), 16))
    ranks = [list(itertools.islice(stream(rank=r, world=world, **over), 16)) for r in range(world)]
    for batch, *parts in zip(one, *ranks, strict=True):
        pairs = lambda b: [(c, m.tobytes()) for p in b[0] for c, m in zip(p[1], p[2].numpy())]  # noqa: E731
        assert sorted(pairs(batch)) == sorted(itertools.chain(*map(pairs, parts)))
        assert {json.dumps(part[1]) for part in parts} == {json.dumps(batch[1])}
        sizes = [len(members(part)) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_more_ranks_than_utterances_leave_some_without_any():
    batches = [next(iter(stream(rank=r, world=9))) for r in range(9)]
    assert [len(members(b)) for b in batches] == [1] * len(members(next(iter(stream())))) + [0]


def test_a_position_is_the_place_after_its_batch_as_plain_json():
    whole = list(itertools.islice(stream(), 9))
    positions = (stream().position, whole[0][1], whole[7][1])
    assert [(p["epoch"], p["batch"]) for p in positions] == [(0, 0), (0, 1), (1, 0)]
    assert json.loads(json.dumps(whole[0][1])) == whole[0][1]
    of_an_earlier_kit = whole[4][1] | {"group": 0}
    assert all(same(a, b) for a, b in zip(stream(of_an_earlier_kit), whole[5:]))


def toy_stream(count=101, position=None) -> CodeStream:
    return CodeStream(toy_cache(count), "train", DATA, keep, position)


def test_what_would_lose_or_repeat_utterances_is_refused():
    position, longest = next(iter(stream()))[1], max(stream().lengths)
    refused = [("split `test`", {"split": "test"})]
    facts = rf"1 of 60 utt.*longest has {longest}.*add a length"
    refused.append((facts, {"grid_lengths": (64, longest - 1)}))
    for field in ("seed", "effective_batch", "sort_window"):
        refused.append((r"other batches \(seed, sizes, sorting\)", {field: 4}))
    for facts, over in refused:
        with pytest.raises(DamagedFileError, match=facts):
            stream(position, **over)
    for count, other in ((101, position), (91, next(iter(toy_stream()))[1])):
        with pytest.raises(DamagedFileError, match=r"other utterances.*giving no position"):
            toy_stream(count, other)


def test_another_split_into_passes_and_another_padding_resume():
    whole = list(itertools.islice(stream(), 3))
    s = stream(whole[0][1], micro_batch=2, grid_lengths=(500,), shard=7, max_cache_gib=1.0)
    assert [members(b) for b in itertools.islice(s, 2)] == [members(b) for b in whole[1:]]


def test_a_reference_comes_from_the_same_speaker():
    cache = code_cache()
    speaker_of = {r.tobytes(): row["speaker"] for r, row in zip(cache.references, cache.rows)}
    codes_of = {tuple(c.tolist()): row["speaker"] for c, row in zip(cache.codes, cache.rows)}
    for parts, _ in itertools.islice(stream(), 8):
        for _, codes, cond, _ in parts:
            spoken = [codes_of[tuple(c)] for c in codes]
            assert [speaker_of[m.half().numpy().tobytes()] for m in cond] == spoken


@pytest.mark.parametrize("grid", [(), (100, 200)])
def test_tokens_are_counted_without_the_padding_of_the_few_lengths(grid):
    grid = (*grid, max(stream().lengths))[: 2 * len(grid)]
    config = dataclasses.replace(DATA, grid_lengths=grid)
    s = CodeStream(code_cache(), "train", config, partial(collate, real_config()))
    batches = list(itertools.islice(s, 8))
    widths = {m.tokens.shape[1] for b in batches for m in b.micro}
    assert not grid or (widths <= set(grid) and len(widths) > 1)
    cells = sum(m.tokens.numel() for b in batches for m in b.micro)
    assert sum(b.tokens for b in batches) == sum(s.lengths)  # as planned, START, STOP included
    assert cells > sum(s.lengths)


def test_validation_takes_every_held_out_utterance_once_and_always_alike():
    s = stream(split="held_out")
    batches = validation_batches(s)
    wanted = sorted(tuple(s.cache.codes[i].tolist()) for i in s.members)
    assert sorted(m for b in batches for m in members(b)) == wanted and len(wanted) == 6
    assert all(same(a, b) for a, b in zip(batches, validation_batches(stream(split="held_out"))))


SETTINGS = [  # (cores, GiB, ms a batch, ms a step), workers
    *(((2, 24, 2, 200), 1), ((2, 24, 300, 200), 1), ((8, 6, 500, 200), 1), ((8, 8, 500, 200), 2)),
    *(((8, 16, 500, 200), 4), ((8, 32, 1500, 200), 7), ((32, 64, 1500, 200), 8)),
]


@pytest.mark.parametrize("given, wanted", SETTINGS)
def test_workers_follow_ram_cores_and_what_a_batch_costs(given, wanted):
    cores, ram_gib, batch_ms, step_ms = given
    hw = dataclasses.replace(CPU, cores=cores, ram_bytes=ram_gib * 2**30)
    assert loader_workers(hw, batch_ms / 1000, step_ms / 1000) == wanted


def test_batches_to_time_steps_with_are_as_long_as_all_of_them():
    every = stream()
    mean = sum(map(len, map(every.cache.codes.__getitem__, every.members))) / len(every.plan(0))
    some = every.representative_batches(6, 100)
    codes = [sum(map(len, members(batch))) for batch in some]
    assert len({sum(c) for batch in some for c in members(batch)}) > 6  # not one of them alone
    assert sum(codes) / 6 == pytest.approx(mean, rel=0.1)
