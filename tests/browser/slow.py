"""A trainer that only pretends, slowly, and a voice that only hums: panels without a model."""

import io
import json
import math
import random
import threading
import time
import wave
from array import array
from pathlib import Path

from kit.base.config import build
from kit.notebook.widgets import Field
from kit.recipes.panel import EPOCHS, GPUS, MORE_FIELDS
from kit.recipes.panel import FIELDS as LABELLED
from kit.settings import TrainConfig
from kit.training import logs, process, switches
from kit.training.config import StepEvent

STEPS_MORE = 40  # once it was stopped
PAUSE_S = 0.05  # of a step
REASONS = {
    "sdpa": (True, True, "kernel: flash (compute capability 7.5)"),
    "mixed_precision": (True, True, "fp16: compute capability 7.5 has no bf16, but fp16"),
    "gradient_checkpointing": (False, True, "less memory, one more forward pass per step"),
    "compile": (False, False, "there is no C compiler here; the first steps are slow"),
    "fused_adamw": (True, True, "same update, fewer passes over memory"),
    "ema": (True, True, "averaged weights usually speak better than the last ones"),
}
SWITCHES = [
    switches.Switch(name=name, label=switches.LABELS[name], on=on, available=ok, reason=why)
    for name, (on, ok, why) in REASONS.items()
]
PRESET = {"effective_batch": 32, "micro_batch": 16, "lr": 0.002, "max_steps": 4000}
PRESET |= {"warmup_steps": 50, "ema_decay": 0.999, "eval_steps": 100}
PRESET |= {EPOCHS: 0, GPUS: 1, "workers": 0, "prefetch_factor": 4}
FIELDS = []
for name, (label, comment) in LABELLED.items():
    known = {"name": name, "label": label, "comment": comment, "more": name in MORE_FIELDS}
    FIELDS.append(Field(value=PRESET[name], **known))


def plan(values: dict) -> tuple[str, bool]:
    """A pretended plan; what is wrong is refused as in a real one."""
    build(TrainConfig, {name: values[name] for name in ("lr", "warmup_steps", "max_steps")})
    return f"Memory planned: {values['micro_batch']} MiB. Time: {values['max_steps']} steps.", True


class SlowTrainer:
    """A pretended `TrainingProcess` that lasts too long to end by itself. Its loss falls.

    Stopped and started again, it runs for a few more steps. What it was started with is beside its
    log, as JSON.
    """

    def __init__(self, log):
        self.log = Path(log)
        self.steps = 4000
        self.done, self.seen, self.requests, self.thread = 0, 0, [], None

    def start(self, values: dict) -> None:
        self.requests.clear()
        self.log.with_suffix(".json").write_text(json.dumps(values))
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _train(self) -> None:
        write = logs.jsonl_log(self.log)
        resumed = f"resumed from step {self.done}" if self.done else ""
        if self.done:
            self.steps = self.done + STEPS_MORE
        for step in range(self.done + 1, self.steps + 1):
            time.sleep(PAUSE_S)
            write(self._event(step, resumed))
            self.done, resumed = step, ""
            if process.STOP in self.requests:
                return

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def request(self, what: str) -> None:
        self.requests.append(what)

    def new_rows(self) -> list[dict]:
        rows = logs.read_log(self.log)[self.seen :]
        self.seen += len(rows)
        return rows

    def error(self) -> None:
        return None

    def _event(self, step: int, note: str) -> StepEvent:
        share, noise = step / self.steps, random.Random(step).gauss(0, 0.12)
        loss = 1.9 + 5.3 * math.exp(-6 * share)
        validates = step % max(1, self.steps // 10) == 0
        figures = {"step": step, "steps": self.steps, "loss": loss + noise, "note": note}
        figures |= {"lr": 2e-3 * min(1, 10 * share) * (1 - 0.8 * share), "grad_norm": 1.0}
        figures |= {"tokens": 4096, "step_s": PAUSE_S, "unix_s": time.time()}
        figures["memory_bytes"] = int(2**30 * (1.9 - 0.6 * math.exp(-20 * share)))
        if validates:
            figures |= {"val_loss": loss + 0.15, "ema_val_loss": loss + 0.02}
        return StepEvent(load=0.9 + noise / 4, **figures)


def tone(text: str, choices: dict, reference: str) -> tuple[bytes, str]:
    """Half a second of a hum as WAV bytes, and no remark. Raises ValueError for an empty text."""
    if not text.strip():
        raise ValueError("There is nothing to speak: type a sentence first.")
    samples = (int(9000 * math.sin(0.08 * n)) for n in range(11_025))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 22_050, 0, "NONE", ""))
        file.writeframes(array("h", samples).tobytes())
    return buffer.getvalue(), ""
