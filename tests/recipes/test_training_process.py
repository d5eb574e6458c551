"""A training in processes of its own: it outlives the kernel, and any process may stop it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import unchecked, until
from made_runs import active, saved
from paths import python_path
from torch.distributed.run import parse_args as torchrun_options

from kit.__main__ import parser
from kit.base.lock import current_holder
from kit.recipes import training_plan
from kit.recipes.panel import PanelSettings
from kit.recipes.train import Training
from kit.training import checkpoint
from kit.training.logs import read_log
from kit.training.process import LOCK, PROFILE, STOP, TrainingProcess
from kit.training.ranks import ANOTHER_ENDED
from kit.tuning.monitor import STATUS

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = {"max_steps": 3000, "warmup_steps": 40, "save_steps": 50, "eval_steps": 400}
LONG = {"train": STEPS | {"early_stopping_patience": 0, "gate_every": 0}}
KERNEL = """
import sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
from made_runs import saved
from kit.notebook import train_panel
from kit.recipes.train import Training
train_panel.is_watched = lambda: True  # a person sees the panel
if __name__ == "__main__":  # its trial processes import this file, too
    training = Training(saved(Path({folder!r}), **{long!r}))
    training.checks = lambda: (training.fits,)
    training.panel()
    training.shown.start_clicked.set()
    time.sleep(600)
"""


def steps_logged(folder: Path) -> int:
    return len(read_log(folder / "train.jsonl"))


def test_a_log_is_followed_and_requests_are_files_that_a_start_clears(tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]
    one, two, three = (json.dumps(row) + "\n" for row in rows)
    path.write_text(one)
    process = TrainingProcess(tmp_path)
    assert process.new_rows() == []
    with path.open("a") as file:
        file.write(two + '{"st')
    assert process.new_rows() == [rows[1]] and process.new_rows() == []
    path.write_text(one)
    assert process.new_rows() == [rows[0]]
    path.unlink()
    assert process.new_rows() == []
    path.write_text(one + '{"st')  # as a kill or a full disk leaves it
    process = TrainingProcess(tmp_path)
    with path.open("r+") as file:  # as training resumes it
        file.truncate(len(one))
        file.seek(0, os.SEEK_END)
        file.write(two + "no row\n" + three)
    assert process.new_rows() == rows[1:]
    process.request(STOP)
    process.request(PROFILE)
    assert {path.name for path in (tmp_path / "requests").iterdir()} == {STOP, PROFILE}
    process.start(["--help"], dict(os.environ))
    assert not list((tmp_path / "requests").iterdir())
    assert os.getpgid(process.process.pid) != os.getpgid(0), "an interrupt must not reach it"
    assert process.process.wait(timeout=120) == 0 and process.error() is None


@pytest.mark.long
def test_a_training_outlives_its_kernel_and_a_new_panel_stops_it(tmp_path, watched):
    folder = tmp_path / "mine"
    folder.mkdir()
    script = tmp_path / "kernel.py"
    paths = [*python_path(__file__).split(os.pathsep), str(ROOT / "tests" / "recipes")]
    script.write_text(KERNEL.format(paths=paths, folder=str(folder), long=LONG))
    kernel = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    try:
        until(lambda: steps_logged(folder) >= 3 or kernel.poll() is not None)
        assert kernel.poll() is None
        os.killpg(kernel.pid, signal.SIGKILL)
        kernel.wait()
        before = steps_logged(folder)
        until(lambda: steps_logged(folder) > before + 2)
        training = Training(active(folder, **LONG))
        assert training.process.running
        assert current_holder(training.process.folder / LOCK).pid != kernel.pid
        training.panel()
        view = training.shown.view
        until(lambda: not view.stop.disabled)
        view.profile.click()
        until(lambda: list((folder / "profile").glob("*.operators.txt")))
        view.stop.click()
        assert training.wait().line.startswith("Stopped at step")
        training.shown.retired.set()
    finally:
        TrainingProcess(folder).request(STOP)
    rows = read_log(folder / "train.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) < 3000
    tree, notes = checkpoint.load_newest(folder / "checkpoints")
    assert not notes and tree["run"]["step"] == rows[-1]["step"]
    assert "Profile of steps" in (folder / "profile" / STATUS).read_text()


@pytest.mark.long
def test_two_processes_train_together_and_one_resumes_from_their_checkpoint(
    tmp_path, monkeypatch, watched
):
    folder = tmp_path / "together"
    folder.mkdir()
    monkeypatch.setenv("KIT_RANKS", "2")
    training = Training(saved(folder, **LONG))
    training.checks = lambda: (training.fits,)
    training.panel()
    view = training.shown.view
    view.fields["gpus"].text.value = "2"
    view.start.click()
    until(lambda: steps_logged(folder) >= 3 or training.shown.ended.is_set())
    view.stop.click()
    training.wait()
    training.shown.retired.set()
    rows = read_log(folder / "train.jsonl")
    assert 3 <= len(rows) < 3000
    assert "with a checkpoint" in training.shown.view.status.value
    tree, notes = checkpoint.load_newest(folder / "checkpoints")
    assert not notes and tree["run"]["step"] == rows[-1]["step"]
    assert "1" in tree["random"]["ranks"], "two have trained it"
    assert not (folder / "train.lock").exists()
    reached = rows[-1]["step"]
    folder = shutil.copytree(folder, tmp_path / "alone")
    list(unchecked(Training(active(folder, **LONG), max_steps=reached + 2)).run())
    rows = read_log(folder / "train.jsonl")
    assert [row["step"] for row in rows[-2:]] == [reached + 1, reached + 2]
    assert f"resumed from step {reached}" in rows[-2]["note"]


def test_why_a_process_failed_is_said_in_its_own_words(tmp_path):
    process = TrainingProcess(tmp_path)
    environment = dict(os.environ, KIT_RUNS=str(tmp_path), KIT_PRESET="no such preset")
    process.start(["setup", "--run", "none"], environment)
    until(lambda: not process.running)
    assert "There is no preset `no such preset`" in str(process.error())


def test_a_process_that_failed_is_believed_before_one_that_lost_another(tmp_path):
    process = TrainingProcess(tmp_path)
    lines = {
        0: f"Another of the 2 {ANOTHER_ENDED}, or cannot be reached.",
        1: "The disk is full.\n[rank1]:[W1123 10:00:00.1 ProcessGroupNCCL.cpp:1538] WARNING: ...",
    }
    for rank, line in lines.items():
        folder = tmp_path / "processes" / "job" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"{line}\n")
    (tmp_path / "processes" / "stderr.log").write_text("exitcode: 2\n")
    process.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
    process.process.wait()
    assert str(process.error()).startswith("The disk is full. (")
    (folder / "stderr.log").unlink()
    process.process.returncode = -9
    assert "SIGKILL" in str(process.error())


@pytest.mark.long
def test_what_several_processes_cannot_share_is_refused_and_the_readmes_command_is_taken(tmp_path):
    words = ["--standalone", "--nproc-per-node=2", "-m", "--", "kit", "evaluate", "--run", "none"]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env=dict(os.environ, KIT_RUNS=str(tmp_path), KIT_PRESET="tiny"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode != 0 and not (tmp_path / "none").exists()
    assert "`evaluate` runs in one process, but torchrun has started 2" in ended.stderr
    (words,) = re.findall(r"^torchrun (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    options = torchrun_options(words.split())
    assert options.module and options.training_script == "kit"
    assert parser().parse_args(options.training_script_args).run == "mine"


def test_gpus_are_offered_and_what_trains_already_is_not_tried(tmp_path, monkeypatch):
    training = Training(active(tmp_path))
    for processes, offered in (("", False), ("4", True)):
        monkeypatch.setenv("KIT_RANKS", processes)
        names = [field.name for field in PanelSettings(training).fields()]
        assert ("gpus" in names) == offered
    monkeypatch.setattr(TrainingProcess, "running", True)
    monkeypatch.setattr(training_plan, "in_process", None)
    assert "is training at this moment" in str(training.fits())
    assert training.verdict.fits
