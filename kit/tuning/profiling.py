"""Where the time of a step goes: torch's profiler over ten steps of a run, at one click.

`StepProfiler` listens to step events. After a request it skips two steps, warms the profiler up for
two, records six, and writes a trace for Perfetto or TensorBoard and the top operators as a table.
Before a request it costs nothing.
"""

import gzip
import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from kit.base.files import write_atomic
from kit.base.formatting import describe_error
from kit.base.hardware import silence_profiler

WAIT = 2
WARMUP = 2
ACTIVE = 6  # steps
TOP = 25  # operators in the table
EXTRAS = {"profile_memory": True, "acc_events": True}  # one cycle only: nothing accumulates


class StepProfiler:
    """A listener to step events, and the button's `request()`.

    The trainer's thread calls it after each step and runs its steps inside `with profiler:`, so
    that a profile is closed and marked as incomplete if the run ends during it. The error of a
    failed profile is in `said`; it never ends the run.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.asked = threading.Event()
        self.ready = False
        self.profile = None
        self.first = 0  # of the profile in progress: the step at which it was requested
        self.steps = 0  # finished since then
        self.result: dict | None = None  # what the newest profile found, as in its JSON
        self.said = ""  # its status, for the panel

    def request(self) -> None:
        """Profile the steps to come; from any thread, best from the notebook's own.

        The first one sets torch's profiler up where torch was imported: elsewhere it complains.
        """
        if not self.ready:
            self.ready = True
            silence_profiler()
            self._guarded(_set_up)
        self.asked.set()

    def __call__(self, event) -> None:
        if self.profile is None and not self.asked.is_set():
            return
        work = self._step if self.profile is not None else lambda: self._begin(event.step)
        self._guarded(work)

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, *_error) -> None:
        if self.profile is not None:
            self._guarded(self._end)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a profile is optional: the run continues
            self.profile = None
            self.said = f"The profile failed. {describe_error(error)}"

    def _begin(self, step: int) -> None:
        self.asked.clear()
        self.first = step
        self.steps = 0
        plan = schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1)
        self.profile = profile(activities=_activities(), schedule=plan, **EXTRAS)
        self.profile.start()
        self.said = f"Profiling: {WAIT + WARMUP + ACTIVE} steps from step {step + 1:,} on."

    def _step(self) -> None:
        self.steps += 1
        if self.steps < WAIT + WARMUP + ACTIVE:
            self.profile.step()
        else:
            self._end()

    def _end(self) -> None:
        """Stop and save; less than ACTIVE recorded steps are kept, too, as incomplete."""
        ended = self.profile
        self.profile = None
        self.asked.clear()  # clicks during a profile do not start a second one
        ended.stop()
        recorded = self.steps - WAIT - WARMUP
        if recorded < 1:
            self.said = "The profile is incomplete: the run ended before the first recorded step."
            return
        first = self.first + WAIT + WARMUP + 1
        name = f"step-{first:07d}"
        trace = self.folder / f"{name}.pt.trace.json.gz"
        save_trace(ended, trace)
        device, operators = top_operators(ended)
        self.result = {
            "steps": [first, first + recorded - 1],
            "complete": recorded == ACTIVE,
            "device": device,  # whose time it is
            "trace": trace.name,
            "operators": operators,
        }
        write_atomic(self.folder / f"{name}.operators.json", json.dumps(self.result, indent=1))
        self.said = self.describe()

    def describe(self) -> str:
        """What the newest profile found."""
        trace = self.folder / self.result["trace"]
        first, last = self.result["steps"]
        # The words name operators alone; torch's own marks (Optimizer.step#...) stay in the table.
        operators = [o for o in self.result["operators"] if "#" not in o["name"]]
        most = ", ".join(f"{o['name']} {o['share']:.0%}" for o in operators[:3])
        cut = "" if self.result["complete"] else " (incomplete: the run ended)"
        return (
            f"Profile of steps {first:,} to {last:,}{cut}: {most or 'no operator ran'}. "
            f"{trace} opens in ui.perfetto.dev."
        )

    def table(self, count: int = 10) -> dict[str, str]:
        """Return the top `count` operators of the newest profile by name; {} without one."""
        operators = self.result["operators"][:count] if self.result else []
        return {
            o["name"]: f"{o['share']:.1%}, {o['self_ms']:,.1f} ms in {o['calls']:,} calls, "
            f"{o['memory_bytes'] / 2**20:+,.1f} MiB"
            for o in operators
        }


def _activities() -> list[ProfilerActivity]:
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *cuda]


def _set_up() -> None:
    with profile(activities=_activities(), **EXTRAS):
        pass


def save_trace(ended: profile, path: Path) -> None:
    """Write the Chrome trace to `path` (.json.gz), whole or not at all. Raises DiskError."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        ended.export_chrome_trace(str(plain))
        write_atomic(path, gzip.compress(plain.read_bytes(), compresslevel=6))


def top_operators(ended: profile) -> tuple[str, list[dict]]:
    """("cuda" or "cpu", the operators with the most time of their own there).

    `self_ms` leaves out what an operator calls, and is of all recorded steps together, as are
    `calls` and `memory_bytes` (allocated less freed). `share` is of all operators' time.
    """
    # Kernels and device-side marks are rows of their own besides the operators behind them.
    averages = [
        found
        for found in ended.key_averages()
        if found.device_type == DeviceType.CPU and not found.key.startswith("ProfilerStep")
    ]
    kind = "device" if any(found.self_device_time_total for found in averages) else "cpu"
    time_of = f"self_{kind}_time_total"
    memory_of = f"self_{kind}_memory_usage"
    whole_us = sum(getattr(found, time_of) for found in averages) or 1.0
    averages.sort(key=lambda found: -getattr(found, time_of))
    rows = [
        {
            "name": found.key,
            "calls": found.count,
            "self_ms": getattr(found, time_of) / 1e3,
            "share": getattr(found, time_of) / whole_us,
            "memory_bytes": getattr(found, memory_of),
        }
        for found in averages[:TOP]
    ]
    return ("cuda" if kind == "device" else "cpu"), rows
