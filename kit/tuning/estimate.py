"""How many steps a training has, how long they take here, and what it will store.

Steps are timed by the newest rows of a log, or by a few real steps of a temporary model.
"""

import dataclasses
import itertools
import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kit.base.config import require_types
from kit.base.errors import KitError
from kit.base.formatting import clock
from kit.model.gpt import SpeechGPT
from kit.model.lora import merged
from kit.model.sequence import EffectiveBatch
from kit.settings import TimeBudget, TrainConfig
from kit.training.loop import train
from kit.training.run import validation_loss
from kit.training.trainer import Trainer
from kit.tuning.memory_plan import Workload

RECENT = 1000  # newest rows that count
# A corpus is validated every so many passes over it, or steps where those are more: after some six
# passes a model that has memorised it gets worse on everything else.
VALIDATED_PASSES = 2
VALIDATED_STEPS = 50
START_S = 8  # of a process until its first step: torch, the model, the data
CHANGED = 0.15  # share by which an estimate may differ before a new one is said
SESSION_HOURS = 12  # of Colab's free tier, at most


def seconds_per_step(rows: list[dict], config: TrainConfig) -> float:
    """Seconds of a step, with its share of all else in the newest rows.

    The first row of each start is left out: it has no row before it. So is a plain step much longer
    than the others (a compilation, a closed lid), and one in which the clock was set back.
    """
    timed = [row for row in rows if row.get("wall_s") is not None and row["wall_s"] >= 0][-RECENT:]
    if not timed:
        raise KitError("Nothing to plan from: run a few steps first, at least two in a row.")
    plain, others = [], []
    for row in timed:
        judged = row.get("gate") or row.get("val_loss") is not None
        # Saving comes after a step is logged: in the next row.
        saved = row["step"] > 1 and (row["step"] - 1) % config.save_steps == 0
        (others if judged or saved else plain).append(row["wall_s"])
    usual_s = statistics.median(plain or others)
    plain = [seconds for seconds in plain if seconds <= 10 * usual_s]
    return statistics.fmean([*plain, *others])


def time_steps(
    work: Workload,
    batches: Sequence[EffectiveBatch],
    threads: int,
    validation: Sequence[EffectiveBatch] = (),
    make_gate: Callable[[], Callable[[SpeechGPT], dict]] | None = None,
) -> float:
    """Seconds of a real step of a new model, with its share of validations and gate evaluations.

    Each of `batches` is used twice, and its second step counts: the first one has a new length and
    allocates memory, and takes up to half as long again. The batches should be of usual length:
    the run itself may begin with short sentences. Nothing is saved.
    """
    torch.set_num_threads(threads)
    config = work.train
    speed = dataclasses.replace(work.speed, compile=False)
    # The run itself may be shorter, and nothing ends this early.
    count = 2 * len(batches)
    still = {"max_steps": max(count, config.max_steps), "early_stopping_patience": 0}
    still = dataclasses.replace(config.without_gate(), **still)
    trainer = Trainer(SpeechGPT(work.model), still, speed, work.hw, work.finetuning)
    ends_s = [event.unix_s for event in itertools.islice(train(trainer, [*batches] * 2), count)]
    seconds = (ends_s[-1] - ends_s[len(batches) - 1]) / len(batches)
    trainer.model.eval()
    began_s = time.perf_counter()
    if validation and config.eval_steps:
        how = (work.hw.device, trainer.applied.precision, trainer.micro_rows)
        for _ in range(2 if trainer.ema else 1):
            validation_loss(trainer.model, validation, *how)
        seconds += (time.perf_counter() - began_s) / config.eval_steps
    began_s = time.perf_counter()
    if make_gate and config.gate_every:
        make_gate()(merged(trainer.model))  # an untrained voice speaks to its limit
        seconds += (time.perf_counter() - began_s) / config.gate_every
    return seconds


def resolve_steps(
    config: TrainConfig, epoch_steps: int, asked: int = 0, previous: int = 0
) -> TrainConfig:
    """`config` with its number of steps for a corpus of `epoch_steps` steps a pass.

    `asked` by a person comes first, then the `previous` number of a resumed run (0: neither), else
    `num_train_epochs` passes, between `min_steps` and `max_steps`. A small corpus is validated more
    often, unless `eval_epochs` says how often.
    """
    require_types(TrainConfig, {"max_steps": asked})
    steps = asked or previous
    if not steps and config.num_train_epochs:
        passes = math.ceil(config.num_train_epochs * epoch_steps)
        steps = min(config.max_steps, max(config.min_steps, passes))
    config = config.for_steps(steps or config.max_steps)
    often = max(VALIDATED_STEPS, VALIDATED_PASSES * epoch_steps)
    if config.eval_steps > often:
        config = dataclasses.replace(config, eval_steps=often)
    return config.intervals_in_steps(epoch_steps)


def describe_epochs(config: TrainConfig, epoch_steps: int, hours: float) -> str:
    """'844 steps = 20 epochs over 3 hours', and what may end them early."""
    epochs = config.max_steps / epoch_steps
    few = f"{epochs:.1f}" if epochs < 10 else f"{epochs:,.0f}"
    text = f"{config.max_steps:,} steps = {few} epochs over {hours:.3g} hours"
    if not config.end_patience:
        return text
    judged = "gate evaluations" if config.gate_every else "validations"
    return f"{text}; {config.end_patience} {judged} without improvement end it early"


def estimate_time(
    config: TrainConfig,
    step_s: float,
    budget: TimeBudget,
    slow: str,
    done: int = 0,
    fixed: bool = False,
) -> tuple[TrainConfig, str]:
    """Return `config` with the steps that fit into the time budget, and how long they take.

    A step lasts `step_s` seconds with its share of all else; `slow` says why. Of the steps `done`
    are trained. Their number is `fixed` if a person set it, or if the run is resumed.
    """
    steps = config.max_steps
    fitting = int(60 * budget.minutes / step_s)
    taken = steps
    if budget.minutes and steps > fitting and not fixed:
        clear = min(budget.min_steps, 2 * fitting)
        taken = min(steps, max(fitting, clear, 2 * config.warmup_steps, 1))
    left = max(0, taken - done)
    left_s = left * step_s + (START_S if left else 0)
    if taken == steps:
        to_go = f"{left:,} of them to go, " if done else ""
        text = f"Training: {steps:,} steps of {step_s:.2g} s, {to_go}about {clock(left_s)}."
    else:
        text = (
            f"Training: {steps:,} steps would take {clock(steps * step_s)} here, over the budget "
            f"of {budget.minutes:g} minutes. Training {taken:,} instead ({clock(left_s)}); expect "
            f"a less clear voice. Set MAX_STEPS = {steps} in 02_train to train them all. What is "
            f"slow here: {slow}."
        )
    if left_s > 3600 * SESSION_HOURS:
        text += (
            f" A session of Colab's free tier ends after {SESSION_HOURS} hours at most: run the "
            "notebook again then, and training resumes from its last checkpoint."
        )
    return config.for_steps(taken), text


def estimate_again(rows: list[dict], config: TrainConfig, estimated_step_s: float) -> str:
    """What the steps so far say of the time to go, if it differs from the estimate; else ""."""
    step_s = seconds_per_step(rows, config)
    if abs(step_s - estimated_step_s) <= CHANGED * estimated_step_s:
        return ""
    left = rows[-1]["steps"] - rows[-1]["step"]
    return (
        f"a step takes {step_s:.2g} s and not {estimated_step_s:.2g} s as estimated: "
        f"{clock(left * step_s)} to go, not {clock(left * estimated_step_s)}"
    )


def stored_bytes(
    config: TrainConfig, parameters: int, optimizer_bytes: int, ema: bool, saved: int = 0
) -> int:
    """The most bytes of checkpoints and models that a training of `parameters` has on disk at once.

    `optimizer_bytes` are those of the moments. Of the parameters a checkpoint holds `saved` (0:
    all), and as many averages with `ema`.
    """
    checkpoint_bytes = 4 * (saved or parameters) * (1 + ema) + optimizer_bytes
    models_bytes = 4 * parameters * (1 + ema)
    # The newest ones, the best one, one being written.
    return (config.save_total_limit + 2) * checkpoint_bytes + models_bytes


def disk_warning(needed_bytes: int, folder: Path) -> str:
    """What to change if checkpoints in `folder` need more than the disk has; "" if they fit."""
    folder = Path(folder).resolve()
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    there = next(path for path in (folder, *folder.parents) if path.exists())
    room_bytes = shutil.disk_usage(there).free + stored
    if needed_bytes <= room_bytes:
        return ""
    return (
        f"Checkpoints and models need up to {needed_bytes / 1e9:.1f} GB, and there is room for "
        f"{room_bytes / 1e9:.1f} GB. Lower `train.save_total_limit`, train adapters "
        "(`finetune.method=lora`), or set KIT_RUNS to another disk."
    )
