"""One training run under a panel: build it from the switches, resume it, log it, save its voice.

`TrainSession.run(values, stop)` is what a `TrainPanel` starts. It goes on from the newest sound
checkpoint of an unfinished run, and leaves `model-raw` and `model-ema` behind at the end.
The data come in as a callable from a position to batches. Knows the loop and its files; no widget.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event

import torch

from kit import checkpoint
from kit.config import build, write_atomic
from kit.hardware import Hardware
from kit.model import GPTConfig, SpeechGPT
from kit.speedups import Applied, SpeedConfig
from kit.train import (
    StepEvent,
    TrainConfig,
    TrainState,
    checkpointer,
    jsonl_log,
    listen,
    train,
    validation_loss,
)
from kit.voice import save_model


@dataclasses.dataclass(kw_only=True)
class TrainSession:
    model: GPTConfig
    config: TrainConfig
    hw: Hardware
    folder: Path
    make_batches: Callable  # (position or None, grad_accum) -> iterable of EffectiveBatch
    validation: list  # EffectiveBatches
    threads: int  # for PyTorch
    state: TrainState | None = None  # of the latest run

    @property
    def log_path(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def resumable(self) -> bool:
        """Whether an unfinished run lies here."""
        saved = checkpoint.checkpoints(self.checkpoints)
        return bool(saved) and not self.finished()

    def finished(self) -> bool:
        mark = self.folder / "train-finished"
        return mark.exists() and int(mark.read_text()) >= self.config.steps

    def run(self, values: dict, stop: Event) -> Iterator[StepEvent]:
        """Train with the switches in `values` until done or stopped, going on where a run stands.

        A finished run has nothing left to do and yields nothing. Raises TrainError.
        """
        values = dict(values)
        grad_accum = values.pop("grad_accum", 1)
        if self.finished():
            return
        torch.set_num_threads(self.threads)  # counts for the calling thread alone
        torch.manual_seed(self.config.seed)
        speed = build(SpeedConfig, values)
        self.state = TrainState(SpeechGPT(self.model), self.config, speed, self.hw)
        notes = [*self.state.applied.notes, *self._resume()]
        batches = self.make_batches(self.state.position, grad_accum)
        validate = partial(
            validation_loss, self.state.model, self.validation, self.hw.device, self._precision
        )
        events = train(self.state, batches, validate, stop)
        listeners = (jsonl_log(self.log_path), checkpointer(self.state, self.checkpoints, stop))
        yield from listen(with_notes(events, notes), *listeners)
        if self.state.step and f"{self.state.step:07d}" not in self._newest():
            self.state.save(self.checkpoints)  # stopped after the listeners had heard the last step
        if self.state.step >= self.config.steps:
            self._finish()

    @property
    def _precision(self) -> str:
        return self.state.applied.precision

    def _newest(self) -> str:
        """The name of the newest checkpoint, "" when there is none."""
        return max((p.name for p in checkpoint.checkpoints(self.checkpoints)), default="")

    def _resume(self) -> list[str]:
        tree, notes = checkpoint.load_newest(self.checkpoints)
        if tree is None:
            self.log_path.unlink(missing_ok=True)
            return notes
        self.state.restore(tree)
        return [*notes, f"resumed from step {self.state.step}"]

    def _finish(self) -> None:
        save_model(self.state.model, self.folder / "model-raw.safetensors")
        if self.state.ema:
            with self.state.ema.swapped_in():
                save_model(self.state.model, self.folder / "model-ema.safetensors")
        write_atomic(self.folder / "train-finished", str(self.state.step))


def with_notes(events: Iterator[StepEvent], notes: list[str]) -> Iterator[StepEvent]:
    """Put `notes` on the first event."""
    for event in events:
        if notes:
            said = "; ".join([*notes, *([event.note] if event.note else [])])
            event, notes = dataclasses.replace(event, note=said), []
        yield event


def summary(rows: list[dict], applied: Applied | None = None) -> dict:
    """The figures of a log for the report: steps, speed, memory, last validation losses."""
    seconds = sum(r["step_s"] for r in rows)
    last = next((r for r in reversed(rows) if r["val_loss"] is not None), {})
    figures = {
        "steps": rows[-1]["step"],
        "steps_per_s": len(rows) / seconds,
        "tokens_per_s": sum(r["tokens"] for r in rows) / seconds,
        "peak_memory_bytes": max(r["memory_bytes"] for r in rows),
        "loss": rows[-1]["loss"],
        "val_loss": last.get("val_loss", math.nan),
        "ema_val_loss": last.get("ema_val_loss"),
    }
    return figures | ({"ran": dataclasses.asdict(applied)} if applied else {})
