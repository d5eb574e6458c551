"""The index of a corpus: counted once what a look at every row would find, and flat in memory."""

import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers import made_cache
from made_index import CLIPS, HELD_OUT, SPEAKER_ROWS, made_index

from kit.base.errors import DamagedFileError
from kit.base.tensor_file import pack_tensors
from kit.batches import code_cache
from kit.batches.batching import DataConfig
from kit.batches.code_cache import CodeCache, load_tensors, longest_text, reference_rows, slowest_pace
from kit.batches.code_stream import CodeStream


def parts_only(parts, position):
    return parts, position


def odd_cache():
    """Three splits, one of them small, and speakers with many rows, one, or none in a split."""
    rng = np.random.default_rng(3)
    rows = []
    for i in range(200):
        split = ("train", "held_out", "train", "train")[i % 4] if i != 77 else "test"
        rows.append({"id": f"ቃል{i}", "speaker": f"v{min(i % 13, 5)}", "split": split})
    rows[150]["speaker"] = "once"
    sizes = rng.integers(1, 40, (200, 2))
    texts = [np.full(count, 70_000 * (i % 2), np.int32) for i, (count, _) in enumerate(sizes)]
    codes = [np.arange(count, dtype=np.int32) for _, count in sizes]
    return made_cache(rows, texts, codes), rows


def named(rows: list[dict], split: str) -> list[int]:
    return [i for i, row in enumerate(rows) if row["split"] == split]


def test_rows_and_texts_come_back():
    cache, rows = odd_cache()
    assert list(cache.rows) == rows and len(cache.rows) == 200
    assert cache.rows[-1] == rows[-1]
    assert cache.texts[1].dtype == np.int32
    assert cache.texts[1].tolist() == [70_000] * len(cache.texts[1])


@pytest.mark.parametrize("split", ["train", "held_out", "test", "nobody's"])
def test_what_is_counted_once_is_what_a_look_at_every_row_finds(split):
    cache, rows = odd_cache()
    members = named(rows, split)
    assert list(cache.rows_in_split(split)) == members
    lengths = [len(cache.texts[i]) + len(cache.codes[i]) for i in members]
    assert cache.lengths(members).tolist() == lengths == [cache.length(i) for i in members]
    assert cache.histogram("tokens", split).sum() == len(members)
    assert cache.total("codes", split) == sum(len(cache.codes[i]) for i in members)
    for number, name in enumerate(cache.speaker_names):
        if members:
            spoken = [i for i in members if rows[i]["speaker"] == name]
            assert list(cache.of_speaker(number, split)) == spoken
    chosen: dict[str, int] = {}
    order = sorted(members, key=cache.length)
    for i in order[len(order) // 2 :] + order[: len(order) // 2]:
        chosen.setdefault(rows[i]["speaker"], i)
    assert reference_rows(cache, split) == chosen


def test_figures_of_all_rows_are_those_of_each():
    cache, rows = odd_cache()
    members = named(rows, "train")
    texts = [len(cache.texts[i]) for i in members]
    paces = [len(cache.codes[i]) / len(cache.texts[i]) for i in members]
    assert longest_text(cache) == np.quantile(texts, 0.95, method="higher")
    assert slowest_pace(cache) == np.quantile(paces, 0.99)
    assert cache.longest("codes") == max(len(codes) for codes in cache.codes)
    assert cache.sample_of_split("train").tolist() == members
    assert len(set(cache.sample_of_split("train", 40).tolist()) & set(members)) == 40


def test_a_cache_travels_as_a_few_paths(tmp_path):
    cache = CodeCache(made_index(tmp_path, 3 * CLIPS))
    sent = pickle.dumps(CodeStream(cache, "train", DataConfig(), parts_only))
    assert len(sent) < 5000
    assert len(pickle.loads(sent).members) == 3 * CLIPS * (HELD_OUT - 1) // HELD_OUT


@pytest.fixture
def large(tmp_path, monkeypatch) -> Path:
    """The index of a cache too large to be checked whole whenever it is opened."""
    monkeypatch.setattr(code_cache, "CHECKED_AT_START_BYTES", 0)
    return made_index(tmp_path, 2 * CLIPS)


def flipped(path: Path, at: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.unlink()  # the made shards are one file of many names
    path.write_bytes(whole)


@pytest.mark.parametrize("column", ["codes", "references"])
def test_damage_in_a_shard_is_reported_when_its_row_is_read(large, column):
    path = sorted(large.parent.glob("codes-*"))[0]
    last_bytes = load_tensors(path)[column].tobytes()[-60:]
    flipped(path, path.read_bytes().index(last_bytes) + 57)
    rows = getattr(CodeCache(large), column)
    assert len(rows[CLIPS - 2])
    with pytest.raises(DamagedFileError, match=rf"{path.name} is damaged.*01_data_prep"):
        rows[CLIPS - 1]


def test_a_large_cache_misses_no_shard_silently(large):
    shard = sorted(large.parent.glob("codes-*"))[1]
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(DamagedFileError, match=rf"no .*{shard.name}.*01_data_prep"):
        CodeCache(large)
    shard.write_bytes(whole[:-50])
    with pytest.raises(DamagedFileError, match=rf"{shard.name} is damaged"):
        CodeCache(large)


def test_another_shard_under_the_same_name_is_noticed(large):
    shard = sorted(large.parent.glob("codes-*"))[1]
    table = load_tensors(shard)
    table["codes"] = table["codes"][::-1]
    shard.unlink()
    shard.write_bytes(pack_tensors(table))
    with pytest.raises(DamagedFileError, match="a row does not match its checksum"):
        CodeCache(large).codes[CLIPS + 3]


def test_more_shards_than_stay_open_are_read_all_the_same(large, monkeypatch):
    monkeypatch.setattr(code_cache, "OPEN_SHARDS", 1)
    cache = CodeCache(large)
    assert [len(cache.codes[i]) for i in (5, CLIPS + 5, 5)] == [len(cache.codes[5])] * 3


def start_bytes(index: Path) -> int:
    """The most memory that opening the cache and its first batch take, as Python counts it."""
    tracemalloc.start()
    try:
        stream = CodeStream(CodeCache(index), "train", DataConfig(), parts_only)
        next(iter(stream))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_more_rows_take_no_more_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("kit.batches.batching.GROUP_ROWS", 2**13)
    monkeypatch.setattr(code_cache, "CHECKED_AT_START_BYTES", 0)
    monkeypatch.setattr(code_cache, "OPEN_SHARDS", 8)
    found = {}
    for rows in (20_000, 200_000):
        folder = tmp_path / str(rows)
        folder.mkdir()
        index = made_index(folder, rows)
        start_bytes(index)  # what imports and first calls leave
        found[rows] = start_bytes(index)
    assert found[200_000] < 12e6
    assert found[200_000] < 1.2 * found[20_000]


def test_a_made_index_is_one_as_prepare_writes_it(tmp_path):
    cache = CodeCache(made_index(tmp_path, CLIPS + 5))
    assert len(cache.rows) == CLIPS + 5
    assert cache.rows[CLIPS + 1] == {
        "id": f"{CLIPS + 1:010d}",
        "speaker": f"speaker{(CLIPS + 1) // SPEAKER_ROWS:06d}",
        "split": "train",
    }
    assert cache.codes[CLIPS + 1].tolist() == cache.codes[1].tolist()
    assert cache.length(7) == len(cache.codes[7]) + len(cache.texts[7])
