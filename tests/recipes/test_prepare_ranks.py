"""Preparation in several processes: the files of one, to the byte, whoever is killed on the way."""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import corpus

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = Path(__file__).with_name("work_job.py")
SLOW = "KIT_SLOW" in os.environ  # ten kills, with one, two and four processes
# Parts and shards small enough that every rank has some of each; what is longer than 3 s is cut.
ASKED = (
    "--preset tiny --max-clip-seconds 3 --max-rejected-percent 100 --set align.batch=1 "
    "data.shard=5 codec.steps=8 codec.sharpen_steps=1 recognizer.steps=8"
)

pytestmark = pytest.mark.long


def prepare(runs: Path, processes: int) -> subprocess.Popen:
    """`kit prepare`, by torchrun where there are several processes; what it says goes to a file."""
    words = [sys.executable, "-m"]
    if processes > 1:
        words += f"torch.distributed.run --standalone --nproc-per-node={processes} -m --".split()
    words += ["kit", "prepare", "--run", "mine", "--data", str(corpus()), *ASKED.split()]
    runs.mkdir(exist_ok=True)
    own = dict(os.environ, KIT_RUNS=str(runs), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    with open(runs / "said", "wb") as said:
        return subprocess.Popen(words, cwd=ROOT, env=own, stdout=said, stderr=said)


def said(runs: Path) -> str:
    return (runs / "said").read_text(encoding="utf-8")


def done(runs: Path, processes: int) -> dict[str, bytes]:
    """The files of a preparation that has ended.

    All but the record, which holds times, and what a kill left half-written.
    """
    assert prepare(runs, processes).wait(280) == 0, said(runs)
    found = {}
    for path in sorted(runs.rglob("*")):
        if path.is_file() and path.name[0] != "." and path.stem not in ("report", "said"):
            found[str(path.relative_to(runs))] = path.read_bytes()
    return found


def same(found: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []


def process_of(torchrun: subprocess.Popen, rank: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):  # one has just ended
        for process in psutil.Process(torchrun.pid).children():
            if process.environ().get("RANK") == str(rank):
                return process
    return None


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, bytes]:
    return done(tmp_path_factory.mktemp("alone") / "runs", 1)


def test_what_one_process_leaves_is_compared(alone):
    names = {Path(name).name for name in alone}
    assert {"ledger.jsonl", "measures.jsonl", "aligned.json", "tokenizer.model"} <= names
    assert {"codec.safetensors", "recognizer.safetensors"} <= names
    assert sum(name.startswith("codes-") for name in names) > 8
    assert sum(name.startswith("index-") for name in names) == 2, "also at 90 % of the speed"
    assert any("long/clips/cut" in name for name in alone), "some were cut"


def test_a_killed_process_ends_all_with_a_sentence_and_the_files_are_those_of_one(alone, tmp_path):
    runs = tmp_path / "runs"
    process = prepare(runs, 2)
    while not list((runs / "mine").glob("aligned.parts/*.json")):
        assert process.poll() is None, said(runs)
        time.sleep(0.02)
    process_of(process, 1).kill()
    assert process.wait(60) != 0
    assert "nother of the 2 processes" in said(runs)
    assert "the same command" in said(runs)
    assert said(runs).count("Traceback") == 1, "torchrun's own"
    same(done(runs, 2), alone)
    lines = [line for line in said(runs).splitlines() if line.startswith(("aligned:", "encoded:"))]
    assert any(line.startswith("aligned:") and "100 %" in line for line in lines)
    assert len([line for line in lines if "done in" in line]) == 2, "the main rank alone tells"


def test_progress_is_that_of_all_and_what_another_cannot_do_ends_them_with_its_words():
    words = ["--standalone", "--nproc-per-node=2", str(JOB)]
    job = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env=dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{JOB.parent}", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines = job.stdout.splitlines()
    done = [float(line.removeprefix("done: ")) for line in lines if line.startswith("done: ")]
    assert done == sorted(done) and done[-1] == 11.5 and len(done) > 2, job.stderr
    assert "of the main rank: 0, loaded by it: 0" in lines
    assert "the error: The drive of rank 1 is gone." in lines
    assert job.returncode != 0 and job.stderr.count("Traceback") == 1, "torchrun's own"


@pytest.mark.skipif(not SLOW, reason="minutes: KIT_SLOW=1")
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_leave_the_files_of_one(alone, tmp_path, processes):
    same(done(tmp_path / "runs", processes), alone)


@pytest.mark.skipif(not SLOW, reason="minutes: KIT_SLOW=1")
def test_ten_kills_at_random_moments_change_nothing(alone, tmp_path):
    """Of any rank, with one, two and four processes in turn, until ten were killed at work."""
    rng = random.Random(0)
    killed = []
    number = 0
    while len(killed) < 10:
        number += 1
        runs = tmp_path / f"runs{number}"
        while len(killed) < 10 and killed_at_work(runs, rng, killed):
            pass
        same(done(runs, rng.choice((1, 2, 4))), alone)
    print("\n".join(killed))


def killed_at_work(runs: Path, rng: random.Random, killed: list[str]) -> bool:
    """Resume a preparation and kill one of its processes; False where it was done before."""
    processes = rng.choice((1, 2, 4))
    process = prepare(runs, processes)
    while "run mine" not in said(runs) and process.poll() is None:
        time.sleep(0.02)
    after_s = rng.uniform(0, 8)
    end_s = time.monotonic() + after_s
    while process.poll() is None and time.monotonic() < end_s:
        time.sleep(0.02)
    rank = rng.randrange(processes)
    victim = process_of(process, rank) if processes > 1 else process
    if victim is None or process.poll() is not None or "Report:" in said(runs):
        process.wait(60)
        return False
    victim.kill()
    line = said(runs).splitlines()[-1][:60]
    killed.append(f"{processes} processes, rank {rank}, after {after_s:.1f} s: {line}")
    assert process.wait(60) != 0
    return True
