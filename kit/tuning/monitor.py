"""Measure how much of the device a run uses: a thread samples memory and load once a second.

On a GPU the whole device is measured, other processes included: memory by the CUDA driver, load by
NVML (package nvidia-ml-py). On the CPU it is this process with its children (psutil). If a value
cannot be measured, the summary says why.
"""

import dataclasses
import threading
import time

import psutil
import torch

from kit.base.hardware import Hardware

CHILDREN_EVERY = 10  # samples between two searches for child processes: one reads all of /proc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement."""

    memory_bytes: int  # in use
    load: float | None  # share of the device that was busy since the sample before, 0 to 1


class Monitor:
    """`with Monitor(hw) as monitor:` samples until the block ends; `summary()` any time.

    `newest` is the last Sample, None before the first. If sampling fails, it ends and `summary`
    says why. The same monitor may be entered again and continues to count.
    """

    def __init__(self, hw: Hardware, every_s: float = 1.0):
        self.hw = hw
        self.every_s = every_s
        self.newest: Sample | None = None
        self.samples = 0
        self.memory_sum = 0
        self.peak_bytes = 0
        self.loads = 0
        self.load_sum = 0.0
        self.source = ""
        self.no_load = ""
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
            probe = _Card() if self.hw.device == "cuda" else _Processes(self.hw.cores)
            self.source = probe.source
            self.no_load = probe.no_load
            self._take(probe.read())
            while not self.ended.wait(self.every_s):
                self._take(probe.read())
        except Exception as error:  # training continues; the summary has the error
            self.error = f"sampling ended: {type(error).__name__}: {error}"

    def _take(self, sample: Sample) -> None:
        self.newest = sample
        self.samples += 1
        self.memory_sum += sample.memory_bytes
        self.peak_bytes = max(self.peak_bytes, sample.memory_bytes)
        if sample.load is not None:
            self.loads += 1
            self.load_sum += sample.load

    def summary(self) -> dict:
        """Plain figures for the run record; None where nothing was measured."""
        return {
            "source": self.source,
            "count": self.samples,
            "every_s": self.every_s,
            "memory_peak_bytes": self.peak_bytes if self.samples else None,
            "memory_mean_bytes": self.memory_sum // self.samples if self.samples else None,
            "memory_peak_share": self.peak_bytes / self.hw.memory_bytes if self.samples else None,
            "load_mean": self.load_sum / self.loads if self.loads else None,
            "load_note": self.no_load,
            "error": self.error,
        }

    def describe(self) -> str:
        """Return the newest sample for a status line, "" if there is none."""
        if self.error or self.newest is None:
            return self.error
        used = self.newest.memory_bytes / 2**30
        whole = self.hw.memory_bytes / 2**30
        load = "" if self.newest.load is None else f", {self.newest.load:.0%} busy"
        return f"{self.hw.device.upper()}: {used:.2f} of {whole:.0f} GiB{load}"


class _Processes:
    """Resident memory and processor share of this process and its children."""

    source = "resident memory and CPU time of this process and its children (psutil)"
    no_load = ""

    def __init__(self, cores: int):
        self.cores = cores
        self.reads = 0
        self.own = psutil.Process()
        self.children = []
        self.at_s = None
        self.busy_s = {}  # CPU seconds by process at the last reading

    def read(self) -> Sample:
        if self.reads % CHILDREN_EVERY == 0:
            self.children = self.own.children(recursive=True)
        self.reads += 1
        now_s = time.monotonic()
        before_s = self.at_s
        busy_s = {}
        memory = 0
        for process in (self.own, *self.children):
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    memory += process.memory_info().rss
                busy_s[process] = times.user + times.system
            except psutil.NoSuchProcess:  # a worker that has ended since
                continue
        # A new child's time so far was not spent in this interval.
        spent_s = sum(s - self.busy_s[p] for p, s in busy_s.items() if p in self.busy_s)
        self.at_s = now_s
        self.busy_s = busy_s
        load = None if before_s is None else spent_s / (now_s - before_s) / self.cores
        return Sample(memory_bytes=memory, load=load)


class _Card:
    """The current CUDA device, with all its processes."""

    def __init__(self):
        self.source = "the CUDA driver's count of device memory, load by NVML"
        self.no_load = ""
        try:
            torch.cuda.utilization()
        except Exception as error:  # no nvidia-ml-py, a MIG slice, a container without NVML
            self.source = "the CUDA driver's count of device memory"
            self.no_load = f"load is not read: {type(error).__name__}: {error}"

    def read(self) -> Sample:
        free, whole = torch.cuda.mem_get_info()
        load = None if self.no_load else torch.cuda.utilization() / 100
        return Sample(memory_bytes=whole - free, load=load)
