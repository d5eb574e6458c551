"""Batches made ahead in order, by a thread that ends; a batch split into smaller passes."""

import dataclasses
import itertools
import threading
import time

import pytest
import torch
from helpers import (
    GPT,
    TRAIN,
    effective_batch,
    random_rows,
    tiny_session,
    train_in,
    until,
)

from kit.model.sequence import pack
from kit.model.weights import load_model
from kit.training.loop import cut, split_batch
from kit.training.switches import Applied, prefetched


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


def until_none() -> None:
    """No thread is left behind."""
    until(lambda: not threads())


def test_everything_comes_once_and_in_order():
    assert list(prefetched(range(100))) == list(range(100))
    assert list(prefetched([])) == []
    until_none()


def test_only_so_many_are_made_ahead_and_closing_ends_the_thread():
    made = []
    stream = prefetched((made.append(i) or i for i in itertools.count()), count=3)
    assert next(stream) == 0
    time.sleep(0.3)
    assert len(made) <= 5, "one taken, three waiting, one in the maker's hands"
    stream.close()
    until_none()


def test_an_error_in_the_making_arrives_where_its_batch_would_have():
    def broken():
        yield 1
        raise ValueError("The shard is damaged.")

    stream = prefetched(broken())
    assert next(stream) == 1
    with pytest.raises(ValueError, match="shard is damaged"):
        next(stream)
    until_none()


def test_batches_are_made_while_the_step_waits():
    """As on a GPU: the step sleeps in the driver, the next batch is made meanwhile."""
    made = threading.Semaphore(0)

    def counted():
        for i in range(3):
            yield i
            made.release()  # asked for the one behind i

    stream = prefetched(counted())
    assert next(stream) == 0
    assert made.acquire(timeout=60), "nothing was made while the step had the first"
    assert list(stream) == [1, 2]


def test_a_run_whose_batches_are_made_ahead_is_the_same_run(tmp_path, monkeypatch):
    """Stopped in the middle, too: what was made ahead is made again."""
    train_in(str(tmp_path / "plain"))
    really_on = Applied.on
    monkeypatch.setattr("kit.training.switches.pin", lambda batch: batch)
    monkeypatch.setattr(
        Applied, "on", lambda self, name: name == "pinned_memory" or really_on(self, name)
    )
    stop, session = threading.Event(), tiny_session(tmp_path / "ahead", TRAIN)
    for event in session.run({"ema": True}, stop):
        if event.step == 5:
            stop.set()
    train_in(str(tmp_path / "ahead"))
    until_none()
    for name in ("model-raw.safetensors", "model-ema.safetensors"):
        plain, ahead = (load_model(tmp_path / way / name) for way in ("plain", "ahead"))
        for mine, theirs in zip(ahead.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def same(a, b) -> bool:
    names = [field.name for field in dataclasses.fields(a)]
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in names)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_pieces_are_what_packing_fewer_rows_would_have_given(rows):
    columns = random_rows(GPT, 8, seed=3)
    pieces = split_batch(pack(GPT, *columns), rows)
    wanted = [pack(GPT, *(c[i : i + rows] for c in columns)) for i in range(0, 8, rows)]
    assert len(pieces) == len(wanted) and all(map(same, pieces, wanted))


def test_a_width_that_was_chosen_is_kept():
    columns = random_rows(GPT, 4)
    pieces = split_batch(pack(GPT, *columns, 64), 2)
    wanted = [pack(GPT, *(c[i : i + 2] for c in columns), 64) for i in (0, 2)]
    assert [p.tokens.shape for p in pieces] == [(2, 64)] * 2 and all(map(same, pieces, wanted))


def test_a_batch_that_fits_is_left_as_it_is():
    batch = effective_batch(GPT, random_rows(GPT, 8), parts=2)
    for rows in (0, 4, 9):
        assert all(a is b for a, b in zip(cut(batch, rows), batch.micro, strict=True))
