"""The code cache and the stream over it: nothing lost, nothing repeated, resumed exactly."""

import dataclasses
import itertools
import os
from functools import partial

import pytest
import torch
from helpers import (
    DATA,
    code_cache,
    corpus,
    manifest,
    real_config,
    speech,
    tokenizer,
    trained_codec,
    world,
)
from torch.utils.data import DataLoader

from kit.config import ConfigError
from kit.data import (
    CacheError,
    CodeCache,
    CodeStream,
    DataConfig,
    build_cache,
    cache_key,
    load_wave,
    padding_share,
    random_padding_share,
    reference_mel,
    speaker_references,
    validation_batches,
)
from kit.manifest import DatasetError
from kit.model import collate

ROWS = 30  # of the manifest, for caches built here: two shards


def build(folder, rows=None, progress=lambda *_: None):
    rows = rows or manifest()[:ROWS]
    return build_cache(rows, trained_codec()[0], tokenizer(), folder, "k", DATA, progress)


def stream(position=None, split="train", **over) -> CodeStream:
    config = dataclasses.replace(DATA, **over)
    return CodeStream(code_cache(), split, config, lambda parts, place: (parts, place), position)


def members(batch) -> list[tuple]:
    """Which utterances a batch holds, by their codes."""
    return [tuple(codes) for part in batch[0] for codes in part[1]]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("cache"))


def contents(index) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in index.parent.iterdir()}


def test_the_cache_holds_every_utterance_as_codec_and_tokenizer_give_it():
    cache, codec = code_cache(), trained_codec()[0]
    assert [r["id"] for r in cache.rows] == [r.id for r in manifest()]
    for i in (0, 25, 70):
        wave = load_wave(manifest()[i].audio, codec.sample_rate)
        alone = codec.encode(wave[None])[0]
        assert len(cache.codes[i]) == len(alone)
        assert (torch.from_numpy(cache.codes[i]) == alone).float().mean() > 0.9
        assert cache.texts[i].tolist() == tokenizer().encode(manifest()[i].text)
        assert cache.references[i].shape == (80, DATA.reference_frames)
        assert cache.length(i) == len(cache.codes[i]) + len(cache.texts[i])


def test_a_second_build_reads_no_audio_and_changes_nothing(built, monkeypatch):
    before, told = contents(built), []
    nowhere = [dataclasses.replace(r, audio="/nowhere.wav") for r in manifest()[:ROWS]]
    assert build(built.parent, nowhere, lambda *now: told.append(now)) == built
    assert contents(built) == before and told == [(25, 30), (30, 30)]


def test_a_deleted_shard_alone_is_made_again(built, tmp_path):
    index = build(tmp_path)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    kept = first.stat().st_mtime_ns
    second.unlink()
    build(tmp_path)
    assert contents(index) == contents(built) and first.stat().st_mtime_ns == kept


def test_an_interrupted_build_goes_on_where_it_stopped(built, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, progress=interrupt)
    assert len(list(tmp_path.iterdir())) == 1  # the first shard, whole, and no litter
    assert contents(build(tmp_path)) == contents(built)


@pytest.mark.parametrize("damage", ["gone", "empty", "truncated", "junk"])
def test_a_damaged_shard_names_the_file(tmp_path, damage):
    index = build(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes({"empty": b"", "truncated": whole[:-50], "junk": b"x" * 99}.get(damage, b""))
    if damage == "gone":
        shard.unlink()
    with pytest.raises(CacheError, match=rf"{shard.name}.*01_data_prep"):
        CodeCache(index)


def test_building_again_mends_a_damaged_shard(tmp_path):
    # What the message of a damaged shard tells the user to do.
    index = build(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-50])
    build(tmp_path)
    assert len(CodeCache(index).rows) == ROWS


def test_a_missing_index_names_the_notebook(tmp_path):
    with pytest.raises(CacheError, match="01_data_prep"):
        CodeCache(tmp_path / "none.json")


def test_a_damaged_index_is_told(tmp_path):
    (tmp_path / "k.json").write_text('{"shards": [')
    with pytest.raises(CacheError, match=r"k\.json"):
        CodeCache(tmp_path / "k.json")


def test_the_key_changes_with_whatever_the_cache_is_made_of(tmp_path):
    code_cache()
    paths = [world() / "codec.safetensors", world() / "tokenizer.model"]
    rows = manifest()[:3]
    key = cache_key(rows, *paths, DATA)
    assert key == cache_key(rows, *paths, dataclasses.replace(DATA, seed=9, micro_batch=8))
    assert key != cache_key(rows[:2], *paths, DATA)
    assert key != cache_key(rows, *paths, dataclasses.replace(DATA, reference_frames=21))
    assert key != cache_key([*rows[:2], dataclasses.replace(rows[2], text="ሌላ")], *paths, DATA)
    (tmp_path / "codec").write_bytes(paths[0].read_bytes() + b" ")
    assert key != cache_key(rows, tmp_path / "codec", paths[1], DATA)


def test_the_key_changes_when_a_recording_does(tmp_path):
    code_cache()
    paths = [world() / "codec.safetensors", world() / "tokenizer.model"]
    copy = tmp_path / "a.wav"
    copy.write_bytes(b"RIFF")
    rows = [dataclasses.replace(manifest()[0], audio=str(copy))]
    key = cache_key(rows, *paths, DATA)
    os.utime(copy, ns=(1, 1))
    assert cache_key(rows, *paths, DATA) != key


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_every_utterance_exactly_once_an_epoch(epoch):
    s = stream()
    plan = s.plan(epoch)
    assert sorted(itertools.chain(*plan)) == s.members and len(s.members) == 60
    assert sorted(map(len, plan)) == [4, *[8] * 7]


def test_batches_read_are_the_plans_and_cross_epochs():
    s = stream()
    read = list(itertools.islice(s, 2 * len(s.plan(0))))
    epochs = [sorted(m for b in part for m in members(b)) for part in (read[:8], read[8:])]
    assert epochs[0] == epochs[1] == sorted(tuple(s.cache.codes[i].tolist()) for i in s.members)


def test_the_order_differs_between_epochs_and_seeds():
    s, other = stream(), stream(seed=1)
    assert s.plan(0) == stream().plan(0)
    assert s.plan(0) != s.plan(1) and s.plan(0) != other.plan(0)
    assert {frozenset(b) for b in s.plan(0)} != {frozenset(b) for b in s.plan(1)}


def test_short_first_sorts_the_first_epoch_alone():
    s = stream(short_first=True)
    shortest = [min(map(s.cache.length, batch)) for batch in s.plan(0)]
    assert shortest == sorted(shortest) and s.plan(1) == stream().plan(1)


def same(a, b) -> bool:
    parts = zip(a[0], b[0], strict=True)
    tensors = all(x[:2] == y[:2] and torch.equal(x[2], y[2]) for x, y in parts)
    return a[1] == b[1] and tensors


def test_any_position_resumes_exactly():
    whole = list(itertools.islice(stream(), 20))
    for at in range(18):
        rest = itertools.islice(stream(whole[at][1]), 2)
        assert all(same(x, y) for x, y in zip(rest, whole[at + 1 :]))


def test_a_position_survives_json_and_points_at_the_next_batch():
    first = next(iter(stream()))
    assert first[1] == {"epoch": 0, "batch": 1}
    last = next(itertools.islice(stream(), 7, None))
    assert last[1] == {"epoch": 1, "batch": 0}


def identity(batch):
    return batch


def loaded(position, workers: int, count: int) -> list:
    loader = DataLoader(stream(position), batch_size=None, num_workers=workers, collate_fn=identity)
    return list(itertools.islice(loader, count))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_keep_the_order_and_resume_exactly(workers):
    whole = list(itertools.islice(stream(), 12))
    read = loaded(None, workers, 12)
    assert all(same(a, b) for a, b in zip(read, whole, strict=True))
    for at in (2, 7):  # within an epoch, and at its end
        rest = loaded(read[at][1], workers, 11 - at)
        assert all(same(a, b) for a, b in zip(rest, whole[at + 1 :], strict=True))


def test_another_split_into_micro_batches_holds_the_same_utterances():
    one = [members(b) for b in itertools.islice(stream(micro_batch=8), 8)]
    two = [members(b) for b in itertools.islice(stream(micro_batch=2), 8)]
    assert one == two


def test_a_reference_comes_from_the_same_speaker():
    cache = code_cache()
    speaker_of = {r.tobytes(): row["speaker"] for r, row in zip(cache.references, cache.rows)}
    codes_of = {tuple(c.tolist()): row["speaker"] for c, row in zip(cache.codes, cache.rows)}
    for parts, _ in itertools.islice(stream(), 8):
        for _, codes, cond in parts:
            spoken = [codes_of[tuple(c)] for c in codes]
            assert [speaker_of[m.half().numpy().tobytes()] for m in cond] == spoken


def test_like_lengths_waste_less_than_any_order():
    s = CodeStream(code_cache(), "train", DATA, partial(collate, real_config()))
    batches = list(itertools.islice(s, 8))
    share = padding_share(batches)
    assert 0 <= share < 0.6 * random_padding_share(s)
    cells = sum(m.tokens.numel() for b in batches for m in b.micro)
    real = sum(s.cache.length(i) + 6 for i in s.members)  # START, STOP, START, three STOPs
    assert share == pytest.approx(1 - real / cells)


def test_validation_takes_every_held_out_utterance_once_and_always_alike():
    s = stream(split="held_out")
    batches = validation_batches(s)
    wanted = sorted(tuple(s.cache.codes[i].tolist()) for i in s.members)
    assert sorted(m for b in batches for m in members(b)) == wanted and len(wanted) == 6
    assert all(same(a, b) for a, b in zip(batches, validation_batches(stream(split="held_out"))))


def test_every_speaker_gets_a_reference():
    found = speaker_references(code_cache())
    assert sorted(found) == ["voice0", "voice1", "voice2"]
    assert all(mel.shape == (80, DATA.reference_frames) for mel in found.values())


def test_a_split_nobody_has_is_told():
    with pytest.raises(CacheError, match="split `test`"):
        stream(split="test")


@pytest.mark.parametrize("frames", [1, 19, 20, 21, 200])
def test_a_reference_is_the_middle_and_always_full(frames):
    mel = torch.arange(frames).float().expand(80, frames)
    cut = reference_mel(mel, 20)
    assert cut.shape == (80, 20)
    if frames == 200:
        assert cut[0].tolist() == list(range(90, 110))


def test_other_sample_rates_are_resampled(tmp_path):
    import soundfile

    soundfile.write(tmp_path / "a.wav", speech(rate=44100), 44100)
    wave = load_wave(str(tmp_path / "a.wav"), 22050)
    assert len(wave) == 22050 and (wave - torch.from_numpy(speech())).abs()[500:-500].max() < 0.02


def test_a_recording_that_went_bad_after_the_check_names_its_path(tmp_path):
    path = tmp_path / "bad.wav"
    path.write_bytes((corpus() / "wavs" / "train_000000.wav").read_bytes()[:3000])
    rows = [dataclasses.replace(manifest()[0], audio=str(path))]
    with pytest.raises(DatasetError, match=r"bad\.wav is truncated"):
        build(tmp_path / "cache", rows)


def test_micro_batches_must_divide_the_effective_batch():
    assert DataConfig(effective_batch=12, micro_batch=4).grad_accum == 3
    with pytest.raises(ConfigError, match=r"micro_batch = 5: must divide effective_batch \(12\)"):
        DataConfig(effective_batch=12, micro_batch=5)
