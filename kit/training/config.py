"""The settings of a training run, what of the model trains, and the event of a step."""

import dataclasses
from pathlib import Path

from kit.base.errors import KitError
from kit.settings import FinetuneConfig, GPTConfig, LoRAConfig

PHASES = {  # of a step, in their order, and what each is called in the record
    "data": "waiting for data",
    "copy": "copying",  # the batch to the device
    "forward": "forward",
    "backward": "backward",
    "graph": "forward and backward",  # as a CUDA graph
    "reduce": "summing gradients",  # of several ranks
    "update": "update",  # clipping, optimizers and the average of the weights
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """What adapters belong to: a voice's model before anything was added to it."""

    config: GPTConfig
    sha256: str  # of its tensors
    weights: Path | None = None  # the file that they stay in, where there is one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetuning:
    """A run's settings of what trains, with the voice that it begins with, if any."""

    config: FinetuneConfig = dataclasses.field(default_factory=FinetuneConfig)
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

    def require_voice(self) -> None:
        """Raise KitError if a run from scratch would freeze random weights."""
        if self.adapters and self.base is None:
            raise KitError(
                "finetune.method = lora: this run starts from scratch, so what is frozen would "
                "stay random. Start from a voice (BASE_MODEL in 01_data_prep, --base-model), or "
                "leave `finetune` out."
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
    memory_bytes: int  # peak so far, as `kit.base.hardware.memory_used`
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
    ram_bytes: int | None = None  # of the machine's RAM, by this process and its children
    load: float | None = None  # share of the device that was busy since the last sample, 0 to 1
    epoch: int | None = None  # complete passes over the data so far; None: unknown
