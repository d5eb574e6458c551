"""Order, shares and positions: nothing lost, nothing repeated, and the same again after a stop."""

import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
from functools import partial
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from kit.base.errors import DatasetError, KitError
from kit.streams.formats import TextLines
from kit.streams.mix import Mix
from kit.streams.stream import Split, StreamConfig

SMALL = {"block_bytes": 64, "group_blocks": 4}  # many groups in a small file


def lines_file(folder, count: int, name: str = "lines.txt"):
    rng = random.Random(count)
    path = folder / name
    lines = [f"{i} " + "ሰላም ለዓለም"[: rng.randrange(10)] for i in range(count)]
    path.write_text("\n".join(lines) + "\n" if lines else "", encoding="utf-8")
    return path, lines


def stream(path, **over) -> TextLines:
    return TextLines(path, StreamConfig(**SMALL | over))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [0, 1, 7, 10_007])
def test_shares_together_are_the_file(tmp_path, count, shuffle):
    path, lines = lines_file(tmp_path, count)
    for ranks in (1, 2, 3, 8, 16):
        how = {"shuffle": shuffle, "block_bytes": 64 if count < 10 else 1000, "ranks": ranks}
        parts = [stream(path, rank=rank, **how) for rank in range(ranks)]
        assert sorted(itertools.chain(*parts)) == sorted(lines)


def test_seed_and_epoch_decide_the_order_across_the_whole_file(tmp_path):
    path, lines = lines_file(tmp_path, 1500)
    source = stream(path, shuffle=True)
    first = list(source)
    assert first == list(source) == list(pickle.loads(pickle.dumps(source)))
    source.set_epoch(1)
    orders = [lines, first, list(source), list(stream(path, shuffle=True, seed=1))]
    assert len(set(map(tuple, orders))) == 4
    assert all(sorted(order) == sorted(lines) for order in orders)
    numbers = [int(line.split()[0]) for line in first]
    assert 600 < sum(numbers[:375]) / 375 < 900  # no quarter is one end of the file
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(numbers)) < 300


def resume_after(stop: int, make, whole: list):
    """A stream that goes through `whole` in two parts, resumed after so many records."""
    source, resumed = make(), make()
    seen = list(itertools.islice(source, stop))
    state = json.loads(json.dumps(source.state_dict()))
    assert len(json.dumps(state)) < 1000
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert seen + list(itertools.islice(resumed, len(whole) - stop)) == whole
    return resumed


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("keep", [None, Split(50)])
def test_resuming_gives_what_would_have_followed(tmp_path, shuffle, keep):
    path, _ = lines_file(tmp_path, 700)
    make = partial(TextLines, path, StreamConfig(shuffle=shuffle, **SMALL), keep=keep)
    whole = list(make())
    for stop in random.Random(0).sample(range(len(whole) + 1), 12):
        resumed = resume_after(stop, make, whole)
    list(resumed)
    assert list(resumed) == whole, "the pass after it is a whole one"


def test_a_position_belongs_to_its_epoch(tmp_path):
    path, _ = lines_file(tmp_path, 900)
    source, resumed = (stream(path, shuffle=True) for _ in range(2))
    source.set_epoch(3)
    rows = iter(source)
    list(itertools.islice(rows, 123))
    resumed.load_state_dict(source.state_dict())
    resumed.set_epoch(3)  # as a loop over epochs does: the one it is in changes nothing
    assert list(resumed) == list(rows)
    resumed.set_epoch(4)
    source.set_epoch(4)
    assert list(resumed) == list(source)


def read_and_die(path, state_file) -> None:
    source = stream(path, shuffle=True)
    seen = list(itertools.islice(source, 777))
    state_file.write_text(json.dumps([seen, source.state_dict()]))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_resumes_at_its_state(tmp_path):
    path, _ = lines_file(tmp_path, 2000)
    fork = multiprocessing.get_context("fork")  # the quickest; nothing here has threads
    process = fork.Process(target=read_and_die, args=(path, tmp_path / "state"))
    process.start()
    process.join()
    seen, state = json.loads((tmp_path / "state").read_text())
    source = stream(path, shuffle=True)
    source.load_state_dict(state)
    assert seen + list(source) == list(stream(path, shuffle=True))


def refused(state: dict, source) -> str:
    with pytest.raises(DatasetError) as error:
        source.load_state_dict(state)
    return str(error.value)


def test_a_changed_file_is_noticed_also_while_it_is_read(tmp_path):
    path, _ = lines_file(tmp_path, 500)
    state, rows = stream(path).state_dict(), iter(stream(path))
    next(rows)
    data = path.read_bytes()
    for changed in (data + b"one more\n", data[:100] + b"?" + data[101:]):
        path.write_bytes(changed)
        assert f"{path}: the saved position has file = " in refused(state, stream(path))
    path.write_bytes(data)
    stream(path).load_state_dict(state)
    os.truncate(path, 2000)
    with pytest.raises(DatasetError, match=r"became shorter.* 2000 bytes"):
        list(rows)


def test_another_order_or_share_is_refused(tmp_path):
    path, _ = lines_file(tmp_path, 500)
    same = {"shuffle": True, "seed": 5}
    state = stream(path, **same).state_dict()
    others = {"seed = 5, this stream has 6": {"seed": 6}, "shuffle = True": {"shuffle": False}}
    others |= {"role = '0 of 1'": {"ranks": 2}, "64x4": {"block_bytes": 128}}
    for facts, over in others.items():
        assert facts in refused(state, stream(path, **same | over))
    kept = TextLines(path, StreamConfig(**same, **SMALL), keep=Split(10))
    assert "keep = None" in refused(state, kept)
    assert "not the saved position" in refused({"epoch": 3}, stream(path))
    with pytest.raises(KitError, match="rank = 2"):
        StreamConfig(rank=2, ranks=2)
    with pytest.raises(KitError, match="percent"):
        Split(101)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # small machines
def test_dataloader_workers_share_the_file_but_not_a_position_of_one_process(tmp_path, monkeypatch):
    path, lines = lines_file(tmp_path, 300)
    source = stream(path, shuffle=True)
    loader = DataLoader(source, batch_size=None, num_workers=2)
    assert sorted(loader) == sorted(lines)
    list(itertools.islice(source, 50))
    source.load_state_dict(source.state_dict())
    worker = SimpleNamespace(id=0, num_workers=2)
    monkeypatch.setattr("kit.streams.stream.get_worker_info", lambda: worker)
    with pytest.raises(DatasetError, match="num_workers=0"):
        list(source)


def test_a_split_does_not_move_when_rows_are_added(tmp_path):
    path, lines = lines_file(tmp_path, 4000)
    few, _ = lines_file(tmp_path, 1000, "few.txt")
    few.write_text("\n".join(lines[:1000]), encoding="utf-8")
    keep, hold = Split(10), Split(10, held_out=True)
    config = StreamConfig(shuffle=True, **SMALL)
    train, held = (list(TextLines(path, config, keep=k)) for k in (keep, hold))
    assert sorted(train + held) == sorted(lines) and 300 < len(held) < 500
    assert set(TextLines(few, config, keep=hold)) == set(held) & set(lines[:1000])


def mix(folder, **over) -> Mix:
    counts = {"a.txt": 900, "b.txt": 300, "c.txt": 40}
    paths = [lines_file(folder, count, name)[0] for name, count in counts.items()]
    return Mix([stream(path, shuffle=True) for path in paths], [3, 1, 1], **over)


def test_a_mix_resumes_exactly(tmp_path):
    whole = list(itertools.islice(mix(tmp_path), 2000))
    for stop in random.Random(1).sample(range(len(whole)), 4):
        resume_after(stop, lambda: mix(tmp_path), whole)


def test_a_vanished_mount_is_reported_and_the_position_stays_valid(tmp_path):
    folder = tmp_path / "mount"
    folder.mkdir()
    path, lines = lines_file(folder, 2000)
    source, resumed = stream(path), stream(path)
    rows = iter(source)
    seen = [next(rows) for _ in range(100)]
    folder.rename(tmp_path / "away")
    with pytest.raises(DatasetError, match=rf"{path} cannot be read.*mounted"):
        seen.extend(rows)
    with pytest.raises(DatasetError, match=f"{tmp_path} cannot be read"):  # a folder
        stream(tmp_path)
    resumed.load_state_dict(source.state_dict())
    (tmp_path / "away").rename(folder)
    assert seen + list(resumed) == lines


def test_resuming_reads_one_group(tmp_path, monkeypatch):
    path, _ = lines_file(tmp_path, 10_007)
    source, resumed = (stream(path, shuffle=True) for _ in range(2))
    rows = iter(source)
    list(itertools.islice(rows, 9000))
    resumed.load_state_dict(source.state_dict())
    read, span = [], resumed.span
    monkeypatch.setattr(resumed, "span", lambda *a: read.append(a) or span(*a))
    assert next(iter(resumed)) == next(rows) and len(read) <= SMALL["group_blocks"]


def test_a_mix_keeps_its_proportions_and_refuses_what_does_not_fit(tmp_path):
    mixed = mix(tmp_path)
    records = list(itertools.islice(mixed, 5000))
    assert records == list(itertools.islice(mix(tmp_path), 5000))
    small = set(mixed.sources[2])
    assert 0.17 < sum(line in small for line in records) / 5000 - 0.005 < 0.26
    assert list(itertools.islice(mix(tmp_path, seed=1), 100)) != records[:100]
    mixed.set_epoch(1)
    assert list(itertools.islice(mixed, 100)) != records[:100]
    state = mix(tmp_path).state_dict()
    assert "weights = [3.0, 1.0, 1.0]" in refused(state, Mix(mixed.sources[:2], [3, 1]))
    (tmp_path / "b.txt").write_text("another\n")
    changed = stream(tmp_path / "b.txt", shuffle=True)
    other = Mix([mixed.sources[0], changed, mixed.sources[2]], [3, 1, 1])
    assert "b.txt" in refused(state, other)
    with pytest.raises(DatasetError, match="weight"):
        Mix(mixed.sources, [1, 0, 1])
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(DatasetError, match="Stream 1 of this mix has no records"):
        list(Mix([stream(tmp_path / "b.txt")], [1]))


def test_a_file_that_grows_is_read_to_where_it_ended(tmp_path):
    path, lines = lines_file(tmp_path, 2000)
    rows = iter(stream(path))
    first = next(rows)
    with open(path, "a") as file:
        file.write("later\n" * 1000)
    assert [first, *rows] == lines
