"""The state of a training run: model, what of it trains, average, optimizers, position, adaptation.

`tree` and `restore` are inverse: a run resumed from a checkpoint computes what the uninterrupted
one would have, bit for bit on a CPU.
"""

import contextlib
import dataclasses
import json
import math
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from kit.base.errors import KitError
from kit.base.formatting import shorten
from kit.base.hardware import DTYPES, Hardware
from kit.base.tensor_file import saved_tensor
from kit.model.gpt import SpeechGPT, run_layer
from kit.model.lora import adapted_layers
from kit.settings import SpeedConfig, TrainConfig
from kit.training import checkpoint
from kit.training.config import FULL, PHASES, Finetuning
from kit.training.optim import EMA, Adaptation, lr_factor, make_optimizers, moments_of
from kit.training.passes import PassGraphs
from kit.training.ranks import ALONE, Ranks, seed_rank
from kit.training.switches import LABELS, apply, compilations
from kit.training.trainable import Trainable


@dataclasses.dataclass(kw_only=True)
class Best:
    """The best checkpoint so far, by the gate where there is one, else by validation loss."""

    step: int = 0  # 0: none yet
    score: float = math.inf  # lower is better
    waited: int = 0  # evaluations (or validations) since then


class StepClock:
    """`mark(phase)` where a phase begins, `mark("")` where the last one ends, `read()` afterwards.

    On a GPU the marks are CUDA events: the seconds are the device's own, idle time included. Events
    that have not happened yet are counted by the next `read`: a GPU's update is that of the step
    before, since nothing waits for it.
    """

    def __init__(self, device: str):
        self.on_gpu = device == "cuda"
        self.marks = []  # (phase, time), in order
        self.waited_s = 0.0

    def mark(self, phase: str) -> None:
        moment = time.perf_counter()
        if self.on_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self.marks.append((phase, moment))

    def wait_for(self, tensor: torch.Tensor) -> list:
        """`tensor.tolist()`, where the CPU waits for the GPU; `sync_s` is how long it waited."""
        began_s = time.perf_counter()
        numbers = tensor.tolist()
        self.waited_s += time.perf_counter() - began_s
        return numbers

    def read(self) -> dict[str, float]:
        """Seconds since the last `read`: `data_s`, `copy_s`, ... and `sync_s`."""
        seconds = {f"{phase}_s": 0.0 for phase in PHASES}
        while len(self.marks) > 1 and (not self.on_gpu or self.marks[1][1].query()):
            (phase, began), (_, ended) = self.marks[:2]
            del self.marks[0]
            if phase:
                took_s = began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
                seconds[f"{phase}_s"] += took_s
        seconds["sync_s"] = self.waited_s
        self.waited_s = 0.0
        return seconds


class Trainer:
    """One run: the model, what trains it, and how far it is."""

    def __init__(
        self,
        model: SpeechGPT,
        config: TrainConfig,
        speed: SpeedConfig,
        hw: Hardware,
        finetuning: Finetuning = FULL,
        ranks: Ranks = ALONE,
    ):
        self.ranks = ranks  # that train together
        self.model = model.to(hw.device)
        self.finetuning = finetuning
        self.trainable = Trainable(model, finetuning)
        self.config = config
        self.speed = speed
        self.hw = hw
        self.applied = apply(model, speed, hw, ranks.world)
        precision = self.applied.precision
        if precision != "fp32" and finetuning.rounds_frozen:
            # Autocast rounds frozen matrices anyway, so matmuls do not change. Merging reads the
            # exact weights from their file, so exported and spoken weights are not rounded.
            for name, layer in adapted_layers(model):
                frozen = layer.weight.detach().to(DTYPES[precision])
                layer.weight = nn.Parameter(frozen, requires_grad=False)
                layer.exact = partial(saved_tensor, finetuning.base.weights, f"{name}.weight")
        self.optimizers = make_optimizers(
            model,
            config,
            fused=self.applied.on("fused_adamw"),
            precision=precision,
            undecayed=[self.trainable.parameters[name] for name in self.trainable.kept_rows],
            eight_bit=self.applied.on("adamw_8bit"),
        )
        self.scaler = torch.amp.GradScaler(hw.device, enabled=precision == "fp16")
        self.ema = self._new_average()
        self.adaptation = Adaptation()
        self.best = Best()
        self.step = 0
        self.position = None
        self.micro_rows = 0  # limit on rows of a pass since memory ran out; 0: none
        self.before_bytes = 0  # see `memory_used`
        self.graphs = None
        if self.applied.on("cuda_graphs") and not config.detect_anomaly:
            self.graphs = PassGraphs(self)
        # Random numbers at the end of the step, while passes of the next one run already.
        self.random_ahead: dict[str, Tensor] | None = None
        self.notes: list[str] = []  # for the next event
        self.clock = StepClock(hw.device)

    def _new_average(self) -> EMA | None:
        away = "cpu" if self.applied.on("ema_offload") else ""
        parameters = self.trainable.parameters
        return EMA(parameters, self.config.ema_decay, away) if self.speed.ema else None

    def set_rates(self) -> float:
        """Set every parameter group's learning rate for the next step; returns AdamW's."""
        factor = lr_factor(self.config, self.step) * self.adaptation.rate
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
        return self.config.lr * factor

    @property
    def guide_weight(self) -> float:
        """Weight of guided attention in the next step: it falls linearly to 0."""
        if not hasattr(self.model.gpt, "h"):
            return 0.0
        left = max(0.0, 1 - self.step / self.config.guided_attention_steps)
        return self.config.guided_attention_weight * left

    @property
    def updates_on_device(self) -> bool:
        """Whether an update needs no number on the CPU, so that the next passes need not wait."""
        alone = not self.ranks.several and len(self.optimizers) == 1
        return alone and self.hw.device == "cuda" and self.applied.on("fused_adamw")

    @property
    def compilations(self) -> int:
        """The graphs compiled in this process, and the passes recorded as CUDA graphs."""
        return compilations() + (len(self.graphs.recorded) if self.graphs else 0)

    def clear_gradients(self) -> None:
        """Set the gradients to 0: graphs add to them where they are, else their memory is freed."""
        if self.graphs is None:
            self.model.zero_grad(set_to_none=True)
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)

    def drop_ahead(self) -> None:
        """Forget passes that run already of a step that is not taken."""
        if self.random_ahead is not None:
            checkpoint.restore_random_state(self.random_ahead)
            self.random_ahead = None
            self.clear_gradients()

    def turn_off(self, name: str, why: str) -> None:
        """Continue without "compile" or "cuda_graphs" because it failed; noted in the log."""
        if name == "compile":
            self.model.gpt.run_layer = run_layer
        else:
            self.graphs = None
        self.applied = self.applied.without(name, why)
        self.notes.append(f"{LABELS[name]} is off from here, it failed: {why}")

    def averaged(self) -> contextlib.AbstractContextManager:
        """A context in which the model holds its averaged weights, if there are any."""
        return self.ema.swapped_in() if self.ema else contextlib.nullcontext()

    def pop_notes(self) -> str:
        notes = "; ".join(self.notes)
        self.notes = []
        return notes

    def record_validation(self, loss: float) -> None:
        """Adapt the rates to a validation loss; without a gate it decides which step is best."""
        note = self.adaptation.record_validation(self.config, loss)
        if note:
            self.notes.append(note)
        if not self.config.gate_every:
            self.judge(loss, "validation loss", "validations")

    def judge(self, score: float, what: str, judgements: str) -> None:
        """Compare this step with the best one; a lower score is better."""
        if score < self.best.score:
            self.best = Best(step=self.step, score=score)
        else:
            self.best.waited += 1
        if self.settled:
            self.notes.append(
                f"no better {what} in {self.best.waited} {judgements}: training ends here; "
                f"the best is step {self.best.step}"
            )

    @property
    def settled(self) -> bool:
        """Whether the gate, or without one the validation loss, has not improved for too long."""
        return 0 < self.config.end_patience <= self.best.waited

    def tree(self) -> dict:
        """Everything a checkpoint holds; called by all ranks together."""
        random, *others = self.ranks.all_gather(self.random_ahead or checkpoint.random_state())
        if others:
            random["ranks"] = {str(rank): state for rank, state in enumerate(others, start=1)}
        return {
            "model": dict(self.trainable.parameters),
            "ema": self.ema.state_dict() if self.ema else {},
            "optimizer": {str(i): moments_of(o) for i, o in enumerate(self.optimizers)},
            "scaler": self.scaler.state_dict(),
            "random": random,
            "run": {
                "step": self.step,
                "steps": self.config.max_steps,
                "position": json.dumps(self.position),
                "adaptation": json.dumps(dataclasses.asdict(self.adaptation)),
                "best": json.dumps(dataclasses.asdict(self.best)),
                "micro_rows": self.micro_rows,
            },
            "made_with": self.made_with(),
        }

    def made_with(self) -> str:
        """The settings that must be unchanged to resume, as JSON."""
        rate = "the rate of the rest"
        if self.config.conditioner_lr:
            rate = "a learning rate of its own"
        settings = dataclasses.asdict(self.model.config) | self.finetuning.identity()
        settings["train.optimizer"] = self.config.optimizer
        settings["train.conditioner_lr"] = rate
        return json.dumps(settings)

    def require_same(self, tree: dict) -> None:
        """Raise KitError when `tree` is of a run with other settings, and name them."""
        if "made_with" not in tree or tree.get("checkpoint") == "weights":
            raise KitError(
                "The checkpoint was written by an earlier version of the kit: finish this run with "
                "that version, or choose another KIT_RUN for a new run."
            )
        before = json.loads(tree["made_with"])
        now = json.loads(self.made_with())
        # What only one of them has belongs to one method of fine-tuning, or is newer.
        changed = [
            shorten(f"{name} {before[name]} -> {now[name]}")
            for name in now
            if name in before and before[name] != now[name]
        ]
        adamw = tree["optimizer"].get("0", {})
        is_8bit = any("state1" in moments for moments in adamw.values())
        if adamw and is_8bit != self.applied.on("adamw_8bit"):
            changed.append(f"speed.adamw_8bit {is_8bit} -> {not is_8bit}")
        if changed:
            raise KitError(
                f"The checkpoint was trained with other settings: {', '.join(changed)}. Set them "
                "as they were, or choose another KIT_RUN for a new run."
            )

    def restore(self, tree: dict) -> None:
        """Resume from a checkpoint's tree. Raises KitError as `require_same` does."""
        self.require_same(tree)
        self.drop_ahead()
        with torch.no_grad():
            for name, parameter in self.trainable.parameters.items():
                parameter.copy_(tree["model"][name])
        if self.ema and tree["ema"]:
            self.ema.load_state_dict(tree["ema"])
        else:  # just switched on: the average starts here
            self.ema = self._new_average()
        if tree["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(tree["scaler"])
        for number, optimizer in enumerate(self.optimizers):
            groups = optimizer.state_dict()["param_groups"]
            # Copied: they are trained further, and these are mapped from the checkpoint's file.
            moments = {
                int(key): {n: v.clone() if isinstance(v, Tensor) else v for n, v in m.items()}
                for key, m in tree["optimizer"].get(str(number), {}).items()
            }
            optimizer.load_state_dict({"state": moments, "param_groups": groups})
        run = tree["run"]
        self.step = run["step"]
        self.position = json.loads(run["position"])
        adaptation = json.loads(run["adaptation"])
        adaptation.pop("begun_step", None)  # of an earlier version
        self.adaptation = Adaptation(**adaptation)
        self.best = Best(**json.loads(run["best"]))
        if run["steps"] < self.config.max_steps:
            self.best.waited = 0  # the run was extended: early stopping counts from 0
        self.micro_rows = run["micro_rows"]
        random = tree["random"]
        if not self.ranks.is_main:
            random = random.get("ranks", {}).get(str(self.ranks.rank))
        if random is None:  # there are more ranks than before
            seed_rank(self.ranks, self.config.seed, self.step)
        else:
            checkpoint.restore_random_state(random)

    def save(self, folder: Path) -> None:
        """Save a checkpoint in `folder`; the main rank writes it, with the state of all ranks."""
        tree = self.tree()
        if self.ranks.is_main:
            checkpoint.save(tree, folder, self.step, self.config.save_total_limit, self.best.step)
