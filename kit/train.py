"""The training loop: a generator of step events, with every switch one line and in plain sight.

`train` is handed batches, a validation callable and a stop event, and yields a `StepEvent` after
each optimiser step; logs, plots and checkpoints listen. A step that is killed is as if it had never
begun, and a resumed run computes what the uninterrupted one would have, bit for bit on a CPU.
Knows no dataset, no metric, no widget.

AdamW: Loshchilov and Hutter 2019. Muon: Jordan et al. 2024. Linear warm-up: Goyal et al. 2017.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Event

import torch
from torch import nn

from kit import checkpoint
from kit.config import require
from kit.ema import EMA
from kit.hardware import Hardware, autocast, peak_memory_bytes
from kit.model import EffectiveBatch, SpeechGPT, weighted_loss
from kit.speedups import Applied, SpeedConfig, apply


class TrainError(RuntimeError):
    """Training cannot go on; the message says what happened and what to change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = 900  # optimiser steps
    optimizer: str = "adamw"  # or "muon": Muon for the trunk's matrices, AdamW for the rest
    lr: float = 2e-3  # peak learning rate of AdamW
    muon_lr: float = 0.02  # peak learning rate of Muon
    muon_steps: int = 5  # Newton-Schulz iterations: a third of a small model's step; 3 nearly do
    warmup_steps: int = 50
    schedule: str = "constant"  # after the warm-up: "constant", "linear" or "cosine"
    final_lr: float = 0.1  # where linear and cosine end, as a share of `lr`
    weight_decay: float = 0.05  # of matrices; biases, norms and embeddings have none
    betas: tuple = (0.9, 0.98)
    clip_norm: float = 1.0
    ema_decay: float = 0.999
    val_every: int = 100  # steps
    checkpoint_every: int = 100  # steps
    keep: int = 2  # checkpoints
    patience: int = 5  # non-finite steps in a row before giving up
    seed: int = 0

    def __post_init__(self):
        known = ("constant", "linear", "cosine")
        require(self.schedule in known, self, "schedule", f"choose one of {', '.join(known)}.")
        require(self.optimizer in ("adamw", "muon"), self, "optimizer", "choose adamw or muon.")
        require(self.steps > 0, self, "steps", "must be at least 1.")
        require(self.muon_steps > 0, self, "muon_steps", "must be at least 1.")
        require(self.lr > 0, self, "lr", "must be above 0.")
        require(self.keep > 0, self, "keep", "at least 1 checkpoint must stay.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One optimiser step, as logs and plots see it."""

    step: int  # optimiser steps finished, from 1
    steps: int  # planned in all
    loss: float  # weighted loss of the step, nats per target
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # real tokens in the effective batch
    step_s: float  # wall seconds of the step
    memory_bytes: int  # peak so far: GPU allocator, or resident memory on the CPU
    val_loss: float | None = None  # raw weights, on validation steps
    ema_val_loss: float | None = None  # averaged weights
    note: str = ""  # what happened besides


def lr_factor(config: TrainConfig, step: int) -> float:
    """Share of the peak learning rate at optimiser step `step` (counted from 0)."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    low = config.final_lr
    return {
        "constant": 1.0,
        "linear": low + (1 - low) * max(0.0, 1 - done),
        "cosine": low + (1 - low) * (1 + math.cos(math.pi * min(1.0, done))) / 2,
    }[config.schedule]


class TrainState:
    """All that a run changes: weights, average, optimizer, step, place in the data."""

    def __init__(self, model: SpeechGPT, config: TrainConfig, speed: SpeedConfig, hw: Hardware):
        self.model, self.config, self.speed, self.hw = model.to(hw.device), config, speed, hw
        self.applied: Applied = apply(model, speed, hw)
        self.optimizers = make_optimizers(model, config, fused=speed.fused_adamw)
        self.scaler = torch.amp.GradScaler(hw.device, enabled=self.applied.precision == "fp16")
        self.ema = EMA(model, config.ema_decay) if speed.ema else None
        self.step, self.position = 0, None

    def tree(self) -> dict:
        """Everything a checkpoint must hold."""
        return {
            "model": dict(self.model.named_parameters()),
            "ema": self.ema.state_dict() if self.ema else {},
            "optimizer": {str(i): o.state_dict()["state"] for i, o in enumerate(self.optimizers)},
            "scaler": self.scaler.state_dict(),
            "random": checkpoint.random_state(),
            "run": {
                "step": self.step,
                "steps": self.config.steps,
                "position": json.dumps(self.position),
            },
            "shape": json.dumps(dataclasses.asdict(self.model.config)),
            "optimizer_name": self.config.optimizer,
        }

    def restore(self, tree: dict) -> None:
        """Go on from a checkpoint's tree. Raises TrainError when it is of another model."""
        shape = json.dumps(dataclasses.asdict(self.model.config))
        if tree["shape"] != shape:
            raise TrainError(
                f"The checkpoint is of another model: {differences(tree['shape'], shape)}. Choose "
                "another KIT_RUN for a new run, or the preset this one was started with."
            )
        if tree["optimizer_name"] != self.config.optimizer:
            raise TrainError(
                f"The checkpoint was trained with optimizer `{tree['optimizer_name']}`, now "
                f"`{self.config.optimizer}` is asked for. Choose that one, or another KIT_RUN."
            )
        restore_weights(self.model, tree["model"])
        if self.ema and tree["ema"]:
            self.ema.load_state_dict(tree["ema"])
        elif self.ema:  # switched on just now: the average begins here, not at the random start
            self.ema = EMA(self.model, self.config.ema_decay)
        for number, optimizer in enumerate(self.optimizers):
            moments = {int(k): v for k, v in tree["optimizer"][str(number)].items()}
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": moments, "param_groups": groups})
        if tree["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(tree["scaler"])
        checkpoint.restore_random_state(tree["random"])
        self.step, self.position = tree["run"]["step"], json.loads(tree["run"]["position"])

    def save(self, folder: Path) -> None:
        checkpoint.save(self.tree(), folder, self.step, self.config.keep)


@torch.no_grad()
def restore_weights(model: nn.Module, weights: dict) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def differences(saved: str, wanted: str) -> str:
    """'layers 6 -> 12, ...' between two JSON objects."""
    old, new = json.loads(saved), json.loads(wanted)
    return ", ".join(f"{k} {old.get(k)} -> {new[k]}" for k in new if old.get(k) != new[k])


def make_optimizers(
    model: SpeechGPT, config: TrainConfig, fused: bool
) -> list[torch.optim.Optimizer]:
    """AdamW with weight decay on matrices alone; "muon" hands it the trunk's matrices to Muon.

    Each parameter group keeps its peak learning rate as `peak_lr`.
    """
    trunk = (
        {p for p in model.gpt.parameters() if p.ndim == 2} if config.optimizer == "muon" else set()
    )
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    rest = [p for p in model.parameters() if p not in trunk]
    plain = [p for p in rest if p.ndim < 2 or p in tables]
    decayed = [p for p in rest if p.ndim >= 2 and p not in tables]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    made = [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused, foreach=False)]
    if trunk:
        matrices = [p for p in model.gpt.parameters() if p in trunk]
        decay = config.weight_decay
        muon = {"momentum": 0.95, "ns_steps": config.muon_steps}
        made.append(torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=decay, **muon))
    for group in (g for optimizer in made for g in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return made


def train(
    state: TrainState,
    batches: Iterable[EffectiveBatch],
    validate: Callable[[], float] = lambda: math.nan,
    stop: Event | None = None,
) -> Iterator[StepEvent]:
    """Train until `config.steps` or `stop`, yielding one StepEvent per optimiser step.

    `validate` returns the loss of whatever weights the model holds. Raises TrainError after
    `patience` non-finite steps in a row; each one alone is skipped and says so.
    """
    model, optimizers, scaler, config = state.model, state.optimizers, state.scaler, state.config
    skipped, batches = 0, iter(batches)
    while state.step < config.steps and not (stop and stop.is_set()):
        started, batch = time.perf_counter(), next(batches)
        factor = lr_factor(config, state.step)
        for group in (g for o in optimizers for g in o.param_groups):
            group["lr"] = group["peak_lr"] * factor
        model.train()
        loss = accumulate(state, batch)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm).item()
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite or scaler.is_enabled():  # the scaler skips on its own, and lowers its scale
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        model.zero_grad(set_to_none=True)
        if finite and state.ema:
            state.ema.update()
        state.step, state.position = state.step + 1, batch.position
        skipped = 0 if finite else skipped + 1
        if skipped > config.patience:
            raise TrainError(
                f"The loss was not finite for {skipped} steps in a row (step {state.step}). Lower "
                f"`lr` (now {config.lr}) or turn mixed precision off, then run again: it goes "
                "on from the last checkpoint."
            )
        step_s = time.perf_counter() - started
        yield StepEvent(
            step=state.step,
            steps=config.steps,
            loss=loss,
            lr=config.lr * factor,
            grad_norm=norm,
            tokens=batch.tokens,
            step_s=step_s,
            memory_bytes=peak_memory_bytes(state.hw.device),
            note="" if finite else "skipped: the loss was not finite",
            **losses(state, validate),
        )


def accumulate(state: TrainState, batch: EffectiveBatch) -> float:
    """Gradients of the whole effective batch, one micro-batch at a time; returns its loss.

    Each part is divided by the targets of the whole, so any split gives the same gradients.
    """
    totals, loss = (batch.text_targets, batch.code_targets), 0.0
    for micro in batch.micro:
        with autocast(state.hw.device, state.applied.precision):
            sums = state.model(micro.to(state.hw.device))
        part = weighted_loss(state.model.config, sums, *totals)
        state.scaler.scale(part).backward()
        loss += part.detach()
    return float(loss)


def losses(state: TrainState, validate: Callable[[], float]) -> dict[str, float]:
    """Validation losses, raw and averaged, where the step calls for them."""
    if state.step % state.config.val_every and state.step != state.config.steps:
        return {}
    state.model.eval()
    found = {"val_loss": validate()}
    if state.ema:
        with state.ema.swapped_in():
            found["ema_val_loss"] = validate()
    return found


@torch.inference_mode()
def validation_loss(
    model: SpeechGPT, batches: list[EffectiveBatch], device: str, precision: str
) -> float:
    """Weighted loss of `model` over all of `batches`, nats per target."""
    sums, text, code = torch.zeros(2), 0, 0
    for batch in batches:
        for micro in batch.micro:
            with autocast(device, precision):
                sums += torch.stack(model(micro.to(device))).cpu()
        text, code = text + batch.text_targets, code + batch.code_targets
    return weighted_loss(model.config, tuple(sums), text, code).item()


def listen(
    events: Iterator[StepEvent], *listeners: Callable[[StepEvent], None]
) -> Iterator[StepEvent]:
    """Pass every event on, after each listener has seen it."""
    for event in events:
        for hear in listeners:
            hear(event)
        yield event


def jsonl_log(path: Path) -> Callable[[StepEvent], None]:
    """A listener that appends each event as one JSON line, flushed at once."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)

    def write(event: StepEvent) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(event)) + "\n")

    return write


def checkpointer(
    state: TrainState, folder: Path, stop: Event | None = None
) -> Callable[[StepEvent], None]:
    """A listener that saves every `checkpoint_every` steps, at the end, and when stopped."""

    def save(event: StepEvent) -> None:
        due = event.step % state.config.checkpoint_every == 0 or event.step == event.steps
        if due or (stop and stop.is_set()):
            state.save(folder)

    return save
