"""Time and disk of a run, planned from measured steps: the newest rows of a log, or trial steps."""

import dataclasses
import math
import shutil
import statistics
from pathlib import Path
from typing import NamedTuple

from kit.base.config import require_least, require_types
from kit.base.errors import KitError
from kit.base.formatting import clock
from kit.settings import TimeBudget, TrainConfig

RECENT = 1000  # newest rows that count
HOLDS = {  # what a checkpoint holds
    "full": "weights, average and the optimizer's state",
    "weights": "weights and average alone, in half precision; resumed, the optimizer starts again",
}
LOST_SHARE = 0.05  # of a session, beyond which a disconnect costs too much
# A corpus is validated every so many passes over it, or steps where those are more: after some six
# passes a model that has memorised it gets worse on everything else.
VALIDATED_PASSES = 2
VALIDATED_STEPS = 50
TOO_FEW = 0.2  # of a preset's steps, below which a voice mumbles
TINY_INSTEAD = (
    "So few make no clear voice. For a look at every notebook in a few minutes, take the smallest "
    'preset: PRESET = "tiny" in 00_setup with a RUN of its own, or make demo PRESET=tiny RUN=look.'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """What Colab's free tier and Google Drive allow: 12 hours at most, often less, and 15 GB."""

    session_hours: float = 12.0
    quota_bytes: float | None = None  # for checkpoints and models; None: the disk decides

    def __post_init__(self):
        require_least(self, 0.001, "session_hours")
        require_least(self, 1, "quota_bytes")

    @property
    def session_s(self) -> float:
        return 3600 * self.session_hours


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskSizes:
    """Bytes that a run writes."""

    full_bytes: int  # a checkpoint
    weights_bytes: int  # one with the setting `checkpoint: weights`
    models_bytes: int  # of the models left at the end

    def checkpoint_bytes(self, kind: str) -> int:
        return self.weights_bytes if kind == "weights" else self.full_bytes

    def most_bytes(self, kind: str, keep: int) -> int:
        """The newest `keep`, the best, one being written; the models left at the end."""
        return (keep + 2) * self.checkpoint_bytes(kind) + self.models_bytes


class SessionPlan(NamedTuple):
    """What a run will take."""

    per_step_s: float  # with its share of validations and checkpoints
    advice: tuple[str, ...]  # sentences: what to change; () when nothing needs it
    table: dict[str, str]  # the plan for a reader


def plan_session(
    rows: list[dict],
    config: TrainConfig,
    sizes: DiskSizes,
    folder: Path,
    limits: SessionLimits,
    done: int,
) -> SessionPlan:
    """The plan for `config` after `done` steps, from `rows` of the log or of trial steps.

    `folder` is where the checkpoints are, or will be. Raises KitError when no step has been timed.
    """
    per_step_s = seconds_per_step(rows, config)
    left = max(0, config.max_steps - done)
    left_s = left * per_step_s
    # A session that is cut loses the steps since its last checkpoint, at worst.
    kept_s = limits.session_s - config.save_steps * per_step_s
    sessions = 1
    if left_s > limits.session_s:
        beyond_s = left_s - limits.session_s
        sessions = 1 + math.ceil(beyond_s / kept_s) if kept_s > 0 else None
    now_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    there = next(p for p in (folder, *Path(folder).resolve().parents) if p.exists())
    room_bytes = shutil.disk_usage(there).free
    if limits.quota_bytes is not None:
        room_bytes = min(room_bytes, limits.quota_bytes - now_bytes)
    most_bytes = sizes.most_bytes(config.checkpoint, config.save_total_limit)
    fits = sessions is not None and most_bytes <= now_bytes + room_bytes
    disk = _disk_advice(config, sizes, now_bytes + room_bytes)
    time = _time_advice(config, per_step_s, limits, done, sessions)
    saving = _saving_advice(config, per_step_s, limits, left)
    advice = tuple(filter(None, (disk, time, saving)))
    room = f"{_size(now_bytes)} there now, room for {_size(room_bytes)} more"
    size = _size(sizes.checkpoint_bytes(config.checkpoint))
    table = {
        "steps to go": f"{left:,} of {config.max_steps:,}",
        "a step": f"{per_step_s:.3g} s, with validation and checkpoints",
        "time to the target": clock(left_s),
        f"sessions of {limits.session_hours:g} h": str(sessions or "never done"),
        "a checkpoint": f"{size}: {HOLDS[config.checkpoint]}",
        "disk at most": f"{_size(most_bytes)} ({room})",
        "fits": "yes" if fits else "no",
    }
    table |= {f"advice {number}": text for number, text in enumerate(advice, 1)}
    return SessionPlan(per_step_s, advice, table)


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


def shortened(
    config: TrainConfig, step_s: float, budget: TimeBudget, slow: str, fixed: bool = False
) -> tuple[TrainConfig, str]:
    """Return `config` with the steps that fit into the time budget, and a sentence about it.

    A step lasts `step_s` seconds with its share of all else; `slow` says why. The steps are `fixed`
    if a person set their number, or if the run is resumed.
    """
    steps = config.max_steps
    time = clock(steps * step_s)
    fitting = int(60 * budget.minutes / step_s)
    if fixed or not budget.minutes or steps <= fitting:
        return config, f"Training: {steps:,} steps of {step_s:.2g} s, about {time}."
    clear = min(budget.min_steps, 2 * fitting)
    beyond = f", but {fitting:,} steps would teach it too little" if clear > fitting else ""
    fewer = min(steps, max(fitting, clear, 2 * config.warmup_steps, 1))
    text = (
        f"Training: {steps:,} steps would take {time} here, over the budget of "
        f"{budget.minutes:g} minutes{beyond}. Training {fewer:,} instead "
        f"({clock(fewer * step_s)}); expect a less clear voice. Set MAX_STEPS = {steps} in "
        f"02_train to train them all. What is slow here: {slow}."
    )
    if fewer < TOO_FEW * steps:
        text += f" {TINY_INSTEAD}"
    return config.for_steps(fewer), text


def forecast(config: TrainConfig, step_s: float, budget: TimeBudget, slow: str) -> str:
    """Return a sentence: how long training and the whole demo take, before any training."""
    taken, text = shortened(config, step_s, budget, slow)
    if not budget.other_steps:
        return text
    other_s = budget.other_steps * step_s
    all_s = taken.max_steps * step_s + other_s
    return f"{text} The other notebooks: about {clock(other_s)}. In all about {clock(all_s)}."


def on_disk(parameters: int, optimizer_bytes: int, ema: bool, saved: int = 0) -> DiskSizes:
    """Return what a model of `parameters` writes; `optimizer_bytes` are those of its moments.

    Of the parameters a checkpoint holds `saved` (0: all), and as many averages with `ema`.
    """
    numbers = (saved or parameters) * (1 + ema)
    full_bytes = 4 * numbers + optimizer_bytes
    models_bytes = 4 * parameters * (1 + ema)
    return DiskSizes(full_bytes=full_bytes, weights_bytes=2 * numbers, models_bytes=models_bytes)


def _disk_advice(config: TrainConfig, sizes: DiskSizes, whole_bytes: int) -> str:
    """What to change where checkpoints need more than `whole_bytes`."""
    limit = config.save_total_limit

    def fitting(kind: str) -> int:  # checkpoints that can be kept; 0: not one
        return next((n for n in range(limit, 0, -1) if sizes.most_bytes(kind, n) <= whole_bytes), 0)

    keep = fitting(config.checkpoint)
    if keep == limit:
        return ""
    if keep:
        return f"Keep fewer checkpoints: set `save_total_limit` to {keep} (now {limit})."
    keep = fitting("weights")
    if keep:
        fewer = f" and `save_total_limit` to {keep}" if keep < limit else ""
        return (
            f"Not even `save_total_limit: 1` fits with checkpoints of {_size(sizes.full_bytes)}: "
            f"set `checkpoint` to weights{fewer}. Each then takes {_size(sizes.weights_bytes)} and "
            f"holds {HOLDS['weights']}."
        )
    missing = sizes.most_bytes("weights", 1) - whole_bytes
    return (
        f"Even `checkpoint: weights` and `save_total_limit: 1` need {_size(missing)} more. Free "
        "some space, set KIT_RUNS to a folder on another disk, or choose a smaller preset."
    )


def _time_advice(
    config: TrainConfig, per_step_s: float, limits: SessionLimits, done: int, sessions: int | None
) -> str:
    """What to change where one session is not enough."""
    a_session = int(limits.session_s / per_step_s)
    if sessions is None:
        return (
            f"{config.save_steps:,} steps take longer than a session, so no checkpoint is "
            f"ever reached: set `save_steps` to {max(1, a_session // 2):,} or less."
        )
    if sessions == 1:
        return ""
    return (
        f"This session reaches about step {done + a_session:,}. Lower `MAX_STEPS` in 02_train (now "
        f"{config.max_steps:,}) to that, or run the notebook again after each disconnect: it "
        "resumes automatically."
    )


def _saving_advice(config: TrainConfig, per_step_s: float, limits: SessionLimits, left: int) -> str:
    """What to change where checkpoints come so seldom that much work may be lost."""
    every = config.save_steps
    between_s = every * per_step_s
    bearable_s = LOST_SHARE * limits.session_s
    if left <= every or not bearable_s < between_s < limits.session_s:
        return ""
    fewer = max(1, int(bearable_s / per_step_s))
    return (
        f"A disconnect may cost {clock(between_s)} of work: set `save_steps` to {fewer:,}"
        f" or less (now {every:,})."
    )


def _size(count_bytes: float) -> str:
    if abs(count_bytes) < 1e9:
        return f"{count_bytes / 1e6:.1f} MB"
    return f"{count_bytes / 1e9:.1f} GB"
