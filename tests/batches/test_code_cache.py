"""The cache that is read: what a look at every row would find, flat in memory, checked files."""

import itertools
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import GPT, made_cache
from made_index import CLIPS, made_index

from kit.base.errors import DamagedFileError
from kit.base.tensor_file import pack_tensors
from kit.batches import code_cache
from kit.batches.batching import best_grids, padded
from kit.batches.code_cache import SHARD, CodeCache, open_arrays
from kit.batches.code_stream import CodeStream
from kit.model.sequence import collate
from kit.settings import DataConfig


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


@pytest.mark.parametrize("split", ["train", "held_out", "test", "nobody's"])
def test_what_is_counted_once_is_what_a_look_at_every_row_finds(split):
    cache, rows = odd_cache()
    members = named(rows, split)
    assert list(cache.rows_in_split(split)) == members
    lengths = [len(cache.texts[i]) + len(cache.codes[i]) for i in members]
    assert cache.lengths(members).tolist() == lengths
    assert cache.total("codes", split) == sum(len(cache.codes[i]) for i in members)
    for number, name in enumerate(cache.speaker_names):
        if members:
            spoken = [i for i in members if rows[i]["speaker"] == name]
            assert list(cache.of_speaker(number, split)) == spoken
    chosen: dict[str, int] = {}
    order = sorted(members, key=lambda i: cache.lengths([i])[0])
    for i in order[len(order) // 2 :] + order[: len(order) // 2]:
        chosen.setdefault(rows[i]["speaker"], i)
    assert code_cache.reference_rows(cache, split) == chosen


@pytest.fixture
def large(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(code_cache, "CHECKED_AT_START_BYTES", 0)
    return made_index(tmp_path, 2 * CLIPS)


@pytest.mark.parametrize("column", ["codes", "references"])
def test_damage_in_a_shard_is_reported_when_its_row_is_read(large, column):
    path = sorted(large.parent.glob("codes-*"))[0]
    whole = bytearray(path.read_bytes())
    whole[whole.index(open_arrays(path, SHARD)[column].tobytes()[-60:]) + 57] ^= 1
    path.unlink()  # the made shards are one file of many names
    path.write_bytes(whole)
    rows = getattr(CodeCache(large), column)
    assert rows[CLIPS + 5].tolist() == rows[5].tolist() and len(rows[CLIPS - 2])
    with pytest.raises(DamagedFileError, match=rf"{path.name} is damaged.*01_data_prep"):
        rows[CLIPS - 1]


def test_a_large_cache_misses_no_shard_silently(large):
    shard = sorted(large.parent.glob("codes-*"))[1]
    whole = shard.read_bytes()
    table = {name: array.copy() for name, array in open_arrays(shard, SHARD).items()}
    shard.unlink()
    shard.write_bytes(whole[:-50])
    with pytest.raises(DamagedFileError, match=rf"{shard.name} is damaged"):
        CodeCache(large)
    shard.write_bytes(pack_tensors(table | {"codes": table["codes"][::-1]}))  # another one's
    with pytest.raises(DamagedFileError, match="a row does not match its checksum"):
        CodeCache(large).codes[CLIPS + 3]


def lengths_only(codes: list[int], texts: list[int], last_split: str = "train") -> CodeCache:
    """A cache of nothing but lengths; the last row is of the split `last_split`."""
    rows = [{"id": f"u{i}", "speaker": "a", "split": "train"} for i in range(len(codes))]
    rows[-1]["split"] = last_split
    return made_cache(rows, *([np.zeros(n, np.int32) for n in column] for column in (texts, codes)))


def test_at_least_so_many_percent_are_kept_and_every_quantity_has_a_line():
    rng = np.random.default_rng(0)
    codes, texts = (np.maximum(1, rng.lognormal(4, 0.6, 3000)).astype(int) for _ in range(2))
    cache = lengths_only(codes.tolist(), texts.tolist())
    _, limit_codes, limit_tokens = code_cache.length_report(cache, codes_per_s=28.7)
    assert limit_codes % 64 == 0 and limit_tokens % 64 == 0
    assert ((codes <= limit_codes) & (codes + texts + 6 <= limit_tokens)).mean() >= 0.99
    lines = code_cache.length_report(lengths_only([10, 20, 300], [1, 2, 3]), codes_per_s=28.7)[0]
    assert list(lines) == ["text ids", "codes", "tokens", "seconds"]
    assert lines["codes"].startswith("50 %: 20, 90 %: 300,"), "lengths that occur"


def test_fixed_lengths_are_few_and_cost_little_and_hold_the_rows_of_every_split():
    made = lengths_only([10] * 50 + [30] * 50 + [200], [5] * 101, last_split="held_out")
    assert code_cache.fixed_lengths(made) == (24, 48, 216)
    rng = np.random.default_rng(0)
    made = lengths_only(rng.integers(60, 500, 2000).tolist(), rng.integers(20, 60, 2000).tolist())
    tokens = made.lengths(range(2000)) + 6
    fixed = code_cache.fixed_lengths(made)
    assert all(length % 8 == 0 for length in fixed) and fixed[-1] >= max(tokens)
    config = DataConfig(grid_lengths=fixed)
    assert sum(padded(int(n), config) for n in tokens) <= 1.04 * sum(tokens)
    fewer = list(itertools.islice(best_grids(np.bincount(tokens)), len(fixed) - 1))[-1]
    assert fewer[1] > 1.04 * sum(tokens)


# --- files that check themselves ----------------------------------------------------------------

TENSORS = {
    "turned": np.arange(12, dtype=np.float16).reshape(3, 4).T,
    "half": np.arange(10, dtype=np.int32)[::2],
    "none": np.zeros(0, dtype=np.int64),
}


def save(path) -> bytes:
    path.write_bytes(pack_tensors(TENSORS))
    return path.read_bytes()


def equal(found: dict) -> bool:
    pairs = [(found[name], tensor) for name, tensor in TENSORS.items()]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def test_no_byte_can_change_and_no_file_be_shorter_or_longer_unseen(tmp_path):
    path = tmp_path / "a"
    whole = save(path)
    assert equal(open_arrays(path, TENSORS)) and save(path) == whole
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            found = open_arrays(path, TENSORS)
        except DamagedFileError as error:
            assert str(path) in str(error)
        else:  # a byte that says nothing, as spaces after the header do
            assert equal(found)
    for damage in (whole + b"x", *(whole[:length] for length in range(0, len(whole), 3))):
        path.write_bytes(damage)
        with pytest.raises(DamagedFileError, match="damaged"):
            open_arrays(path, TENSORS)
    with pytest.raises(DamagedFileError, match="There is no"):
        open_arrays(tmp_path / "none", TENSORS)


def test_rows_texts_and_figures_come_back_as_they_were():
    cache, rows = odd_cache()
    assert list(cache.rows) == rows and len(cache.rows) == 200 and cache.rows[-1] == rows[-1]
    assert cache.texts[1].dtype == np.int32 and set(cache.texts[1].tolist()) == {70_000}
    members = named(rows, "train")
    texts = [len(cache.texts[i]) for i in members]
    paces = [len(cache.codes[i]) / count for i, count in zip(members, texts)]
    assert code_cache.longest_text(cache) == np.quantile(texts, 0.95, method="higher")
    assert code_cache.slowest_pace(cache) == np.quantile(paces, 0.99)
    assert cache.longest("codes") == max(len(codes) for codes in cache.codes)
    assert len(set(cache.sample_of_split("train", 40).tolist()) & set(members)) == 40


def test_a_cache_travels_to_a_worker_as_paths_and_outlives_their_names(tmp_path):
    cache = CodeCache(made_index(tmp_path, CLIPS))
    sent = pickle.dumps(CodeStream(cache, "train", DataConfig(), partial(collate, GPT)))
    assert len(sent) < 5000 and len(pickle.loads(sent).members) > CLIPS / 2
    save(tmp_path / "a")
    found = open_arrays(tmp_path / "a", TENSORS)
    with pytest.raises(DamagedFileError, match="no column `other`"):
        open_arrays(tmp_path / "a", ["other"])
    (tmp_path / "a").unlink()
    assert equal(found)
