"""Every clip measured once, whatever happens in between: processes, kills, lost mounts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clips import encoded, voice
from shared_work import PretendedGroup

from kit.audio.clip import ClipMeasure, measure_clip
from kit.base.errors import DatasetError
from kit.dataset import clip_stats as measures
from kit.dataset.clip_stats import measure_clips

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clips(tmp_path) -> list[str]:
    """150 recordings: some are copies, the last two cannot be read."""
    folder = tmp_path / "wavs"
    folder.mkdir()
    data = [encoded(voice(0.3, seed)) for seed in range(5)] + [b"no audio", encoded(voice(9))]
    paths = [folder / f"{i:03d}.wav" for i in range(150)]
    for i, path in enumerate(paths):
        path.write_bytes(data[i % 5] if i < 148 else data[i - 143])
    return [str(path) for path in paths]


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The paths that are measured in this process from now on."""
    seen = []

    def noted(path, decode_s):
        seen.append(path)
        return measure_clip(path, decode_s)

    monkeypatch.setattr(measures, "measure_clip", noted)
    return seen


@pytest.mark.parametrize("processes", [0, 2])
def test_processes_find_what_one_call_finds(clips, tmp_path, processes, read):
    reported = []
    tick = lambda *counts: reported.append(counts)  # noqa: E731
    result = measure_clips(clips, tmp_path / "c.jsonl", 5, processes, tick)
    assert list(result) == clips and result[clips[7]] == measure_clip(clips[7])
    assert result[clips[148]].startswith("cannot be read as audio")
    assert result[clips[149]].seconds == 9 and result[clips[149]].peak is None
    assert reported == [(64, 150), (128, 150), (150, 150)]
    again = measure_clips(clips, tmp_path / "c.jsonl", decode_s=10)
    assert read[-1] == clips[149] and again[clips[149]].peak > 0, "it is not too long any more"


def test_only_what_changed_is_measured_again(clips, tmp_path, read):
    first = measure_clips(clips, tmp_path / "c.jsonl")
    assert sorted(read) == clips
    read.clear()
    assert measure_clips(clips, tmp_path / "c.jsonl") == first and read == []
    Path(clips[3]).write_bytes(encoded(voice(0.7, 99)))
    os.utime(clips[5], ns=(1, 1))
    again = measure_clips(clips, tmp_path / "c.jsonl")
    assert sorted(read) == [clips[3], clips[5]]
    assert again[clips[3]].seconds == pytest.approx(0.7, abs=1e-3)


def test_the_working_folder_is_no_part_of_the_key(clips, tmp_path, read, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measure_clips(["wavs/000.wav"], tmp_path / "c.jsonl")
    read.clear()
    monkeypatch.chdir(tmp_path / "wavs")
    assert measure_clips(["000.wav"], tmp_path / "c.jsonl")["000.wav"].seconds > 0 and not read


def test_a_file_that_is_gone_for_now_is_looked_for_again(clips, tmp_path, read):
    hidden = Path(clips[0]).rename(tmp_path / "away.wav")
    result = measure_clips(clips[:3], tmp_path / "c.jsonl")
    assert "No such file" in result[clips[0]]
    hidden.rename(clips[0])
    assert isinstance(measure_clips(clips[:3], tmp_path / "c.jsonl")[clips[0]], ClipMeasure)


def test_what_needs_a_library_is_measured_again_once_it_is_there(tmp_path, monkeypatch):
    path = tmp_path / "a.m4a"
    path.write_bytes(b"\0\0\0\x1cftypM4A " + bytes(99))
    monkeypatch.setitem(sys.modules, "av", None)
    result = measure_clips([str(path)], tmp_path / "c.jsonl")
    assert "pip install av" in result[str(path)]
    assert (tmp_path / "c.jsonl").read_bytes() == b""


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
    again = []
    noted = lambda *args: again.append(args[0]) or measure_clip(*args)  # noqa: E731
    monkeypatch.setattr(measures, "measure_clip", noted)
    result = measure_clips(clips, tmp_path / "c.jsonl")
    assert again == clips[70:] and isinstance(result[clips[147]], ClipMeasure)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_share_them_leave_the_file_of_one(clips, tmp_path, read, size):
    alone = measure_clips(clips, tmp_path / "alone.jsonl")
    read.clear()
    reported = []
    cache = tmp_path / "c.jsonl"
    with pytest.raises(KeyboardInterrupt):
        measure_clips(clips, cache, group=PretendedGroup(size, fails=size - 1))
    assert 0 < len(read) < len(clips)
    group = PretendedGroup(size + 1)
    result = measure_clips(clips, cache, group=group, progress=lambda *now: reported.append(now))
    assert result == alone and list(result) == clips
    assert sorted(read) == clips, "each once, over both tries"
    assert reported == sorted(reported) and reported[-1] == (150, 150)
    assert cache.read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("c*")) == ["c.jsonl"]


def test_the_file_is_the_same_however_it_was_made(clips, tmp_path):
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    measure_clips(clips, paths[0])
    measure_clips(clips, paths[1], processes=3)
    measure_clips(clips[90:], paths[2])
    with paths[2].open("ab") as cut_short:
        cut_short.write(paths[0].read_bytes()[:40])
    with pytest.warns(UserWarning, match="1 damaged lines"):
        measure_clips(clips, paths[2])
    assert len({path.read_bytes() for path in paths}) == 1


CHECK = """
import sys, time
from pathlib import Path
from kit.dataset import clip_stats as measures
slow = measures.measure_clip
measures.measure_clip = lambda *args: time.sleep(0.003) or slow(*args)
paths = sorted(map(str, Path(sys.argv[1]).glob("*.wav")))
measures.measure_clips(paths, Path(sys.argv[2]), processes=int(sys.argv[3]))
"""


def test_a_killed_check_resumes_where_it_was(clips, tmp_path, read):
    cache = tmp_path / "c.jsonl"
    command = [sys.executable, "-c", CHECK, str(Path(clips[0]).parent), str(cache), "0"]
    check = subprocess.Popen(command, cwd=ROOT)
    while not (cache.exists() and cache.stat().st_size):
        assert check.poll() is None
        time.sleep(0.005)
    check.send_signal(signal.SIGKILL)
    check.wait()
    before = {json.loads(line)["path"] for line in cache.read_bytes().split(b"\n")[:-1]}
    assert 0 < len(before) < len(clips)
    result = measure_clips(clips, cache)
    assert sorted(read) == sorted(set(clips) - before)
    assert result == measure_clips(clips, tmp_path / "fresh.jsonl")


def run_instead(monkeypatch, code: str) -> None:
    """Let every process that measures run `code`."""
    plain = subprocess.Popen
    started = lambda command, **how: plain([sys.executable, "-c", code], **how)  # noqa: E731
    monkeypatch.setattr(measures.subprocess, "Popen", started)


def test_a_decoder_that_crashes_costs_one_clip_not_the_notebook(clips, tmp_path, monkeypatch):
    """Processes whose decoder dies on one file, as on a damaged one that libsndfile trips over."""
    crash = (
        "import os, sys, kit.dataset.clip_stats as m; slow = m.measure_clip; "
        f"m.measure_clip = lambda p, s: os._exit(139) if p == {clips[80]!r} else slow(p, s); "
        "m._serve()"
    )
    run_instead(monkeypatch, crash)
    some = clips[70:90]
    result = measure_clips(some, tmp_path / "c.jsonl", processes=1)
    assert result[clips[80]] == "crashes the audio decoder"
    assert sum(isinstance(value, ClipMeasure) for value in result.values()) == 19


def test_processes_that_cannot_begin_refuse_no_clip(clips, tmp_path, monkeypatch):
    run_instead(monkeypatch, "raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"could not start \(exit code 3\)"):
        measure_clips(clips, tmp_path / "c.jsonl", processes=2)
    assert not (tmp_path / "c.jsonl").read_bytes()


@pytest.mark.parametrize("processes", [0, 2])
def test_an_interrupted_check_keeps_what_it_has(clips, tmp_path, monkeypatch, processes, read):
    started = []
    plain = subprocess.Popen
    noted = lambda *args, **how: started.append(plain(*args, **how)) or started[-1]  # noqa: E731
    monkeypatch.setattr(measures.subprocess, "Popen", noted)

    def interrupt(done, total):
        raise KeyboardInterrupt

    cache = tmp_path / "c.jsonl"
    with pytest.raises(KeyboardInterrupt):
        measure_clips(clips, cache, processes=processes, progress=interrupt)
    assert len(started) == processes
    assert all(process.poll() is not None for process in started)
    assert len(cache.read_bytes().splitlines()) == measures.CHUNK
    read.clear()
    measure_clips(clips, cache)
    assert len(read) == len(clips) - measures.CHUNK


def test_a_script_without_a_main_guard_can_use_processes(clips, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{CHECK}print('once')\n")
    command = [sys.executable, script, Path(clips[0]).parent, tmp_path / "c.jsonl", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr


def damaged(line: bytes, **over) -> bytes:
    return json.dumps(json.loads(line) | over).encode()


DAMAGE = {
    "cut short": lambda line: line[:40],
    "zeros": lambda line: b"\0" * 30,
    "deep": lambda line: b"[" * 99_999,
    "a number": lambda line: b"7",
    "no path": lambda line: b'{"format": %d}' % measures.FORMAT,
    "a list": lambda line: damaged(line, measure=[1]),
    "another field": lambda line: damaged(line, measure={"wings": 2}),
}


@pytest.mark.parametrize("number", [1, 3])  # the last one as a kill leaves it
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_line_is_reported_and_measured_again(clips, tmp_path, read, kind, number):
    cache = tmp_path / "c.jsonl"
    first = measure_clips(clips[:4], cache)
    lines = cache.read_bytes().splitlines()
    lines[number] = DAMAGE[kind](lines[number])
    cache.write_bytes(b"\n".join(lines))
    read.clear()
    with pytest.warns(UserWarning, match=r"c\.jsonl: 1 damaged lines are left out"):
        assert measure_clips(clips[:4], cache) == first
    assert len(read) == 1
