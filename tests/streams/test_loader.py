"""Worker processes: the same records, faults and errors as without, and exact going on."""

import copy
import itertools
import json
import multiprocessing
import os
import random
import signal

import pytest
import torch
from test_source import SMALL, lines_file, mix, stream

from kit.base.config import ConfigError
from kit.streams.file import StreamError
from kit.streams.lines import JsonLines, TextLines
from kit.streams.loader import Loader, LoaderConfig, Shares
from kit.streams.position import StreamConfig


def loader(path, workers: int, shuffle: bool = True, batch: int = 16, **over) -> Loader:
    return Loader(stream(path, shuffle=shuffle, **over), LoaderConfig(batch=batch, workers=workers))


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # small machines


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_ranks_and_workers_together_read_the_file_once(tmp_path, workers):
    path, lines = lines_file(tmp_path, 1007)
    loaders = [loader(path, workers, ranks=2, rank=rank) for rank in range(2)]
    batches = [batch for one in loaders for batch in one]
    assert sorted(itertools.chain(*batches)) == sorted(lines)
    assert max(map(len, batches)) == 16


@pytest.mark.parametrize("count", [0, 1, 7])
def test_more_workers_than_groups(tmp_path, count):
    path, lines = lines_file(tmp_path, count)
    assert list(itertools.chain(*loader(path, 3))) == lines or count == 7
    assert sorted(itertools.chain(*loader(path, 3))) == sorted(lines)


def resume_exactly(path, kill_points: int, **how) -> None:
    whole = list(loader(path, **how))
    for stop in random.Random(7).sample(range(len(whole) + 1), min(kill_points, len(whole))):
        first, second = loader(path, **how), loader(path, **how)
        seen = list(itertools.islice(first, stop))
        state = json.loads(json.dumps(first.state_dict()))
        assert len(json.dumps(state)) < 1000
        second.load_state_dict(state)
        assert seen + list(second) == whole
        assert second.state_dict() == first.state_dict() or stop < len(whole)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_going_on_is_exact_without_workers(tmp_path, rank, shuffle):
    path, _ = lines_file(tmp_path, 1007)
    resume_exactly(path, 50, workers=0, shuffle=shuffle, ranks=2, rank=rank)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers, ranks", [(1, 1), (2, 2), (3, 1), (3, 2)])
def test_going_on_is_exact_with_workers(tmp_path, workers, ranks, shuffle):
    """Workers take turns; some have ended while others go on."""
    path, _ = lines_file(tmp_path, 607)
    resume_exactly(path, 4, workers=workers, shuffle=shuffle, ranks=ranks, rank=ranks - 1)


@pytest.mark.parametrize("workers, ranks", [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_going_on_is_exact_at_every_batch(tmp_path, workers, ranks, shuffle, monkeypatch):
    """The same with the workers' shares read in this process: all stops in little time."""
    monkeypatch.setattr(Loader, "_parts", parts_in_this_process)
    path, _ = lines_file(tmp_path, 607)
    resume_exactly(path, 50, workers=workers, shuffle=shuffle, ranks=ranks, rank=ranks - 1, batch=9)


def parts_in_this_process(self):
    """What a DataLoader does: ask the workers in turn, and leave out those that have ended."""

    def of_worker(number):
        shares = Shares(copy.deepcopy(self.source), self.config, list(self._places), self._next)
        shares.worker = lambda: number
        return iter(shares)

    active = [of_worker(number) for number in range(self.shares)]
    while active:
        for one in list(active):
            part = next(one, None)
            if part is None:
                active.remove(one)
            else:
                yield part


def test_an_epoch_after_going_on_is_whole(tmp_path):
    path, lines = lines_file(tmp_path, 300)
    first = loader(path, 2)
    next(iter(first))
    second = loader(path, 2)
    second.load_state_dict(first.state_dict())
    second.set_epoch(0)
    assert len(list(itertools.chain(*second))) == len(lines) - 16
    second.set_epoch(1)
    assert sorted(itertools.chain(*second)) == sorted(lines)


def test_a_mix_goes_through_workers(tmp_path):
    whole = list(Loader(mix(tmp_path), LoaderConfig(batch=50, workers=2)))
    assert sum(map(len, whole)) == 1240
    first, second = (Loader(mix(tmp_path), LoaderConfig(batch=50, workers=2)) for _ in range(2))
    seen = list(itertools.islice(first, 9))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen + list(second) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_records_travel_as_they_are(tmp_path, workers):
    odd = ["", "a\rb", "\u2028", "😀", "ሰላም", "\t", *"xy" * 20]
    text, table = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("\n".join(odd), encoding="utf-8", newline="")
    table.write_text("".join(json.dumps({"text": line}) + "\n" for line in odd))
    how = LoaderConfig(batch=1000, workers=workers)
    assert sorted(itertools.chain(*Loader(TextLines(text), how))) == sorted(odd)
    found = [record["text"] for batch in Loader(JsonLines(table), how) for record in batch]
    assert sorted(found) == sorted(odd)


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_arrive_as_they_are(tmp_path, workers):
    path, _ = lines_file(tmp_path, 300)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff\n")
    with pytest.raises(StreamError) as error:
        list(loader(path, workers))
    assert str(error.value).startswith(f"{path}, line 300, byte ")
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_vanished_file_is_told(tmp_path, workers):
    path, _ = lines_file(tmp_path, 300)
    source = loader(path, workers)
    path.unlink()
    with pytest.raises(StreamError, match=r"lines\.txt cannot be read.*mounted"):
        list(source)


@pytest.mark.parametrize("workers", [0, 2])
def test_faults_reach_the_function_that_asked_for_them(tmp_path, workers):
    path, _ = lines_file(tmp_path, 300)
    path.write_bytes(path.read_bytes().replace(b"7 ", b"\xff "))
    faults = []
    source = TextLines(path, StreamConfig(**SMALL), bad=faults.append)
    records = list(itertools.chain(*Loader(source, LoaderConfig(batch=16, workers=workers))))
    assert len(faults) == 30 and len(records) == 270
    assert len({fault.offset for fault in faults}) == 30


def test_another_number_of_workers_or_ranks_is_refused(tmp_path):
    path, _ = lines_file(tmp_path, 300)
    state = loader(path, 2).state_dict()
    with pytest.raises(StreamError, match=r"workers = 2, this stream has 3\. Use as many"):
        loader(path, 3).load_state_dict(state)
    with pytest.raises(StreamError, match="as many ranks"):
        loader(path, 2, ranks=2).load_state_dict(state)
    with pytest.raises(StreamError, match="seed"):
        loader(path, 2, seed=4).load_state_dict(state)
    loader(path, 1).load_state_dict(loader(path, 0).state_dict())  # the same share


def test_a_plain_dataloader_reads_all_but_may_not_go_on(tmp_path):
    path, lines = lines_file(tmp_path, 300)
    source = stream(path, shuffle=True)
    plain = torch.utils.data.DataLoader(source, batch_size=None, num_workers=2)
    assert sorted(plain) == sorted(lines)
    list(itertools.islice(source, 50))
    source.load_state_dict(source.state_dict())
    with pytest.raises(StreamError, match=r"`Loader` \(kit\.streams\.loader\)"):
        list(plain)


def test_training_draws_the_same_random_numbers_with_workers(tmp_path):
    path, _ = lines_file(tmp_path, 50)
    before = torch.get_rng_state()
    list(loader(path, 2))
    assert torch.equal(before, torch.get_rng_state())


def test_an_interrupt_of_the_whole_terminal_leaves_the_workers_at_work(tmp_path):
    path, lines = lines_file(tmp_path, 3000)
    parts = iter(loader(path, 2))
    seen = [*next(parts), *next(parts)]  # both are at work
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGINT)
    for part in parts:
        seen += part
    assert sorted(seen) == sorted(lines)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="batch = 0"):
        LoaderConfig(batch=0)
