"""Several processes train as one does: the same losses, the same files, and nothing lost."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks_job import RUNS, SLOW, session, train

from kit.base.errors import KitError
from kit.training import checkpoint
from kit.training.logs import read_log
from kit.training.ranks import Ranks, join_ranks

JOB = Path(__file__).with_name("ranks_job.py")
ROOT = JOB.parent.parent.parent
KILLS = 10 if SLOW else 1
NUMBERS = ("loss", "grad_norm", "val_loss", "ema_val_loss")


def torchrun(processes: int, folder: Path, *names: str) -> subprocess.Popen:
    words = ["--standalone", f"--nproc-per-node={processes}", str(JOB), str(folder), *names]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    env = dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **pipes)


def done(processes: int, folder: Path, *names: str) -> None:
    process = torchrun(processes, folder, *names)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, f"{out}\n{err}"


def rows(folder: Path, name: str) -> list[dict]:
    return read_log(folder / name / "train.jsonl")


def figures(row: dict) -> list:
    return [row[name] for name in NUMBERS]


def files(folder: Path, name: str) -> set[str]:
    return {path.name for path in (folder / name).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    for name in ("parity", "started alone"):
        train(session(folder, name))
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """The runs of two processes, in one start of torchrun; "started alone" is resumed."""
    folder = tmp_path_factory.mktemp("two")
    train(session(folder, "started alone"), stop_at=5)
    names = ["parity", "whole", "stopped", "started alone", "started together", "killed"]
    done(2, folder, *names, "out of memory")
    return folder


def require_parity(found: list[dict], wanted: list[dict]) -> None:
    for row in (*found, *wanted):
        row["cer"] = row["gate"] and row["gate"]["cer"]
    exact = ("step", "tokens", "lr")
    assert [[r[n] for n in exact] for r in found] == [[r[n] for n in exact] for r in wanted]
    for name in (*NUMBERS, "cer"):
        values, others = ([r[name] for r in log if r[name] is not None] for log in (found, wanted))
        assert values == pytest.approx(others, rel=1e-5 if name == "grad_norm" else 1e-6), name


@pytest.mark.long
def test_two_processes_train_as_one_does(alone, two):
    require_parity(rows(two, "parity"), rows(alone, "parity"))
    assert len(rows(two, "parity")) == 30
    assert files(two, "parity") == files(alone, "parity"), "the files are those of one process"


def test_a_single_process_gathers_its_own_value():
    ranks = Ranks()
    assert ranks.sums(3, 0.5) == (3, 0.5) and ranks.any(True) and not ranks.any(False)
    assert ranks.all_gather("a") == ["a"] and ranks.from_main(lambda: 7) == 7
    assert ranks.share([1, 2]) == [1, 2] and ranks.is_main


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(KitError, match="--nproc-per-node=1"):
        join_ranks()


@pytest.mark.long
def test_memory_that_runs_out_on_one_rank_cuts_the_passes_of_all(two, tmp_path):
    train(session(tmp_path, "out of memory"))
    found, wanted = rows(two, "out of memory"), rows(tmp_path, "out of memory")
    require_parity(found, wanted)
    assert "passes now have 2 rows instead of 4" in found[0]["note"]
    assert not any("out of memory" in row["note"] for row in found[1:])


@pytest.mark.long
def test_a_stop_on_one_rank_stops_all_and_the_rest_is_the_same_to_the_bit(two):
    found, wanted = rows(two, "stopped"), rows(two, "whole")
    assert [figures(row) for row in found] == [figures(row) for row in wanted]
    assert [row["step"] for row in found if "resumed from step 5" in row["note"]] == [6]
    for name in ("model-raw", "model-ema"):
        path = f"{name}.safetensors"
        assert (two / "stopped" / path).read_bytes() == (two / "whole" / path).read_bytes()


@pytest.mark.long
def test_each_rank_draws_its_own_dropout_and_a_checkpoint_has_all_states(two):
    tree, _ = checkpoint.load_newest(two / "whole" / "checkpoints")
    other = tree["random"]["ranks"]["1"]["cpu"]
    assert other.shape == tree["random"]["cpu"].shape
    assert not other.equal(tree["random"]["cpu"])


@pytest.mark.long
def test_a_run_resumes_with_another_number_of_processes(alone, two, tmp_path):
    require_parity(rows(two, "started alone"), rows(alone, "started alone"))
    shutil.copytree(two / "started together", tmp_path / "started together")
    assert len(rows(tmp_path, "started together")) == 5
    train(session(tmp_path, "started together"))
    require_parity(rows(tmp_path, "started together"), rows(alone, "started alone"))


def killed(folder: Path, name: str, rng: random.Random) -> None:
    """Start the run `name`, or resume it, and kill one of its two processes a little later."""
    before = len(rows(folder, name))
    process = torchrun(2, folder, name)
    end_s = time.monotonic() + 120
    while len(rows(folder, name)) < before + 3:
        assert process.poll() is None and time.monotonic() < end_s, process.communicate()
        time.sleep(0.05)
    time.sleep(rng.uniform(0, 0.2))
    victim = rng.randint(0, 1)
    os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Another of the 2 processes that work together has ended" in err
    assert "the last checkpoint is" in err and "Run the same command again" in err
    tree, notes = checkpoint.load_newest(folder / name / "checkpoints")
    assert not notes and tree["run"]["step"] >= rows(folder, name)[-1]["step"] - 1
    assert len(rows(folder, name)) < RUNS[name][0].max_steps


@pytest.mark.long
def test_a_killed_process_ends_the_run_with_a_sentence_and_loses_nothing(tmp_path, two):
    """Whichever it is, at a random moment: KIT_SLOW=1 does so ten times, resuming each time."""
    rng = random.Random(0)
    for _ in range(KILLS):
        killed(tmp_path, "killed", rng)
    done(2, tmp_path, "killed")
    found = [figures(row) for row in rows(tmp_path, "killed")]
    assert found == [figures(row) for row in rows(two, "killed")]
