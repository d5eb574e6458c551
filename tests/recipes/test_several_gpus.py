"""The panel's "GPUs": torchrun trains in processes of its own, and the panel shows it as ever."""

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import until
from test_train import active
from torch.distributed.run import parse_args as torchrun_options

from kit.__main__ import parser
from kit.recipes import train_plan
from kit.recipes.several_gpus import DistantProfiler, gpus_of, train_words
from kit.recipes.train import Training
from kit.training import checkpoint
from kit.training.logs import read_log
from kit.training.settings import TrainError
from kit.training.torchrun import ANOTHER_ENDED, NewRows, TorchrunRun, as_event

ROOT = Path(__file__).resolve().parent.parent.parent
LONG = {"train": {"steps": 400, "checkpoint_every": 50, "val_every": 400, "gate_every": 0}}


def kept(folder: Path, sections: dict):
    """A run whose settings a command line of its own finds, too."""
    run = active(folder)
    run.begin()
    small = {"data": run.section("data"), "model": run.section("model"), **sections}
    return run.keep_settings(small)


def test_there_is_a_choice_only_where_there_are_several(tmp_path, monkeypatch):
    run = active(tmp_path)
    assert gpus_of(run) == {}, "one CPU"
    monkeypatch.setenv("KIT_RANKS", "4")
    assert gpus_of(run) == {"gpus": 1}
    (tmp_path / "gpus").write_text("3")
    assert gpus_of(run) == {"gpus": 3}, "as the last time"
    monkeypatch.setenv("KIT_RANKS", "2")
    assert gpus_of(run) == {"gpus": 2}, "no more than there are"


def test_the_command_has_what_the_panel_was_asked(tmp_path):
    words = train_words(active(tmp_path), {"sdpa": True}, {"steps": 7, "quota_gb": 0})
    assert words[:5] == ["kit", "train", "--run", tmp_path.name, "--switches"]
    assert words[5:] == ['{"sdpa": true}', "--steps", "7"]


def test_a_log_is_followed_through_lines_in_the_making_and_new_beginnings(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"step": 1}\n')
    new = NewRows(path)
    assert new.read() == []
    with path.open("a") as file:
        file.write('{"step": 2}\n{"st')
    assert new.read() == [{"step": 2}] and new.read() == []
    path.write_text('{"step": 1}\n')
    assert new.read() == [{"step": 1}]
    path.unlink()
    assert new.read() == []


def test_an_event_is_what_its_row_says():
    row = {"step": 3, "steps": 9, "loss": None, "lr": 0.1, "grad_norm": 1.0, "tokens": 5}
    event = as_event(row | {"step_s": 0.1, "memory_bytes": 7, "wall_s": 1.0, "note": "a"})
    assert event.loss != event.loss and event.note == "a" and event.gate is None


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that two processes have trained under a panel until Stop: (folder, training)."""
    folder = tmp_path_factory.mktemp("runs") / "shared"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIT_RANKS", "2")
        training = Training(kept(folder, LONG))
        training.panel("live")
        view = training.shown.view
        assert view.numbers["gpus"].max == 2
        view.numbers["gpus"].value = 2
        view.start.click()
        until(lambda: len(read_log(folder / "train.jsonl")) >= 3 or training.shown.ended.is_set())
        later = TorchrunRun(folder)  # as a kernel that was started anew finds it
        assert later.alive and later.process is None and later.main_rank.what == "training"
        assert next(later.events(threading.Event())).step > 3
        view.profile.click()
        until(lambda: "Profile of steps" in training.profiler.said or training.shown.ended.is_set())
        view.stop.click()
        training.wait()
        assert not later.alive
    return folder, training


def test_stop_ends_them_with_a_checkpoint_and_the_panel_says_so(stopped):
    folder, training = stopped
    rows = read_log(folder / "train.jsonl")
    assert 3 <= len(rows) < 400
    assert "with a checkpoint to go on from" in training.shown.view.status.value
    tree, notes = checkpoint.load_newest(folder / "checkpoints")
    assert not notes and tree["run"]["step"] == rows[-1]["step"]
    assert "1" in tree["random"]["ranks"], "two have trained it"
    assert [row["step"] for row in training.shown.rows] == [row["step"] for row in rows]
    assert not (folder / "train.lock").exists()


def test_the_profile_is_that_of_the_main_process(stopped):
    folder, training = stopped
    assert "opens in ui.perfetto.dev" in training.profiler.said
    assert list((folder / "profile").glob("*.operators.json")) and training.profiler.table()


def test_the_same_run_goes_on_in_this_process_alone(stopped, tmp_path):
    before = read_log(stopped[0] / "train.jsonl")
    folder = tmp_path / "shared"
    shutil.copytree(stopped[0], folder)
    reached = before[-1]["step"]
    training = Training(active(folder, **LONG), steps=reached + 2)
    training.panel("plain")
    rows = read_log(folder / "train.jsonl")
    assert [row["step"] for row in rows[-2:]] == [reached + 1, reached + 2]
    assert f"resumed from step {reached}" in rows[-2]["note"]


def test_what_the_processes_could_not_do_is_told_in_their_words(tmp_path):
    run = TorchrunRun(tmp_path)
    environment = dict(os.environ, KIT_RUNS=str(tmp_path), KIT_PRESET="no such preset")
    run.begin(["kit", "train", "--run", "none"], 1, environment)
    with pytest.raises(TrainError, match="There is no preset `no such preset`"):
        list(run.events(threading.Event()))


def test_who_failed_is_heard_before_who_only_lost_another(tmp_path):
    run = TorchrunRun(tmp_path)
    words = {
        0: f"Another of the 2 {ANOTHER_ENDED}, or cannot be reached.",
        1: "The disk is full.\n[rank1]:[W1123 10:00:00.1 ProcessGroupNCCL.cpp:1538] WARNING: ...",
    }
    for rank, said in words.items():
        path = tmp_path / "processes" / "job" / "attempt_0" / str(rank) / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text(f"{said}\n")
    (tmp_path / "processes" / "torchrun.log").write_text("exitcode: 2\n")
    assert run.last_words().startswith("The disk is full. (All that")


def test_an_interrupt_of_the_kernel_and_its_children_is_not_heard_by_the_training(tmp_path):
    run = TorchrunRun(tmp_path)
    run.begin(["kit", "--help"], 1, dict(os.environ))
    assert os.getpgid(run.process.pid) != os.getpgid(0)
    assert run.process.wait(timeout=120) == 0


def test_what_is_in_training_already_is_planned_and_not_tried(tmp_path, monkeypatch):
    """Its processes have the memory by now, that a trial of this one would want besides."""
    training = Training(active(tmp_path))
    monkeypatch.setattr(TorchrunRun, "main_rank", "another process")
    monkeypatch.setattr(train_plan, "preflight", None)
    assert "not tried (the run is in training at this moment)" in str(training.fits())
    assert training.session.validation and training.verdict.fits


def test_a_profile_is_asked_of_whoever_takes_the_steps(tmp_path):
    asked = []
    profiler = DistantProfiler(tmp_path)
    profiler.elsewhere = lambda: not asked.append(1)
    profiler.asked.set()
    profiler(None)
    assert asked == [1] and profiler.said == "Profiling in the main process."


def test_what_several_processes_cannot_share_is_not_begun_by_them(tmp_path):
    words = ["--standalone", "--nproc-per-node=2", "-m", "--", "kit", "evaluate", "--run", "none"]
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env=dict(os.environ, KIT_RUNS=str(tmp_path), KIT_PRESET="tiny"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode != 0 and not (tmp_path / "none").exists()
    assert "`evaluate` runs in one process, and torchrun has started 2: leave" in found.stderr


def test_the_command_of_the_readme_is_one_that_torchrun_takes():
    (words,) = re.findall(r"^torchrun (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    options = torchrun_options(words.split())
    assert options.module and options.training_script == "kit"
    assert parser().parse_args(options.training_script_args).run == "mine"
