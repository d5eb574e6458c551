"""What the monitor reads is what the process uses; what goes wrong in its thread is reported."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from helpers import CPU, until
from paths import python_path

from kit.tuning.monitor import Monitor, _Processes

MIB = 2**20


def alone(test: str) -> None:
    """`test` of this file in a process of its own: where others ran, their workers still end."""
    run = f"import test_monitor; test_monitor.{test}()"
    paths = {"PYTHONPATH": python_path(__file__)}
    subprocess.run([sys.executable, "-c", run], env=os.environ | paths, timeout=120, check=True)


def test_memory_that_was_given_back_is_still_in_the_summary():
    alone("memory_is_given_back")


def memory_is_given_back():
    with Monitor(CPU, every_s=0.02) as monitor:
        until(lambda: monitor.samples)
        first = monitor.newest.memory_bytes
        block = np.ones(200 * MIB, np.uint8)
        until(lambda: monitor.newest.memory_bytes > first + 150 * MIB)
        del block
        until(lambda: monitor.newest.memory_bytes < first + 100 * MIB)
    found = monitor.summary()
    assert found["memory_peak_bytes"] > first + 150 * MIB
    assert first < found["memory_mean_bytes"] < found["memory_peak_bytes"]
    assert found["memory_peak_share"] == found["memory_peak_bytes"] / CPU.memory_bytes
    assert found["count"] >= 3 and not found["error"] and "psutil" in found["source"]
    assert json.loads(json.dumps(found)) == found


def test_load_is_the_share_of_the_cores_that_was_busy():
    probe = _Processes(cores=2)
    assert probe.read().load is None, "the first reading has nothing to compare with"
    end_s = time.process_time() + 0.3
    while time.process_time() < end_s:
        pass
    assert 0.05 < probe.read().load < 0.75  # one of two cores at most, others may hold it up
    time.sleep(0.3)
    assert probe.read().load < 0.2


def test_children_count_and_may_end():
    alone("a_child_ends")


def a_child_ends():
    code = "block = bytearray(100 * 2**20); print(1, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    before = _Processes(cores=2).read().memory_bytes
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.readline()
        probe = _Processes(cores=2)
        both = probe.read().memory_bytes
        child.communicate(b"\n")
    assert both > before + 100 * MIB
    assert probe.read().memory_bytes < both - 100 * MIB


def test_an_error_in_the_thread_ends_sampling_and_is_stated(monkeypatch):
    monkeypatch.setattr(_Processes, "read", lambda self: 1 / 0)
    with Monitor(CPU, every_s=0.01) as monitor:
        until(lambda: monitor.error)
    assert monitor.summary()["error"] == "sampling ended: ZeroDivisionError: division by zero"
    assert monitor.summary()["memory_peak_bytes"] is None
    assert "ZeroDivisionError" in monitor.describe()


def test_it_stops_at_once_may_restart_and_leaves_no_thread():
    monitor = Monitor(CPU, every_s=60)
    for times in (1, 2):
        with monitor:
            until(lambda: monitor.samples == times)  # noqa: B023
    assert monitor.summary()["count"] == 2
    assert not any(t.name == "monitor" for t in threading.enumerate())


def test_the_status_line_has_memory_and_load():
    monitor = Monitor(CPU, every_s=0.02)
    assert monitor.describe() == ""
    with monitor:
        until(lambda: monitor.samples >= 3)
    assert monitor.describe().startswith("CPU: ") and monitor.describe().endswith("% busy")
    assert "of 8 GiB" in monitor.describe()


def test_a_gpu_whose_load_cannot_be_read_says_why(monkeypatch):
    def missing():
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 * 2**30, 8 * 2**30))
    with Monitor(dataclasses.replace(CPU, device="cuda"), every_s=0.01) as monitor:
        until(lambda: monitor.samples >= 2)
    found = monitor.summary()
    assert found["load_mean"] is None and "nvidia-ml-py" in found["load_note"]
    assert found["memory_peak_share"] == 0.25 and not found["error"]
    assert monitor.describe() == "CUDA: 2.00 of 8 GiB"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_is_read_whole():
    from kit.base.hardware import detect

    block = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    with Monitor(detect(), every_s=0.05) as monitor:
        until(lambda: monitor.samples >= 3)
    found = monitor.summary()
    assert found["memory_peak_bytes"] >= block.numel() and not found["error"]
    assert (found["load_mean"] is None) == bool(found["load_note"])
