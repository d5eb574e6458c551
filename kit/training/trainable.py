"""Which of a model's parameters train: all, adapters alone, embeddings and heads before the rest.

`Finetuning` is the request, `Trainable` the resulting parameters of a model: the optimizers, the
average and the checkpoints hold only those.
"""

import dataclasses
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from kit.base.config import require, require_least, require_within
from kit.base.errors import KitError
from kit.base.tensor_file import saved_tensor
from kit.model.gpt import SpeechGPT
from kit.model.lora import TABLES, LoRAConfig, adapted_layers, add_adapters, is_adapter
from kit.model.sequence import GPTConfig

METHODS = ("full", "lora", "auto")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """What trains. All but "full" is for a run that begins with a voice."""

    method: str = "full"  # "lora": adapters; "auto": as a run begins with a voice, by its size
    tables: str = "new"  # with adapters: rows of embeddings, positions, heads: the "new", or "all"
    tables_first: int = 0  # steps in which embeddings, positions and heads train alone; 0: none
    # Share of an epoch's rows in which the voice that the run began with says what it could say
    # before, so that it is not forgotten; 0: none.
    rehearsal: float = 0.0
    rehearsal_rows: int = 320  # that are spoken for it, before the first step
    rehearsal_sentences: str = ""  # a YAML file of them, by language; "": the kit's

    def __post_init__(self):
        known = "choose full, lora or auto."
        require(self.method in METHODS, self, "method", known)
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
        """Whether adapters train in place of the matrices beside which they lie."""
        return self.config.method == "lora"

    @property
    def rounds_frozen(self) -> bool:
        """Whether frozen matrices may be rounded, as a file has them whole: see `round_frozen`."""
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


class Trainable:
    """What of `model` trains under `finetuning`, by name; the rest of it is frozen.

    Adapters are added in place. Of tables whose new rows alone train, the gradients of the others
    are 0, and they have no weight decay: such rows stay to the last bit.
    """

    def __init__(self, model: SpeechGPT, finetuning: Finetuning):
        self.tables_first = finetuning.config.tables_first
        self.kept_rows: dict[str, int] = {}
        wanted = set(dict(model.named_parameters()))
        if finetuning.adapters:
            wanted = self._beside_adapters(model.config, finetuning)
            add_adapters(model, finetuning.lora)
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            trains = name in wanted or is_adapter(name)
            parameter.requires_grad_(trains)
            if trains:
                self.parameters[name] = parameter
        for name, rows in self.kept_rows.items():
            self.parameters[name].register_post_accumulate_grad_hook(_without_gradient(rows))
        if self.tables_first and not self.first_rows:
            raise KitError(
                f"finetune.tables_first = {self.tables_first}: no row of an embedding or a head is "
                "new, so nothing would train. Set finetune.tables=all, or tables_first to 0."
            )

    def _beside_adapters(self, config: GPTConfig, finetuning: Finetuning) -> set[str]:
        if finetuning.config.tables == "all":
            return set(TABLES)
        if finetuning.base:
            for name, field in TABLES.items():  # those that have more rows than the base's
                rows = getattr(finetuning.base.config, field)
                if rows < getattr(config, field):
                    self.kept_rows[name] = rows
        return set(self.kept_rows)

    @property
    def first_rows(self) -> dict[str, int]:
        """Of each table that trains, the number of the first row that does."""
        return {name: self.kept_rows.get(name, 0) for name in self.parameters if name in TABLES}

    @property
    def undecayed(self) -> set[nn.Parameter]:
        """Parameters of which rows must stay."""
        return {self.parameters[name] for name in self.kept_rows}

    @property
    def count(self) -> int:
        """How many numbers learn: of a table with rows that stay, the others."""
        whole = sum(parameter.numel() for parameter in self.parameters.values())
        kept = (rows * self.parameters[n][0].numel() for n, rows in self.kept_rows.items())
        return whole - sum(kept)

    def set_phase(self, step: int) -> bool:
        """Let those train that do in optimiser step `step`, from 0; whether others did before."""
        first = step < self.tables_first
        changed = False
        for name, parameter in self.parameters.items():
            trains = not first or name in TABLES
            changed = changed or parameter.requires_grad != trains
            parameter.requires_grad_(trains)
        return changed


def round_frozen(model: SpeechGPT, dtype: torch.dtype, weights: Path) -> None:
    """Store the frozen matrices in `dtype` (half the bytes); `weights` is their file.

    Autocast rounds them to that precision anyway, so the matmuls do not change. Merging reads the
    exact weights from the file, so exported and spoken weights are not rounded.
    """
    for name, module in adapted_layers(model):
        module.round_weight(dtype, partial(saved_tensor, weights, f"{name}.weight"))


def _without_gradient(rows: int):
    def forget(parameter: nn.Parameter) -> None:
        gradient: Tensor = parameter.grad
        gradient[:rows] = 0

    return forget
