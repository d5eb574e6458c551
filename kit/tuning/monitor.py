"""Watch a training run: a thread that samples the device, and PyTorch's profiler at one click."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from kit.base.files import write_atomic
from kit.base.formatting import describe_error
from kit.base.hardware import Hardware, silence_profiler

CHILDREN_EVERY = 10  # samples between two searches for child processes: one reads all of /proc
WAIT = 2
WARMUP = 2
ACTIVE = 6  # steps
TOP = 25  # operators in the table
STATUS = "status.txt"  # in the folder of profiles: a sentence on the newest one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    memory_bytes: int  # in use
    load: float | None  # share of the device that was busy since the sample before, 0 to 1
    ram_bytes: int  # of the machine's RAM that this process and its children use


class Monitor:
    """`with Monitor(hw) as monitor:` samples until the block ends; `summary()` any time.

    On a GPU the whole device is measured, other processes included: memory by the CUDA driver, load
    by NVML (package nvidia-ml-py). On a CPU it is this process with its children, whose RAM is also
    watched beside a GPU. If sampling fails, it ends and `summary` says why.
    """

    def __init__(self, hw: Hardware, every_s: float = 1.0):
        self.hw = hw
        self.processes = Processes(torch.get_num_threads())
        self.every_s = every_s
        self.samples: list[Sample] = []
        self.no_load = ""  # why the load of the GPU is not read
        self.error = ""
        self.ended = threading.Event()
        self.thread = None

    def __enter__(self) -> "Monitor":
        self.ended.clear()
        self.thread = threading.Thread(target=self._sample, name="monitor", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_error) -> None:
        self.ended.set()
        self.thread.join()

    def _sample(self) -> None:
        try:
            self.samples.append(self._read())
            while not self.ended.wait(self.every_s):
                self.samples.append(self._read())
        except Exception as error:  # training continues; the summary has the error
            self.error = f"sampling ended: {describe_error(error)}"

    def _read(self) -> Sample:
        own = self.processes.read()
        if self.hw.device == "cpu":
            return own
        load = None
        if not self.no_load:
            try:
                load = torch.cuda.utilization() / 100
            except Exception as error:  # no nvidia-ml-py, a MIG slice, a container without NVML
                self.no_load = f"load is not read: {describe_error(error)}"
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return dataclasses.replace(own, memory_bytes=total_bytes - free_bytes, load=load)

    def summary(self) -> dict:
        """Plain figures for the run record; None where nothing was measured."""
        peak_bytes = max((sample.memory_bytes for sample in self.samples), default=None)
        loads = [sample.load for sample in self.samples if sample.load is not None]
        return {
            "memory_peak_bytes": peak_bytes,
            "memory_peak_share": peak_bytes and peak_bytes / self.hw.memory_bytes,
            "ram_peak_bytes": max((sample.ram_bytes for sample in self.samples), default=None),
            "load_mean": sum(loads) / len(loads) if loads else None,
            "load_note": self.no_load,
            "error": self.error,
        }


class Processes:
    """This process and its children: resident memory, and how busy the `threads` of torch are."""

    def __init__(self, threads: int):
        self.threads = threads
        self.reads = 0
        self.own = psutil.Process()
        self.children = []

    def read(self) -> Sample:
        if self.reads % CHILDREN_EVERY == 0:
            # An object that is kept counts from its last reading, a new one from now on.
            known = {child: child for child in self.children}
            self.children = [known.get(p, p) for p in self.own.children(recursive=True)]
        self.reads += 1
        memory_bytes = 0
        percent = 0.0
        for process in (self.own, *self.children):
            with contextlib.suppress(psutil.NoSuchProcess):  # a worker that has ended since
                percent += process.cpu_percent()
                memory_bytes += process.memory_info().rss
        # Workers that make batches may use more.
        load = min(1.0, percent / 100 / self.threads) if self.reads > 1 else None
        return Sample(memory_bytes=memory_bytes, load=load, ram_bytes=memory_bytes)


class StepProfiler:
    """Profile ten steps after a `request()`: where the time of a step goes.

    A listener to step events: it skips two steps, warms the profiler up for two, records six, and
    writes a trace for Perfetto or TensorBoard and the top operators. Training runs inside
    `with profiler:`, which closes a profile if the run ends during it. The error of a failed
    profile is in `status`; it never ends the run.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.asked = False
        self.profile = None
        self.first = 0  # of the profile in progress: its first recorded step
        self.status = ""  # a sentence

    def request(self) -> None:
        """Profile the steps to come."""
        self.asked = True

    def __call__(self, event) -> None:
        if self.profile is not None:
            last = self.profile.step_num + 1 == WAIT + WARMUP + ACTIVE
            self._guarded(self._save if last else self.profile.step)
        elif self.asked:
            self._guarded(lambda: self._start(event.step))

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, *_error) -> None:
        if self.profile is not None:
            self._report("There is no profile: the run ended before its last recorded step.")
            self._guarded(self._close)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # a profile is optional: the run continues
            self.profile = None
            self._report(f"The profile failed. {describe_error(error)}")

    def _start(self, step: int) -> None:
        self.asked = False
        self.first = step + WAIT + WARMUP + 1
        silence_profiler()
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self.profile = profile(
            activities=[ProfilerActivity.CPU, *gpu],
            schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
            profile_memory=True,
            acc_events=True,  # one cycle only: nothing accumulates
        )
        self.profile.start()
        self._report(f"Profiling: {WAIT + WARMUP + ACTIVE} steps from step {step + 1:,} on.")

    def _close(self) -> profile:
        ended = self.profile
        self.profile = None
        self.asked = False  # clicks during a profile do not start a second one
        ended.stop()
        return ended

    def _save(self) -> None:
        ended = self._close()
        name = f"step-{self.first:07d}"
        trace = self.folder / f"{name}.pt.trace.json.gz"
        ended.export_chrome_trace(str(trace))  # compressed by torch
        table, longest = top_operators(ended)
        write_atomic(self.folder / f"{name}.operators.txt", table)
        self._report(
            f"Profile of steps {self.first:,} to {self.first + ACTIVE - 1:,}: {longest}. "
            f"{trace} opens in ui.perfetto.dev."
        )

    def _report(self, status: str) -> None:
        self.status = status
        with contextlib.suppress(OSError):  # a full disk, which ends the run elsewhere
            write_atomic(self.folder / STATUS, status)


def top_operators(ended: profile) -> tuple[str, str]:
    """torch's table of the operators with the most time of their own, and the first three."""
    averages = ended.key_averages()
    # Kernels, device-side marks and steps are rows of their own besides the operators in them.
    rows = [row for row in averages if row.device_type == DeviceType.CPU]
    rows = [row for row in rows if not row.key.startswith("ProfilerStep")]
    kind = "device" if any(row.self_device_time_total for row in rows) else "cpu"
    time_of = f"self_{kind}_time_total"
    total_us = sum(getattr(row, time_of) for row in rows) or 1.0
    # torch's own marks (Optimizer.step#...) stay in the table.
    rows = sorted((r for r in rows if "#" not in r.key), key=lambda row: -getattr(row, time_of))
    longest = [f"{row.key} {getattr(row, time_of) / total_us:.0%}" for row in rows[:3]]
    return averages.table(sort_by=time_of, row_limit=TOP), ", ".join(longest)
