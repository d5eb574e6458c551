"""What the monitor reads is what the process uses; a profile is of the right steps, and opens."""

import dataclasses
import gzip
import json
import re
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from helpers import CPU, GPT, TRAIN, random_batches, tiny_model, until

from kit.settings import SpeedConfig
from kit.training.loop import train
from kit.training.trainer import Trainer
from kit.tuning.monitor import ACTIVE, STATUS, WAIT, WARMUP, Monitor, Processes, StepProfiler

MIB = 2**20


CHILD = "block = bytearray(100 * 2**20); print(1, flush=True); input()"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]]); "
PARENT += "print(2, flush=True); input()"


def test_memory_of_a_process_and_its_children_is_sampled_until_they_end():
    command = [sys.executable, "-c", PARENT, CHILD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, **pipes) as parent:
        parent.stdout.readline()
        probe = Processes(threads=2)
        probe.own = psutil.Process(parent.pid)
        both_bytes = probe.read().memory_bytes
        parent.stdin.write("\n")
        parent.stdout.readline()
        alone_bytes = probe.read().memory_bytes
        parent.communicate("\n")
    assert 0 < alone_bytes < both_bytes - 100 * MIB


def test_load_is_the_share_of_the_threads_that_was_busy():
    probe = Processes(threads=2)
    assert probe.read().load is None, "the first reading has nothing to compare with"
    end_s = time.process_time() + 0.3
    while time.process_time() < end_s:
        pass
    assert 0.05 < probe.read().load < 0.75  # one of two threads at most, others may hold it up
    time.sleep(0.3)
    assert probe.read().load < 0.2


def test_an_error_in_the_thread_ends_sampling_and_is_stated(monkeypatch):
    monkeypatch.setattr(Processes, "read", lambda self: 1 / 0)
    with Monitor(CPU, every_s=0.01) as monitor:
        until(lambda: monitor.error)
    assert monitor.summary()["error"] == "sampling ended: ZeroDivisionError: division by zero"
    assert monitor.summary()["memory_peak_bytes"] is None


def test_it_stops_at_once_may_restart_and_leaves_no_thread():
    monitor = Monitor(CPU, every_s=60)
    for times in (1, 2):
        with monitor:
            until(lambda: len(monitor.samples) == times)  # noqa: B023
    assert len(monitor.samples) == 2
    found = monitor.summary()
    assert found["memory_peak_bytes"] == max(s.memory_bytes for s in monitor.samples)
    assert found["memory_peak_share"] == found["memory_peak_bytes"] / CPU.memory_bytes
    assert not any(t.name == "monitor" for t in threading.enumerate())


def test_a_gpu_whose_load_cannot_be_read_says_why(monkeypatch):
    def missing():
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 * 2**30, 8 * 2**30))
    with Monitor(dataclasses.replace(CPU, device="cuda"), every_s=0.01) as monitor:
        until(lambda: len(monitor.samples) >= 2)
    found = monitor.summary()
    assert found["load_mean"] is None and "nvidia-ml-py" in found["load_note"]
    assert found["memory_peak_share"] == 0.25 and not found["error"]
    assert found["ram_peak_bytes"] > 50 * MIB, "this process, in the machine's RAM"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_is_read_whole():
    from kit.base.hardware import detect

    block = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    with Monitor(detect(), every_s=0.05) as monitor:
        until(lambda: len(monitor.samples) >= 3)
    found = monitor.summary()
    assert found["memory_peak_bytes"] >= block.numel() and not found["error"]
    assert (found["load_mean"] is None) == bool(found["load_note"])


WHOLE = WAIT + WARMUP + ACTIVE


def run(profiler, steps: int, breaks_at: int = 0) -> None:
    """A real run, profiled after its second step, which may raise at another."""
    config = dataclasses.replace(TRAIN, max_steps=steps)
    state = Trainer(tiny_model(layers=1), config, SpeedConfig(fused_adamw=True), CPU)
    with profiler:
        for event in train(state, random_batches(GPT)):
            if event.step == 2:
                profiler.request()
            if event.step == breaks_at:
                raise ValueError("broken")
            profiler(event)


def test_it_waits_warms_up_and_records_six_steps(tmp_path):
    done = StepProfiler(tmp_path / "deep")
    run(done, steps=WHOLE + 4)
    first = 2 + WAIT + WARMUP + 1
    assert f"Profile of steps {first} to {first + ACTIVE - 1}: " in done.status
    assert (done.folder / STATUS).read_text() == done.status
    (table,) = done.folder.glob("*.operators.txt")
    assert "aten::addmm" in table.read_text() and "Optimizer.step#AdamW.step" in table.read_text()
    assert len(re.findall(r" \d+%", done.status)) == 3, "the operators that cost most"
    (trace,) = done.folder.glob("*.json.gz")
    with gzip.open(trace) as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in names) == ACTIVE
    assert "aten::addmm" in names


@pytest.mark.parametrize("more", [0, WAIT + 1, WAIT + WARMUP + 3])
def test_a_run_that_ends_before_its_profile_does_says_so(tmp_path, more, recwarn):
    profiler = StepProfiler(tmp_path)
    run(profiler, steps=2 + more)
    assert profiler.profile is None and "no profile: the run ended" in profiler.status
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]
    assert not [w for w in recwarn if "profiler" in str(w.filename)]


def test_an_error_of_the_run_closes_the_profile_and_is_not_hidden(tmp_path):
    profiler = StepProfiler(tmp_path)
    with pytest.raises(ValueError, match="broken"):
        run(profiler, steps=40, breaks_at=2 + WAIT + WARMUP + 2)
    assert "no profile" in profiler.status


def test_a_profile_that_fails_is_reported_and_the_run_continues(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    profiler = StepProfiler(blocked)
    run(profiler, steps=WHOLE + 4)
    assert profiler.status.startswith("The profile failed.")
