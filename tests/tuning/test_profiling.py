"""A profile of real training steps: the right steps, a trace that opens, the matmuls in a table."""

import dataclasses
import gzip
import json
import subprocess
import sys
import threading

import pytest
from helpers import CPU, GPT, TRAIN, random_batches, tiny_model
from paths import python_path

from kit.training.loop import train
from kit.training.run import listen
from kit.training.switches import SpeedConfig
from kit.training.trainer import Trainer
from kit.tuning.profiling import ACTIVE, WAIT, WARMUP, StepProfiler

WHOLE = WAIT + WARMUP + ACTIVE


def run(profiler, steps: int, ask_at: int = 2, breaks_at: int = 0) -> list:
    """A real run in a thread of its own, as under the panel; what it raised."""
    config, errors = dataclasses.replace(TRAIN, max_steps=steps), []

    def ask(event):
        if event.step == ask_at:
            profiler.request()
        if event.step == breaks_at:
            raise ValueError("broken")

    def work():
        state = Trainer(tiny_model(layers=1), config, SpeedConfig(fused_adamw=True), CPU)
        try:
            with profiler:
                list(listen(train(state, random_batches(GPT)), ask, profiler))
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    profiler = StepProfiler(tmp_path_factory.mktemp("profile") / "deep")
    run(profiler, steps=WHOLE + 4)
    return profiler


def trace_of(profiler) -> list[dict]:
    with gzip.open(profiler.folder / profiler.result["trace"]) as file:
        return json.load(file)["traceEvents"]


def test_it_waits_warms_up_and_records_six_steps(done):
    first = 2 + WAIT + WARMUP + 1
    assert done.result["steps"] == [first, first + ACTIVE - 1] and done.result["complete"]
    calls = {o["name"]: o["calls"] for o in done.result["operators"]}
    assert calls["Optimizer.step#AdamW.step"] == ACTIVE
    assert f"Profile of steps {first} to {first + ACTIVE - 1}: aten::" in done.said


def test_the_trace_opens_and_holds_the_recorded_steps(done):
    names = [event.get("name", "") for event in trace_of(done)]
    assert sum(name.startswith("ProfilerStep#") for name in names) == ACTIVE
    assert "aten::addmm" in names


def test_the_table_is_beside_the_trace_and_has_the_matmuls(done):
    (path,) = done.folder.glob("*.operators.json")
    assert json.loads(path.read_text()) == done.result
    rows = {o["name"]: o for o in done.result["operators"]}
    assert {"aten::addmm", "aten::mm"} <= rows.keys()
    times = [o["self_ms"] for o in done.result["operators"]]
    assert times == sorted(times, reverse=True) and times[0] > 0
    assert 0.5 < sum(o["share"] for o in done.result["operators"]) <= 1 + 1e-9
    assert any(o["memory_bytes"] > 0 for o in done.result["operators"])
    assert list(done.table(3)) == [o["name"] for o in done.result["operators"][:3]]
    assert all("calls" in words for words in done.table().values())


def test_without_a_request_nothing_is_left(tmp_path):
    profiler = StepProfiler(tmp_path / "profile")
    run(profiler, steps=3, ask_at=0)
    assert profiler.profile is None and not profiler.said and profiler.table() == {}
    assert not (tmp_path / "profile").exists()


def test_a_run_that_ends_while_recording_leaves_an_incomplete_profile(tmp_path):
    profiler = StepProfiler(tmp_path)
    run(profiler, steps=2 + WAIT + WARMUP + 3)
    assert profiler.result["steps"] == [7, 9] and not profiler.result["complete"]
    assert "incomplete" in profiler.said
    assert any(event.get("name") == "aten::addmm" for event in trace_of(profiler))


@pytest.mark.parametrize("more", [0, 1, WAIT, WAIT + 1, WAIT + WARMUP])
def test_a_run_that_ends_before_recording_says_so(tmp_path, more, recwarn):
    profiler = StepProfiler(tmp_path)
    run(profiler, steps=2 + more)
    assert profiler.result is None and profiler.profile is None
    assert "ended before the first recorded step" in profiler.said
    assert not list(tmp_path.iterdir())
    assert not [w for w in recwarn if "profiler" in str(w.filename)]


def test_an_error_of_the_run_closes_the_profile_and_is_not_hidden(tmp_path):
    profiler = StepProfiler(tmp_path)
    for times in (1, 2):  # and another one can begin
        (error,) = run(profiler, steps=40, breaks_at=2 + WAIT + WARMUP + 2)
        assert str(error) == "broken" and "incomplete" in profiler.said
        assert len(profiler.result["operators"]) > 10, times


def test_a_profile_that_fails_is_reported_and_the_run_continues(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    profiler = StepProfiler(blocked)
    assert run(profiler, steps=2 + WAIT + WARMUP + 1) == []  # closed at the end
    assert profiler.said.startswith("The profile failed.")
    monkeypatch.setattr("kit.tuning.profiling.schedule", lambda **_: 1 / 0)
    assert run(profiler, steps=5) == []
    assert profiler.said.startswith("The profile failed.")


def test_nothing_alarming_is_printed(tmp_path):
    """Profiled outside the thread that imported torch, kineto writes ERROR under the cell."""
    body = (
        "import sys; from test_profiling import *\n"
        "from pathlib import Path\n"
        "profiler = StepProfiler(Path(sys.argv[1])); profiler.request()\n"
        "run(profiler, steps=WAIT + WARMUP + 3, ask_at=0); print(profiler.said)"
    )
    paths = {"PYTHONPATH": python_path(__file__), "KIT_RUNS": str(tmp_path)}
    command = [sys.executable, "-c", body, str(tmp_path)]
    done = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=120)
    assert "Profile of steps" in done.stdout and "ERROR" not in done.stderr
