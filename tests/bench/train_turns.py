"""How `bench_train.py` measures: steps in turns in one process, peak memory in one of its own."""

import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rows import result
from train_steps import Step


def seconds(contestants: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round but a first one, by contestant; they take turns."""
    found = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, step in contestants.items():
            started_s = time.perf_counter()
            loss = step()
            assert math.isfinite(loss), f"{name}: loss {loss}"
            if number:
                found[name].append(time.perf_counter() - started_s)
    for name, values in found.items():
        middle, best = 1000 * statistics.median(values), 1000 * min(values)
        print(f"  {name}: median {middle:,.0f} ms, best {best:,.0f} ms", flush=True)
    return found


def against(row: str, kit: list[float], peer: str, other: list[float]) -> dict:
    ratio = statistics.median(b / a for a, b in zip(kit, other))
    ms, peer_ms = (1000 * statistics.median(found) for found in (kit, other))
    return result(row, ms, "ms", peer, peer_ms, ratio)


def apart(code: str) -> float:
    """The number that `code` prints last, run by a Python of its own."""
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here), str(here.parent.parent)])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(run.stdout.splitlines()[-1])


def resident_peak_mb() -> float:
    """Peak resident memory of this process so far.

    Not getrusage's: that is of the process which started this one, if that was larger.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
