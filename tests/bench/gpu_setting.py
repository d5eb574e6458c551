"""What the parts of the GPU check share: the device, model sizes, a few steps of training, rows.

Without a GPU every size is tiny and the device is the CPU: the same lines run, and show that the
check itself works, nothing else.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from unittest.mock import patch

import torch
from rows import result

from kit.base.hardware import DTYPES, Choice, Hardware, choose_precision, release_memory
from kit.model.gpt import SpeechGPT
from kit.model.sequence import EffectiveBatch
from kit.settings import DataConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.training.config import StepEvent
from kit.training.loop import train
from kit.training.trainer import Trainer
from kit.tuning.measure import Task, make_batches, some_rows

TRAIN = TrainConfig(max_steps=100_000, eval_steps=100_000, lr=3e-4, warmup_steps=2)
REFERENCE = {"latents": 32, "cond_blocks": 6, "perceiver_layers": 2}
TABLES = {"text_vocab": 6681, "code_vocab": 1026, "max_text": 404, "max_code": 608}
XTTS = GPTConfig(layers=30, width=1024, heads=16, dropout=0.1, **REFERENCE, **TABLES)
MIDDLE = dataclasses.replace(XTTS, layers=12, width=512, heads=8)
SMALL_REFERENCE = {"latents": 3, "perceiver_heads": 2, "perceiver_head_width": 16}
SMALL_TABLES = {"text_vocab": 40, "code_vocab": 64, "max_text": 40, "max_code": 60}
TINY = GPTConfig(layers=2, width=64, heads=4, dropout=0.1, **SMALL_REFERENCE, **SMALL_TABLES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how large the parts run."""

    hw: Hardware
    steps: int = 30  # optimiser steps of a loss curve
    codes: int = 100  # of a spoken text

    @property
    def pretended(self) -> bool:
        """Whether there is no GPU."""
        return self.hw.device == "cpu"

    @property
    def precision(self) -> str:
        """The mixed precision of this device."""
        return "bf16" if self.pretended else choose_precision(self.hw).value

    @property
    def xtts(self) -> GPTConfig:
        return TINY if self.pretended else XTTS

    def task(self, model: GPTConfig, rows: int = 8, **settings) -> Task:
        """`rows` a pass; on a GPU 60 to 200 text ids and 200 to 600 codes each."""
        lengths = ((4, 20), (10, 40)) if self.pretended else ((60, 200), (200, 600))
        frames = 12 if self.pretended else 86
        return Task(
            model=model,
            train=dataclasses.replace(TRAIN, **settings),
            data=DataConfig(effective_batch=rows, micro_batch=rows, reference_frames=frames),
            rows=some_rows(*lengths, 64),
            hw=self.hw,
            threads=torch.get_num_threads(),
        )

    @property
    def middle(self) -> Task:
        return self.task(TINY if self.pretended else MIDDLE)


def new_state(task: Task, precision: str = "fp32", **switches: bool | int) -> Trainer:
    """A run at its first step, always from the same weights, in a `precision` of our choice."""
    release_memory(task.hw.device)
    torch.manual_seed(0)
    with torch.device(task.hw.device):
        model = SpeechGPT(task.model)
    choice = Choice(value=precision, reason="chosen by the check")
    speed = SpeedConfig(mixed_precision=precision != "fp32", **switches)
    with patch("kit.training.switches.choose_precision", lambda hw: choice):
        return Trainer(model, task.train, speed, task.hw)


def some_batches(task: Task, count: int) -> list[EffectiveBatch]:
    return list(itertools.islice(make_batches(task), count))


def train_steps(state: Trainer, batches: Iterable[EffectiveBatch]) -> list[StepEvent]:
    """Train on each of `batches` once."""
    batches = list(batches)
    return list(itertools.islice(train(state, iter(batches)), len(batches)))


def train_losses(state: Trainer, batches: Iterable[EffectiveBatch]) -> list[float]:
    return [event.loss for event in train_steps(state, batches)]


def relative_difference(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference between two loss curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def wait_for_device(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds of one call of `work`, until the device is done."""
    wait_for_device(device)
    started_s = time.perf_counter()
    work()
    wait_for_device(device)
    return time.perf_counter() - started_s


def seconds(work: Callable[[], object], device: str, rounds: int = 3) -> float:
    """Median seconds of `work` after one call that warms up."""
    return statistics.median([timed(work, device) for _ in range(rounds + 1)][1:])


def product_flops_per_s(precision: str, setting: Setting) -> float:
    """Floating-point operations a second of a large square product."""
    size = 256 if setting.pretended else 8192
    dtype = DTYPES.get(precision, torch.float32)
    a = torch.randn(size, size, device=setting.hw.device).to(dtype)
    b = torch.randn(size, size, device=setting.hw.device).to(dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        return 2 * size**3 / seconds(lambda: a @ b, setting.hw.device, rounds=5)
    finally:
        torch.set_float32_matmul_precision(before)


def read_bytes_per_s(setting: Setting) -> float:
    """Bytes a second that this device reads to sum a gibibyte."""
    array = torch.ones(2**20 if setting.pretended else 2**28, device=setting.hw.device)
    return array.nbytes / seconds(array.sum, setting.hw.device, rounds=5)


def covered_us(spans: list[tuple[float, float]]) -> float:
    """Length of the union of sorted spans."""
    total, reached = 0.0, -math.inf
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def spread(values: list[float]) -> float:
    """Largest less smallest, as a share of the median."""
    return (max(values) - min(values)) / statistics.median(values)


def limit_row(row: str, value: float, unit: str, limit: float, **more) -> dict:
    """A row that is ok where `value` is at most `limit`."""
    ratio = limit / value if value else None
    status = "ok" if value <= limit else "off"
    return result(row, value, unit, "at most", limit, ratio, status=status, **more)


def note_row(row: str, reason: str, status: str = "skipped") -> dict:
    """A row without figures, and why."""
    return result(row, None, status=status, note=reason)
