"""The settings of a training run, what of the model trains, and the event of a step."""

import dataclasses
import math
from pathlib import Path

from kit.base.config import MAX_SEED, require, require_least, require_within
from kit.base.errors import KitError
from kit.model.lora import LoRAConfig
from kit.model.sequence import GPTConfig

CHECKPOINTS = ("full", "weights")  # everything; only weights and average, in half precision
BOARDS = ("tensorboard", "wandb", "trackio")  # programs that show curves: see logs.py
AT_LEAST_ONE = """max_steps min_steps muon_steps eval_steps save_steps save_total_limit
    guided_attention_steps""".split()
NOT_NEGATIVE = """num_train_epochs eval_epochs save_epochs warmup_steps spike gate_every gate_epochs
    gate_patience patience rollbacks lr_plateau_patience early_stopping_patience""".split()
PHASES = {  # of a step, in their order, and what each is called in the record
    "data": "waiting for data",
    "copy": "copying",  # the batch to the device
    "forward": "forward",
    "backward": "backward",
    "graph": "forward and backward",  # as a CUDA graph
    "reduce": "summing gradients",  # of several ranks
    "update": "update",  # clipping, optimizers and the average of the weights
}


def constant(done: float) -> float:
    """The peak rate to the end."""
    return 1.0


def linear(done: float) -> float:
    """A straight line, as transformers' `get_linear_schedule_with_warmup`."""
    return 1 - done


def cosine(done: float) -> float:
    """Half a cosine (Loshchilov and Hutter 2017)."""
    return (1 + math.cos(math.pi * done)) / 2


# Learning-rate schedules after the warm-up: from the share of the steps that are done (0 to 1) to
# the rate, 1 for the peak and 0 for `final_lr`. A schedule needs no state to resume.
SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    max_steps: int = 900  # optimiser steps; with `num_train_epochs`, at most
    num_train_epochs: float = 0.0  # passes over the data, which set the steps; 0: `max_steps`
    min_steps: int = 1  # with `num_train_epochs`, for little data
    optimizer: str = "adamw"  # or "muon": Muon for the trunk's matrices, AdamW for the rest
    lr: float = 2e-3  # peak learning rate of AdamW
    muon_lr: float = 0.02  # peak learning rate of Muon
    conditioner_lr: float = 0.0  # peak learning rate of the conditioner; 0: `lr`
    muon_steps: int = 5  # Newton-Schulz iterations; 3 are nearly enough
    warmup_steps: int = 50
    schedule: str = "constant"  # after the warm-up: a name in `SCHEDULES`
    final_lr: float = 0.1  # where the schedule ends, as a share of the peak rate
    # Validations without a better loss before the rates are halved; 0: never.
    lr_plateau_patience: int = 0
    weight_decay: float = 0.05  # of matrices; biases, norms and embeddings have none
    betas: tuple = (0.9, 0.98)
    guided_attention_weight: float = 0.0  # weight of guided attention in the first step; 0: none
    guided_attention_steps: int = 1000  # steps after which it has fallen to 0
    max_grad_norm: float = 1.0  # gradients are clipped to it
    spike: float = 0.0  # a gradient norm of so many times the average tightens clipping; 0: never
    ema_decay: float = 0.999
    eval_steps: int = 100  # steps between two validations
    eval_epochs: float = 0.0  # the same in passes over the data; 0: `eval_steps`
    gate_every: int = 0  # steps between two evaluations of the quality gate; 0: no gate
    gate_epochs: float = 0.0  # the same in passes over the data; 0: `gate_every`
    gate_patience: int = 0  # evaluations without a better one before the run ends; 0: never
    early_stopping_patience: int = 0  # the same for validations, without a gate
    save_steps: int = 100  # steps between two checkpoints
    save_epochs: float = 0.0  # the same in passes over the data; 0: `save_steps`
    save_total_limit: int = 2  # newest checkpoints; the best one is kept too
    checkpoint: str = "full"  # or "weights", a quarter as large: the optimizer then starts again
    patience: int = 5  # non-finite steps in a row before returning to a checkpoint
    rollbacks: int = 2  # times to return to a checkpoint with half the learning rate
    detect_anomaly: bool = False  # a NaN ends the run with the name of its operator; slow
    boards: tuple[str, ...] = ("tensorboard",)  # of BOARDS, beside the kit's own curves
    seed: int = 0

    def __post_init__(self):
        fix = f"choose one of {', '.join(SCHEDULES)}."
        require(self.schedule in SCHEDULES, self, "schedule", fix)
        require(self.optimizer in ("adamw", "muon"), self, "optimizer", "choose adamw or muon.")
        require_least(self, 1, *AT_LEAST_ONE)
        require_least(self, 0, *NOT_NEGATIVE)
        within = not self.num_train_epochs or self.min_steps <= self.max_steps
        require(within, self, "min_steps", f"must not be above `max_steps` ({self.max_steps}).")
        require_least(self, 1e-9, "max_grad_norm")
        require(self.checkpoint in CHECKPOINTS, self, "checkpoint", "choose full or weights.")
        fix = f"choose from {', '.join(BOARDS)}; [] for none."
        require(set(self.boards) <= {*BOARDS}, self, "boards", fix)
        require(len(self.betas) == 2, self, "betas", "two numbers, such as [0.9, 0.98].")
        require_within(self, 0, 0.99999, "betas", "ema_decay")
        require_within(self, 1e-12, 10, "lr", "muon_lr")  # a negative one would train uphill
        require_within(self, 0, 10, "conditioner_lr")
        require_within(self, 0, 1, "final_lr", "weight_decay")
        require_within(self, 0, 100, "guided_attention_weight")
        require_within(self, 0, MAX_SEED, "seed")
        has_gate = not self.gate_patience or self.gate_every or self.gate_epochs
        fix = "needs `gate_every` or `gate_epochs`: without them there is no gate."
        require(has_gate, self, "gate_patience", fix)

    @property
    def end_patience(self) -> int:
        """Evaluations, or without a gate validations, without a better one before the run ends."""
        return self.gate_patience if self.gate_every else self.early_stopping_patience

    def for_steps(self, steps: int) -> "TrainConfig":
        """Adapt these settings to a run of another length.

        The warm-up takes at most a tenth of it and guided attention four tenths. Validations and
        evaluations are as many as in the longer run, but at most ten, unless they count epochs.
        """
        if steps == self.max_steps:
            return self
        tenth = max(1, steps // 10)
        share = steps / self.max_steps
        eval_steps = min(self.eval_steps, max(tenth, round(self.eval_steps * share)))
        gate_every = min(self.gate_every, max(tenth, round(self.gate_every * share)))
        return dataclasses.replace(
            self,
            max_steps=steps,
            num_train_epochs=0.0,
            warmup_steps=min(self.warmup_steps, tenth),
            guided_attention_steps=min(self.guided_attention_steps, 4 * tenth),
            eval_steps=self.eval_steps if self.eval_epochs else eval_steps,
            gate_every=self.gate_every if self.gate_epochs else gate_every,
        )

    def intervals_in_steps(self, epoch_steps: int) -> "TrainConfig":
        """Convert intervals given in epochs for a corpus of `epoch_steps` steps a pass."""
        epochs = {"eval_steps": self.eval_epochs, "save_steps": self.save_epochs}
        epochs["gate_every"] = self.gate_epochs
        steps = {name: max(1, round(n * epoch_steps)) for name, n in epochs.items() if n}
        return dataclasses.replace(self, **steps) if steps else self

    def without_gate(self) -> "TrainConfig":
        """These settings without the quality gate: only the validation loss counts."""
        return dataclasses.replace(self, gate_every=0, gate_epochs=0.0, gate_patience=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """What trains. All but "full" is for a run that begins with a voice."""

    method: str = "full"  # "lora": adapters; "auto": as a run begins with a voice, by its size
    tables: str = "new"  # with adapters: rows of embeddings, positions, heads: the "new", or "all"
    tables_first: int = 0  # steps in which embeddings, positions and heads train alone; 0: none
    # Share of an epoch's rows that the base voice speaks, so that it is not forgotten; 0: none.
    rehearsal: float = 0.0
    rehearsal_rows: int = 320  # rows spoken for it, before the first step
    rehearsal_sentences: str = ""  # a YAML file of them, by language; "": the kit's

    def __post_init__(self):
        known = self.method in ("full", "lora", "auto")
        require(known, self, "method", "choose full, lora or auto.")
        require(self.tables in ("new", "all"), self, "tables", "choose new or all.")
        require_least(self, 0, "tables_first")
        require_within(self, 0, 0.9, "rehearsal")
        require_least(self, 1, "rehearsal_rows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """What adapters belong to: a voice's model before anything was added to it."""

    config: GPTConfig
    sha256: str  # of its tensors
    weights: Path | None = None  # the file that they stay in, where there is one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetuning:
    """A run's settings of what trains, with the voice that it begins with, if any."""

    config: FinetuneConfig = FinetuneConfig()
    lora: LoRAConfig = dataclasses.field(default_factory=LoRAConfig)
    base: Base | None = None

    @property
    def adapters(self) -> bool:
        """Whether adapters train in place of the matrices that they are added to."""
        return self.config.method == "lora"

    @property
    def rounds_frozen(self) -> bool:
        """Whether frozen matrices may be rounded: a file has the exact ones."""
        return self.adapters and self.base is not None and self.base.weights is not None

    def without_phases(self) -> "Finetuning":
        """The same where everything trains from the first step on: what takes most memory."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, tables_first=0))

    def require_voice(self) -> None:
        """Raise KitError if a run from scratch would freeze, or rehearse with, random weights."""
        asked = [name for name in ("rehearsal", "tables_first") if getattr(self.config, name)]
        if self.adapters:
            asked.append("method")
        if self.base is None and asked:
            raise KitError(
                f"finetune.{asked[0]} = {getattr(self.config, asked[0])}: this run starts from "
                "scratch, so what is frozen would stay random, and nothing can be rehearsed. Start "
                "from a voice (BASE_MODEL in 01_data_prep, --base-model), or leave `finetune` out."
            )

    def require_steps(self, steps: int) -> None:
        """Raise KitError unless some of `steps` are left after the first phase."""
        if self.config.tables_first >= steps:
            raise KitError(
                f"finetune.tables_first = {self.config.tables_first}: of {steps} steps none is "
                "left in which everything trains. Give it fewer, or train longer."
            )

    def identity(self) -> dict:
        """Plain values that must be unchanged to resume from a checkpoint."""
        if not self.adapters:
            return {"method": "full"}
        return {
            "method": "lora",
            "rank": self.lora.rank,
            "alpha": self.lora.alpha,
            "targets": list(self.lora.targets),
            "tables": self.config.tables,
            "base_sha256": self.base.sha256 if self.base else "",
        }


FULL = Finetuning()  # everything trains


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
    memory_now_bytes: int = 0  # at the end of the step, as above; 0: unknown
    reserved_bytes: int = 0  # what the GPU allocator holds, with cached blocks; 0: no GPU
    # Where the step's time went (PHASES); of a GPU: the device's own seconds.
    data_s: float = 0.0  # waiting for the batch
    copy_s: float = 0.0  # to the device
    forward_s: float = 0.0
    backward_s: float = 0.0
    graph_s: float = 0.0  # forward and backward as a CUDA graph
    reduce_s: float = 0.0  # summing the gradients of several ranks
    update_s: float = 0.0  # clipping, optimizers, average; on a GPU of the step before
    sync_s: float = 0.0  # of these, the CPU waited for the GPU
    eval_s: float = 0.0  # validation and gate, after the step
    unix_s: float = 0.0  # when it ended, with validation; 0: unknown
    val_loss: float | None = None  # raw weights, on validation steps
    ema_val_loss: float | None = None  # averaged weights
    gate: dict | None = None  # the quality gate's figures, on gate steps
    note: str = ""  # anything unusual
    device_bytes: int | None = None  # in use on the device, other processes included
    load: float | None = None  # share of the device that was busy since the last sample, 0 to 1
    epoch: int | None = None  # complete passes over the data so far; None: unknown
