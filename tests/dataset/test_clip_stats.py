"""Every clip measured once, whatever happens in between: processes, kills, lost mounts."""

import json
import multiprocessing
import os
import re
import shutil
import time
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from clips import encoded, voice
from crashing import crash_at_80
from helpers import start_and_kill

from kit.audio.clip import ClipMeasure, measure_clip
from kit.base.errors import DatasetError
from kit.dataset import clip_stats as measures
from kit.dataset.clip_stats import measure_clips


@pytest.fixture
def clips(tmp_path) -> list[str]:
    """150 recordings: some are copies, the last two cannot be read."""
    (tmp_path / "wavs").mkdir()
    data = [encoded(voice(0.3, seed)) for seed in range(5)]
    paths = [tmp_path / f"wavs/{i:03d}.wav" for i in range(150)]
    for path, content in zip(paths, [*(data * 30)[:148], b"no audio", encoded(voice(9))]):
        path.write_bytes(content)
    return list(map(str, paths))


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The paths that are measured in this process from now on."""
    seen = []
    noted = lambda path, decode_s: seen.append(path) or measure_clip(path, decode_s)  # noqa: E731
    monkeypatch.setattr(measures, "measure_clip", noted)
    return seen


@pytest.mark.parametrize("processes", [0, 2])
def test_processes_find_what_one_call_finds(clips, tmp_path, processes, read):
    reported = Mock()
    result = measure_clips(clips, tmp_path / "c.jsonl", 5, processes, reported)
    assert list(result) == clips and result[clips[7]] == measure_clip(clips[7])
    assert result[clips[148]].startswith("cannot be read as audio")
    assert result[clips[149]].seconds == 9 and result[clips[149]].peak is None
    assert reported.mock_calls == [call(64, 150), call(128, 150), call(150, 150)]
    again = measure_clips(clips, tmp_path / "c.jsonl", decode_s=10)
    assert read[-1] == clips[149] and again[clips[149]].peak > 0, "it is not too long any more"


def test_only_what_changed_is_measured_again(clips, tmp_path, read, monkeypatch):
    first = measure_clips(clips, tmp_path / "c.jsonl")
    assert sorted(read) == clips
    read.clear()
    assert measure_clips(clips, tmp_path / "c.jsonl") == first and read == []
    Path(clips[3]).write_bytes(encoded(voice(0.7, 99)))
    os.utime(clips[5], ns=(1, 1))
    again = measure_clips(clips, tmp_path / "c.jsonl")
    assert sorted(read) == [clips[3], clips[5]]
    assert again[clips[3]].seconds == pytest.approx(0.7, abs=1e-3)
    read.clear()
    for folder, path in ((tmp_path, "wavs/000.wav"), (tmp_path / "wavs", "000.wav")):
        monkeypatch.chdir(folder)  # it is no part of the key
        assert measure_clips([path], tmp_path / "c.jsonl")[path].seconds > 0 and not read


def test_what_is_missing_for_now_is_looked_for_again(clips, tmp_path):
    hidden = Path(clips[0]).rename(tmp_path / "away.wav")
    result = measure_clips(clips[:3], tmp_path / "c.jsonl")
    assert "No such file" in result[clips[0]]
    hidden.rename(clips[0])
    assert isinstance(measure_clips(clips[:3], tmp_path / "c.jsonl")[clips[0]], ClipMeasure)


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_a_mount_that_vanishes_stops_the_check_and_loses_nothing(clips, tmp_path, monkeypatch, how):
    folder, away = Path(clips[0]).parent, tmp_path / "away"

    def until_the_70th(path, decode_s):
        if path == clips[70] and folder.exists():
            shutil.move(folder, away)
            if how == "emptied":
                folder.mkdir()  # a mount point whose mount has ended
        return measure_clip(path, decode_s)

    monkeypatch.setattr(measures, "measure_clip", until_the_70th)
    with pytest.raises(DatasetError, match=r"wavs is gone, .* kept.*resumes there"):
        measure_clips(clips, tmp_path / "c.jsonl")
    if how == "emptied":
        folder.rmdir()
    shutil.move(away, folder)
    again = Mock(wraps=measure_clip)
    monkeypatch.setattr(measures, "measure_clip", again)
    result = measure_clips(clips, tmp_path / "c.jsonl")
    assert [each.args[0] for each in again.mock_calls] == clips[70:]
    assert isinstance(result[clips[147]], ClipMeasure)


def test_shards_measure_their_part_and_a_call_for_all_merges_them(
    clips, tmp_path, read, monkeypatch
):
    whole = measure_clips(clips, tmp_path / "whole.jsonl")
    read.clear()
    monkeypatch.setattr(measures, "CHUNK", 16)
    cache = tmp_path / "c.jsonl"
    parts = [tmp_path / f"c.{number}-of-3.jsonl" for number in (1, 2, 3)]
    with pytest.raises(KeyboardInterrupt):
        killed = Mock(side_effect=KeyboardInterrupt)
        measure_clips(clips[::3], cache, part=parts[0], progress=killed)
    assert len(read) == 16
    for number in (1, 0):  # the third is never run
        measure_clips(clips[number::3], cache, part=parts[number])
    assert not cache.exists() and len(read) == 100
    reported = []
    result = measure_clips(clips, cache, progress=lambda *now: reported.append(now))
    assert result == whole and list(result) == clips
    assert sorted(read) == clips, "each once, over all tries"
    assert reported[-1] == (150, 150)
    assert cache.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("c*")) == ["c.jsonl"]


def measure_slowly(paths: list[str], cache: Path) -> None:
    measures.measure_clip = lambda *args: time.sleep(0.003) or measure_clip(*args)
    measure_clips(paths, cache)


def test_a_killed_check_resumes_where_it_was(clips, tmp_path, read):
    cache = tmp_path / "c.jsonl"
    fork = multiprocessing.get_context("fork")
    start_and_kill(fork.Process(target=measure_slowly, args=(clips, cache)), cache, 1)
    before = {json.loads(line)["path"] for line in cache.read_bytes().split(b"\n")[:-1]}
    assert 0 < len(before) < len(clips)
    result = measure_clips(clips, cache)
    assert sorted(read) == sorted(set(clips) - before)
    assert result == measure_clips(clips, tmp_path / "fresh.jsonl")


def test_a_decoder_that_crashes_ends_it_with_the_files_that_were_read(clips, tmp_path, monkeypatch):
    monkeypatch.setattr(measures, "measure_row", crash_at_80)
    with pytest.raises(DatasetError) as caught:
        measure_clips(clips[:90], tmp_path / "c.jsonl", processes=2)
    named = re.findall(r"\d+\.wav", str(caught.value))
    assert "080.wav" in named and len(named) <= 4
    assert len((tmp_path / "c.jsonl").read_bytes().splitlines()) == measures.CHUNK, "they are kept"
    monkeypatch.undo()
    assert measure_clips(clips[:90], tmp_path / "c.jsonl")[clips[80]].seconds > 0


# Whole lines, or values in place of a line's own.
DAMAGE = {"zeros": b"\0" * 30, "deep": b"[" * 99_999, "cut short": b'{"form'}
DAMAGE |= {"a list": {"measure": [1]}, "another field": {"measure": {"wings": 2}}}


@pytest.mark.parametrize("number", [1, 3])  # the last one as a kill leaves it
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_line_is_reported_and_measured_again(clips, tmp_path, read, damage, number):
    cache = tmp_path / "c.jsonl"
    first = measure_clips(clips[:4], cache)
    lines = cache.read_bytes().splitlines()
    if isinstance(damage, dict):
        damage = json.dumps(json.loads(lines[number]) | damage).encode()
    lines[number] = damage
    cache.write_bytes(b"\n".join(lines))
    read.clear()
    with pytest.warns(UserWarning, match=r"c\.jsonl: 1 damaged lines are left out"):
        assert measure_clips(clips[:4], cache) == first
    assert len(read) == 1
