"""The code cache: made once, whole or not at all, whatever happens to it or to its makers."""

import dataclasses
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from helpers import DATA, code_cache, corpus, manifest, tokenizer, trained_codec, world

from kit.audio.clip import KEPT_SILENCE_S, load_speech, load_wave, resampled
from kit.audio.codec import load_codec, mels_and_codes
from kit.audio.spectrogram import DEFAULT_MEL, Mel, reference_mel
from kit.base.errors import DamagedFileError, DatasetError, DiskError
from kit.batches.code_cache import CodeCache, speaker_references
from kit.batches.encoding import build_cache, cache_key, clip_names, encode_missing, make_room
from kit.dataset.manifest import read_manifest
from kit.text.tokenizer import Tokenizer

ROWS = 30  # of the manifest, for caches built here
SMALL = dataclasses.replace(DATA, shard=3)  # ten shards


def build(folder, rows=None, config=DATA, **over) -> Path:
    rows = rows or manifest()[:ROWS]
    return build_cache(rows, trained_codec()[0], Mel(), tokenizer(), folder, "k", config, **over)


def build_noted(folder, rows=None, **over) -> tuple[Path, list]:
    reported = []
    return build(folder, rows, progress=lambda *now: reported.append(now), **over), reported


def digests(rows=None) -> list[str]:
    return clip_names(rows or manifest()[:ROWS])


def away(rows) -> list:
    """`rows` whose recordings nobody can read."""
    return [dataclasses.replace(row, audio="/nowhere.wav") for row in rows]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def copy(built, tmp_path) -> Path:
    return Path(shutil.copytree(built.parent, tmp_path / "cache")) / built.name


def shards(folder) -> list[Path]:
    return sorted(Path(folder).glob("codes-*.safetensors"))


def contents(folder) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in Path(folder).glob("*.safetensors")}


def test_the_cache_holds_every_utterance_as_codec_and_tokenizer_give_it():
    cache, codec, rows = code_cache(), trained_codec()[0], manifest()
    shapes = {name: mel.shape for name, mel in speaker_references(cache).items()}
    assert shapes == dict.fromkeys(("voice0", "voice1", "voice2"), (80, DATA.reference_frames))
    assert [r["id"] for r in cache.rows] == [r.id for r in rows]
    for i in (0, 25, 70):
        wave = load_wave(rows[i].audio, codec.sample_rate)[None]
        (alone,) = codec.encode(wave)
        assert len(cache.codes[i]) == len(alone)
        assert (torch.from_numpy(cache.codes[i]) == alone).float().mean() > 0.9
        assert cache.texts[i].tolist() == tokenizer().encode(rows[i].text)
        wanted = reference_mel(codec.mel(wave)[0][0], DATA.reference_frames)
        assert (torch.from_numpy(cache.references[i]) - wanted).abs().mean() < 0.05


def test_silence_around_speech_has_no_codes(tmp_path):
    codec = trained_codec()[0]
    wave = load_wave(manifest()[0].audio, codec.sample_rate).numpy()
    silence = np.zeros(codec.sample_rate // 2, np.float32)
    path = tmp_path / "a.wav"
    soundfile.write(path, np.concatenate([silence, wave, silence]), codec.sample_rate)
    row = dataclasses.replace(manifest()[0], audio=str(path))
    cache = CodeCache(build(tmp_path / "cache", [row]))
    found, spoken = len(cache.codes[0]), codec.encode(torch.from_numpy(wave)[None]).shape[1]
    assert spoken - 2 <= found <= spoken + 2 * KEPT_SILENCE_S * codec.frame_rate + 1


def test_a_second_build_reads_no_audio_and_changes_nothing(built):
    before, rows = contents(built.parent), away(manifest()[:ROWS])
    again, reported = build_noted(built.parent, rows, digests=digests())
    assert again == built and contents(built.parent) == before and reported == [(30, 30)]


def test_fewer_rows_in_another_order_with_other_texts_and_speakers_cost_nothing(copy):
    order = [*range(29, 9, -1)]
    rows = [manifest()[i] for i in order]
    changed = [dataclasses.replace(row, text="ሰላም ለአለም", speaker="x") for row in away(rows)]
    made = shards(copy.parent)
    index = build(copy.parent, changed, digests=digests(rows))
    cache, whole = CodeCache(index), CodeCache(copy)
    assert shards(copy.parent) == made
    for i, at in enumerate(order):
        assert cache.codes[i].tolist() == whole.codes[at].tolist()
        assert (cache.references[i] == whole.references[at]).all()
        assert cache.rows[i] == whole.rows[at] | {"speaker": "x"}
        assert cache.texts[i].tolist() == tokenizer().encode("ሰላም ለአለም")


def test_a_changed_recording_is_noticed_by_its_bytes(tmp_path):
    paths = [shutil.copy(row.audio, tmp_path) for row in manifest()[:4]]
    rows = [dataclasses.replace(r, audio=p) for r, p in zip(manifest(), paths)]
    first = CodeCache(build(tmp_path / "cache", rows))
    stat = os.stat(paths[2])
    data = bytearray(Path(paths[2]).read_bytes())
    data[1000:9000] = data[9000:17000]
    Path(paths[2]).write_bytes(data)
    os.utime(paths[2], ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as an honest clock might not
    index, reported = build_noted(tmp_path / "cache", rows)
    assert reported == [(3, 4), (4, 4)]
    same = [np.array_equal(a, b) for a, b in zip(first.codes, CodeCache(index).codes)]
    assert same == [True, True, False, True]


DAMAGE = {
    "empty": lambda whole: b"",
    "one bit": lambda whole: whole[:-3000] + bytes([whole[-3000] ^ 1]) + whole[-2999:],
    "another file's": lambda whole: (world() / "codec.safetensors").read_bytes(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named_reported_and_made_again(built, copy, damage, capsys):
    sound, shard = shards(copy.parent)
    inode = sound.stat().st_ino
    shard.write_bytes(DAMAGE[damage](shard.read_bytes()))
    with pytest.raises(DamagedFileError, match=rf"{shard.name} is damaged.*01_data_prep"):
        CodeCache(copy)
    assert build(copy.parent) == copy
    (reported,) = capsys.readouterr().out.splitlines()
    assert shard.name in reported and "encoded again" in reported
    assert contents(copy.parent) == contents(built.parent) and sound.stat().st_ino == inode


def test_a_damaged_index_is_made_again_and_what_is_missing_names_the_notebook(built, copy):
    copy.write_bytes(copy.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match=copy.name):
        CodeCache(copy)
    assert build(copy.parent) == copy and contents(copy.parent) == contents(built.parent)
    for path in (shards(copy.parent)[0], copy):
        path.unlink()
        with pytest.raises(DamagedFileError, match=rf"{path.name}.*01_data_prep"):
            CodeCache(copy)


def test_the_key_changes_with_what_codes_are_made_with(tmp_path):
    trained_codec()
    path, mel, data = world() / "codec.safetensors", DEFAULT_MEL, DATA
    (tmp_path / "codec").write_bytes(path.read_bytes() + b" ")
    change = dataclasses.replace
    key = cache_key(path, mel, data)
    assert key == cache_key(path, mel, change(data, seed=9, micro_batch=8, shard=7))
    assert key != cache_key(path, mel, change(data, reference_frames=21))
    assert key != cache_key(path, change(mel, hop_length=128), data)
    assert key != cache_key(tmp_path / "codec", mel, data)


def build_apart(folder: str) -> None:
    """The body of the processes below: everything from files, as another notebook would."""
    codec = load_codec(world() / "codec.safetensors")
    words = Tokenizer(world() / "tokenizer.model")
    build_cache(read_manifest(world())[:ROWS], codec, Mel(), words, folder, "k", SMALL)


@pytest.fixture(scope="module")
def small(tmp_path_factory, processes) -> Path:
    code_cache()  # leaves manifest, codec and tokenizer in files
    folder = tmp_path_factory.mktemp("small")
    run(processes, folder, 1)
    return folder


def start(processes, folder: Path):
    child = processes.Process(target=build_apart, args=(str(folder),))
    child.start()
    return child


def run(processes, folder: Path, count: int) -> None:
    for child in [start(processes, folder) for _ in range(count)]:
        child.join(60)
        assert child.exitcode == 0


@pytest.mark.long
def test_two_processes_build_the_same_cache_at_once(processes, small, tmp_path):
    run(processes, tmp_path, 2)
    assert contents(tmp_path) == contents(small)
    assert len(CodeCache(next(tmp_path.glob("index-*"))).rows) == ROWS


def test_a_build_killed_again_and_again_ends_as_if_it_had_not_been(processes, small, tmp_path):
    rng = random.Random(0)
    for wanted in (0, 1, 3, 4, 6, 9):  # shards to wait for, then a moment more
        child = start(processes, tmp_path)
        while child.is_alive() and len(shards(tmp_path)) < wanted:
            time.sleep(0.001)
        time.sleep(0.02 * rng.random())
        child.kill()
        child.join(20)
        for path in shards(tmp_path):  # what is there is whole
            assert path.read_bytes() == contents(small)[path.name]
    run(processes, tmp_path, 1)
    assert contents(tmp_path) == contents(small)


def test_parts_in_any_order_leave_the_cache_of_one_call(tmp_path):
    whole = build(tmp_path / "whole", config=SMALL)
    apart = tmp_path / "apart"
    clips = dict(zip(digests(), manifest()))
    codec = trained_codec()[0]
    for first, made in ((2, 3), (0, 7)):  # of ten files; the other three are left to `build`
        encode_missing(clips, codec, Mel(), apart, "k", SMALL, part=slice(first, None, 3))
        assert len(shards(apart)) == made
    index, reported = build_noted(apart, config=SMALL)
    assert index.name == whole.name and contents(apart) == contents(whole.parent)
    assert reported[0] == (21, ROWS) and reported[-1] == (ROWS, ROWS)


@pytest.mark.parametrize("size", [0, 3000])
def test_a_recording_that_went_bad_after_the_check_names_its_path(tmp_path, size):
    path = tmp_path / "bad.wav"
    path.write_bytes((corpus() / "wavs" / "train_000000.wav").read_bytes()[:size])
    rows = [dataclasses.replace(manifest()[0], audio=str(path))]
    with pytest.raises(DatasetError, match=r"bad\.wav .*is (truncated|empty)"):
        build(tmp_path / "cache", rows)
    with pytest.raises(DatasetError, match=r"nowhere\.wav cannot be read.*01_data_prep"):
        build(tmp_path, away(manifest()[:2]))


def test_a_recording_at_another_speed_is_the_tape_played_so(built):
    cache, faster = CodeCache(built), CodeCache(build(built.parent, speed=110))
    assert faster.corpus != cache.corpus and build(built.parent) == built, "each its own"
    codec, front_end = trained_codec()[0], Mel()
    for i in range(3):
        wave = load_speech(manifest()[i].audio, codec.input_sample_rate)
        (mel,), (codes,) = mels_and_codes(codec, front_end, [resampled(wave, 110, 100)])
        assert faster.rows[i] == cache.rows[i] and np.array_equal(faster.texts[i], cache.texts[i])
        assert len(faster.codes[i]) == pytest.approx(len(cache.codes[i]) / 1.1, abs=1.5)
        assert np.mean(faster.codes[i] == codes.numpy()) > 0.95  # batches round otherwise
        expected = reference_mel(mel, DATA.reference_frames).half().numpy()
        assert np.abs(faster.references[i] - expected).max() < 0.01


def test_one_recording_under_two_names_is_encoded_once(tmp_path):
    rows = [*manifest()[:2], dataclasses.replace(manifest()[0], id="again", text="ሰላም")]
    index, reported = build_noted(tmp_path, rows)
    cache = CodeCache(index)
    assert reported == [(0, 2), (2, 2)]
    assert cache.codes[0].tolist() == cache.codes[2].tolist()
    assert cache.texts[2].tolist() == tokenizer().encode("ሰላም") and cache.rows[2]["id"] == "again"


def test_no_room_on_the_disk_is_reported_before_work_begins(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with pytest.raises(DiskError, match="needs about"):
        build(tmp_path)
    assert not list(tmp_path.iterdir())


def test_reading_counts_as_use_and_litter_of_killed_builds_goes_with_time(copy):
    old, young = (copy.parent / f".codes-k-{name}.safetensors.x8gh2.tmp" for name in "ab")
    old.touch()
    for path in copy.parent.iterdir():
        os.utime(path, (1, 1))
    young.touch()
    CodeCache(copy)
    used = [path for path in copy.parent.glob("*.safetensors") if path.stat().st_mtime > 1e9]
    assert copy in used and len(used) > 1
    build(copy.parent, manifest()[: ROWS + 1])
    assert not old.exists() and young.exists()


@pytest.mark.parametrize("needed, left", [(0, 4), (1000, 3), (1001, 2), (2000, 2)])
def test_room_is_made_of_the_longest_unused_of_the_caches_own_files_alone(tmp_path, needed, left):
    others = [tmp_path / name for name in ("model-ema.safetensors", "codec.safetensors")]
    paths = [tmp_path / f"codes-{i}.safetensors" for i in range(4)]
    for path, age_s in zip([*others, *paths], (99, 99, 1, 9, 5, 7)):
        path.write_bytes(bytes(1000))
        os.utime(path, (2e9 - age_s, 2e9 - age_s))
    make_room(tmp_path, 4000 / 2**30, needed, set())
    assert {i for i in range(4) if paths[i].exists()} == {*(0, 2, 3, 1)[:left]}  # young to old
    with pytest.raises(DamagedFileError, match="max_cache_gib"):
        make_room(tmp_path, 1500 / 2**30, 1000, {paths[0]})
    assert paths[0].exists(), "in use, however old"
    assert all(path.exists() for path in others)
