"""What the parts of `make check-gpu` share: the device, its sizes, one model trained a few steps.

Without a GPU all sizes are tiny and the device is the CPU: the same lines run, and show that the
check itself works, nothing else. Knows no part.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from rows import result

from kit.base.hardware import Hardware, choose_precision
from kit.batches.batching import DataConfig
from kit.model.gpt import SpeechGPT
from kit.model.sequence import EffectiveBatch, GPTConfig
from kit.training.loop import train
from kit.training.settings import TrainConfig
from kit.training.state import TrainState
from kit.training.switches import SpeedConfig
from kit.tuning.ab_test import Task, make_batches, some_rows
from kit.tuning.preflight import release

TRAIN = TrainConfig(steps=100_000, val_every=100_000, lr=3e-4, warmup_steps=2)
XTTS = GPTConfig(
    layers=30,
    width=1024,
    heads=16,
    text_vocab=6681,
    code_vocab=1026,
    latents=32,
    cond_blocks=6,
    perceiver_layers=2,
    dropout=0.1,
    max_text=404,
    max_code=608,
)
MIDDLE = dataclasses.replace(XTTS, layers=12, width=512, heads=8)
TINY = GPTConfig(
    layers=2,
    width=64,
    heads=4,
    text_vocab=40,
    code_vocab=64,
    latents=3,
    perceiver_heads=2,
    perceiver_head_width=16,
    dropout=0.1,
    max_text=40,
    max_code=60,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how large the parts run."""

    hw: Hardware
    steps: int = 30  # optimiser steps of a curve
    codes: int = 100  # a reading

    @property
    def pretended(self) -> bool:
        return self.hw.device == "cpu"

    @property
    def precision(self) -> str:
        """Of mixed precision here."""
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


def new_state(task: Task, precision: str = "fp32", **switches: bool) -> TrainState:
    """A run from one and the same start."""
    release(task.hw.device)
    torch.manual_seed(0)
    with torch.device(task.hw.device):
        model = SpeechGPT(task.model)
    state = TrainState(model, task.train, SpeedConfig(**switches), task.hw)
    state.applied = dataclasses.replace(state.applied, precision=precision)
    state.scaler = torch.amp.GradScaler(task.hw.device, enabled=precision == "fp16")
    return state


def some_batches(task: Task, count: int) -> list[EffectiveBatch]:
    return list(itertools.islice(make_batches(task), count))


def losses(state: TrainState, batches: list[EffectiveBatch]) -> list[float]:
    """Train on `batches`; the loss of each."""
    steps = itertools.islice(train(state, iter(batches)), len(batches))
    return [event.loss for event in steps]


def apart(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference between two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def settle(device: str) -> None:
    """Wait until the device has done what it was asked for."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str, rounds: int = 3) -> float:
    """Median seconds of `work`, the device waited for, after one that pays for warming up."""
    spent = []
    for _ in range(rounds + 1):
        settle(device)
        begun = time.perf_counter()
        work()
        settle(device)
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent[1:])


def checked(row: str, value: float, unit: str, limit: float, **more) -> dict:
    """A row that is well where `value` is at most `limit`."""
    ratio = limit / value if value else None
    status = "ok" if value <= limit else "off"
    return result(row, value, unit, "at most", limit, ratio, status=status, **more)


def told(row: str, reason: str, status: str = "skipped") -> dict:
    """A row without figures, and why."""
    return result(row, None, "", "", None, None, status=status, note=reason)
