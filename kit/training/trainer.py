"""The state of a training run: model, average, optimizers, position in the data, adaptation.

`tree` and `restore` are inverse: a run resumed from a checkpoint computes what the uninterrupted
one would have, bit for bit on a CPU.
"""

import contextlib
import dataclasses
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from kit.base.config import build
from kit.base.errors import DamagedFileError, TrainError
from kit.base.formatting import format_gib, shorten
from kit.base.gradients import loss_scaler
from kit.base.hardware import DTYPES, Hardware, usable_bytes
from kit.model.gpt import SpeechGPT, run_layer
from kit.model.sequence import GPTConfig
from kit.training import checkpoint
from kit.training.adam8bit import converted, moment_shape, moments_of
from kit.training.config import CHECKPOINTS, TrainConfig
from kit.training.ema import EMA
from kit.training.optim import Adaptation, lr_factor, make_optimizers
from kit.training.ranks import ALONE, Ranks, random_states, restore_random_states
from kit.training.switches import Applied, SpeedConfig, Switch, apply, compile_layers
from kit.training.trainable import FULL, Finetuning, Trainable, round_frozen


@dataclasses.dataclass(kw_only=True)
class Best:
    """The best checkpoint so far, by the gate where there is one, else by validation loss."""

    step: int = 0  # 0: none yet
    score: float = math.inf  # lower is better
    waited: int = 0  # evaluations (or validations) since then

    def see(self, step: int, score: float) -> None:
        better = score < self.score
        self.waited = 0 if better else self.waited + 1
        if better:
            self.step = step
            self.score = score


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
        finetuning.require_steps(config.max_steps)
        self.ranks = ranks  # that train together
        self.model = model.to(hw.device)
        self.finetuning = finetuning
        self.trainable = Trainable(model, finetuning)
        self.config = config
        self.speed = speed
        self.hw = hw
        self.applied = apply(model, speed, hw)
        if ranks.several:
            parallel = Switch(
                name="parallel",
                label="Several processes",
                on=True,
                available=True,
                asked=True,
                runs=f"{ranks.world} of them",
                reason="gradients are summed over the processes after the passes of a step",
            )
            self.applied = Applied(switches=(*self.applied.switches, parallel))
        precision = self.applied.precision
        if precision != "fp32" and finetuning.rounds_frozen:
            round_frozen(model, DTYPES[precision], finetuning.base.weights)
        fused = self.applied.on("fused_adamw")
        eight_bit = self.applied.on("adamw_8bit")
        undecayed = self.trainable.undecayed
        self.optimizers = make_optimizers(model, config, fused, precision, undecayed, eight_bit)
        self.scaler = loss_scaler(hw.device, precision)
        self.ema = self._average()
        self.adaptation = Adaptation()
        self.best = Best()
        self.step = 0
        self.position = None
        self.micro_rows = 0  # limit on rows of a pass since memory ran out; 0: none
        self.notes: list[str] = []  # for the next event

    def _average(self) -> EMA | None:
        if not self.speed.ema:
            return None
        away = "cpu" if self.applied.on("ema_offload") else None
        return EMA(self.model, self.config.ema_decay, away, self.trainable.parameters)

    def set_rates(self) -> float:
        """Set every parameter group's learning rate for the next step; returns AdamW's."""
        factor = lr_factor(self.config, self.step) * self.adaptation.rate
        factor *= self.adaptation.warm_up(self.config, self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
        return self.config.lr * factor

    @property
    def guide_weight(self) -> float:
        """Weight of guided attention in the next step: it falls linearly to 0.

        It is 0 for a trunk without a list of layers, which has no head to guide.
        """
        if not hasattr(self.model.gpt, "h"):
            return 0.0
        left = max(0.0, 1 - self.step / self.config.guided_attention_steps)
        return self.config.guided_attention_weight * left

    def set_phase(self) -> None:
        """Freeze what does not train in the next step.

        A compiled layer computes only the gradients of what trained when it was compiled.
        """
        if self.trainable.set_phase(self.step) and self.applied.on("compile"):
            compile_layers(self.model)

    def stop_compiling(self, why: str) -> None:
        """Continue uncompiled because the compiler failed with `why`; noted in log and record."""
        self.model.gpt.run_layer = run_layer
        self.applied = self.applied.without("compile", why)
        self.notes.append(f"torch.compile is off from here, it failed: {why}")

    def averaged(self):
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
            self._judge(loss, "validation loss", "validations")

    def record_evaluation(self, figures: dict) -> None:
        """Rank this step by its character errors; a sentence that does not end counts as 1."""
        self._judge(figures["cer"] + 1 - figures["eos_rate"], "voice", "evaluations")

    def _judge(self, score: float, what: str, judgements: str) -> None:
        self.best.see(self.step, score)
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
        return {
            "model": dict(self.trainable.parameters),
            "ema": self.ema.state_dict() if self.ema else {},
            "optimizer": {str(i): moments_of(o) for i, o in enumerate(self.optimizers)},
            "scaler": self.scaler.state_dict(),
            "random": random_states(self.ranks),
            "run": {
                "step": self.step,
                "steps": self.config.max_steps,
                "position": json.dumps(self.position),
                "adaptation": json.dumps(dataclasses.asdict(self.adaptation)),
                "best": json.dumps(dataclasses.asdict(self.best)),
                "micro_rows": self.micro_rows,
                "memory_bytes": self.smallest_memory_bytes(),
            },
            "shape": json.dumps(dataclasses.asdict(self.model.config)),
            "optimizer_name": self.config.optimizer,
            "conditioner": self._conditioner_rate(),
            "finetuning": json.dumps(self.finetuning.identity()),
        }

    def require_complete(self, tree: dict) -> None:
        """Raise DamagedFileError unless `restore` can resume from `tree`; nothing is changed.

        Raises TrainError when it is undamaged, but of another model.
        """
        require_parts(tree, PARTS, "")
        require_parts(tree["run"], RUN_PARTS, "run|")
        require_json(tree)
        if tree.get("checkpoint", "full") not in CHECKPOINTS:
            raise DamagedFileError(f"its `checkpoint` is {shorten(tree['checkpoint'])}")
        self._require_same(tree)
        names = {name: p.shape for name, p in self.trainable.parameters.items()}
        require_tensors(tree["model"], names, "model|")
        if tree["ema"]:
            names["updates"] = torch.Size([])
            require_tensors(tree["ema"], names, "ema|")
        for number, optimizer in enumerate(self.optimizers):
            sizes = [p.shape for group in optimizer.param_groups for p in group["params"]]
            moments = tree["optimizer"].get(str(number), {})
            require_moments(moments, sizes, f"optimizer|{number}|")
        require_tensors(tree["random"], {"cpu": torch.get_rng_state().shape}, "random|")
        missing = self.scaler.state_dict().keys() - tree["scaler"]
        if tree["scaler"] and missing:
            raise DamagedFileError(f"its `scaler` has no {sorted(missing)}")

    def _require_same(self, tree: dict) -> None:
        """Raise TrainError when `tree` is of another model or optimizer."""
        changed = config_differences(json.loads(tree["shape"]), self.model.config)
        if changed:
            raise TrainError(
                f"The checkpoint is of another model: {changed}. Choose another KIT_RUN for a new "
                "run, or the preset this one was started with."
            )
        if tree["optimizer_name"] != self.config.optimizer:
            raise TrainError(
                f"The checkpoint was trained with optimizer `{tree['optimizer_name']}`, now "
                f"`{self.config.optimizer}` is set. Set it as before, or choose another KIT_RUN."
            )
        rate = tree.get("conditioner", SHARED_RATE)
        if rate != self._conditioner_rate():
            value = "0" if rate == SHARED_RATE else "its rate"
            raise TrainError(
                f"The checkpoint was trained with {rate} for the conditioner; now it is "
                f"{self._conditioner_rate()}. Continue as before with `--set "
                f"train.conditioner_lr={value}`, or choose another KIT_RUN for a new run."
            )
        was = json.loads(tree.get("finetuning", ALL_OF_IT))
        now = self.finetuning.identity()
        names = sorted(was.keys() | now.keys())
        changed = [name for name in names if was.get(name) != now.get(name)]
        if "method" in changed:
            changed = ["method"]  # the other names are settings of that method
        if changed:
            pairs = (f"{n} {shorten(was.get(n))} -> {shorten(now.get(n))}" for n in changed)
            raise TrainError(
                f"The checkpoint's run trained something else: {', '.join(pairs)}. Set "
                "`finetune` and `lora` as they were, or choose another KIT_RUN for a new run."
            )

    def _conditioner_rate(self) -> str:
        """Whether the optimizer has a group for the conditioner."""
        return OWN_RATE if self.config.conditioner_lr else SHARED_RATE

    def restore(self, tree: dict) -> None:
        """Resume from a checkpoint's tree. Raises as `require_complete` does."""
        self.require_complete(tree)
        restore_weights(self.trainable.parameters, tree["model"])
        if self.ema and tree["ema"]:
            self.ema.load_state_dict(tree["ema"])
        else:  # just switched on: the average starts here
            self.ema = self._average()
        for number, optimizer in enumerate(self.optimizers):
            saved = tree["optimizer"].get(str(number), {})
            moments = {int(key): unmapped(tensors) for key, tensors in saved.items()}
            moments, note = converted(moments, optimizer)
            if note:
                self.notes.append(note)
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": moments, "param_groups": groups})
        if tree["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(tree["scaler"])
        run = tree["run"]
        self.step = run["step"]
        restore_random_states(tree["random"], self.ranks, self.config.seed, self.step)
        self.position = json.loads(run["position"])
        self.adaptation = Adaptation(**json.loads(run.get("adaptation", "{}")))
        self.best = Best(**json.loads(run.get("best", "{}")))
        if tree.get("checkpoint") == "weights":
            self.adaptation.begun_step = self.step  # the optimizers' rates warm up from here
            self.notes.append(
                "the checkpoint holds only weights, in half precision: the optimizer starts again, "
                f"with {self.config.warmup_steps:,} steps of warm-up"
            )
        if (
            run["steps"] < self.config.max_steps
        ):  # the run was extended: early stopping counts from 0
            self.best.waited = 0
        self.micro_rows = self._micro_rows_here(run)

    def smallest_memory_bytes(self) -> int:
        """The smallest device of all ranks; called by all of them together."""
        return min(self.ranks.all_gather(usable_bytes(self.hw)))

    def _micro_rows_here(self, run: dict) -> int:
        """The limit on rows of a pass in a checkpoint's `run`; 0 on a larger device."""
        rows = run.get("micro_rows", 0)
        if not rows or "memory_bytes" not in run:
            return rows
        before_bytes = run["memory_bytes"]
        now_bytes = self.smallest_memory_bytes()
        if now_bytes <= before_bytes:
            return rows
        self.notes.append(
            f"passes were limited to {rows} rows for {format_gib(before_bytes)} of memory; this "
            f"device has {format_gib(now_bytes)}, so they are as large as planned again"
        )
        return 0

    def save(self, folder: Path) -> None:
        """Save a checkpoint in `folder`; the main rank writes it, with the state of all ranks."""
        tree = self.tree()
        if not self.ranks.is_main:
            return
        if self.config.checkpoint == "weights":
            tree = checkpoint.weights_alone(tree)
        checkpoint.save(tree, folder, self.step, self.config.save_total_limit, self.best.step)


def unmapped(moments: dict) -> dict:
    """Copy tensors: one still mapped from a checkpoint keeps Windows from removing that file."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in moments.items()}


# What a tree and its `run` must hold, with types.
PARTS = {
    "model": dict,
    "ema": dict,
    "optimizer": dict,
    "scaler": dict,
    "random": dict,
    "run": dict,
    "shape": str,
    "optimizer_name": str,
}
# The conditioner's rate; a checkpoint that does not name it had SHARED_RATE.
OWN_RATE = "a learning rate of its own"
SHARED_RATE = "the rate of the rest"
ALL_OF_IT = '{"method": "full"}'  # `finetuning` of a checkpoint that does not name it
RUN_PARTS = {"step": int, "steps": int, "position": str}


def require_parts(tree: dict, parts: dict[str, type], where: str) -> None:
    """Raise DamagedFileError unless `tree` has `parts` of these types."""
    for name, kind in parts.items():
        if not isinstance(tree.get(name), kind) or isinstance(tree[name], bool):
            actual = type(tree[name]).__name__ if name in tree else "missing"
            raise DamagedFileError(f"its `{where}{name}` is {actual}, not {kind.__name__}")


def require_json(tree: dict) -> None:
    """Raise DamagedFileError unless the JSON in a tree can be read."""
    run = tree["run"]
    try:
        position = json.loads(run["position"])
        shape = json.loads(tree["shape"])
        finetuning = json.loads(tree.get("finetuning", ALL_OF_IT))
        build(Adaptation, json.loads(run.get("adaptation", "{}")))
        build(Best, json.loads(run.get("best", "{}")))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"its `run` cannot be read ({error})") from error
    if not isinstance(position, dict | None) or not isinstance(shape, dict):
        raise DamagedFileError(
            f"its `position` or `shape` is {shorten(position)}, {shorten(shape)}"
        )
    if not isinstance(finetuning, dict):
        raise DamagedFileError(f"its `finetuning` is {shorten(finetuning)}")
    for name in ("micro_rows", "memory_bytes"):
        if type(run.get(name, 0)) is not int:
            raise DamagedFileError(f"its `run|{name}` is {run[name]!r}")


def require_tensors(tensors: dict, shapes: dict[str, torch.Size], where: str) -> None:
    """Raise DamagedFileError unless `tensors` has tensors of these names and shapes."""
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if not isinstance(tensor, Tensor) or tensor.shape != shape:
            actual = tuple(tensor.shape) if isinstance(tensor, Tensor) else "missing"
            raise DamagedFileError(f"its `{where}{name}` is {actual}, not {tuple(shape)}")


def require_moments(moments: dict, sizes: list[torch.Size], where: str) -> None:
    """Raise DamagedFileError unless an optimizer's `moments` are of parameters of these `sizes`."""
    for number, tensors in moments.items():
        known = str(number).isdigit() and int(number) < len(sizes)  # text in a file
        if not known or not isinstance(tensors, dict):
            raise DamagedFileError(f"its `{where}{number}` belongs to no parameter")
        for name, tensor in tensors.items():
            if name != "step":  # a count
                shape = moment_shape(name, sizes[int(number)])
                require_tensors({name: tensor}, {name: shape}, f"{where}{number}|")


@torch.no_grad()
def restore_weights(parameters: dict[str, nn.Parameter], weights: dict) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def config_differences(saved: dict, config: GPTConfig) -> str:
    """'layers 6 -> 12, ...' from a saved configuration to `config`; "" when they are the same.

    A field that `saved` does not have is newer, and had its default value.
    """
    now = dataclasses.asdict(config)
    before = {field.name: field.default for field in dataclasses.fields(config)}
    before.update(saved)
    changed = [name for name in before if before[name] != now.get(name, "unknown")]
    return ", ".join(f"{name} {before[name]} -> {now.get(name, 'unknown')}" for name in changed)
