"""What of a model trains: all of it, or adapters with new rows of tables; at first maybe tables."""

from functools import partial

from torch import nn

from kit.base.errors import KitError
from kit.model.gpt import SpeechGPT
from kit.model.lora import TABLES, add_adapters, is_adapter
from kit.training.config import Finetuning


class Trainable:
    """What of `model` trains under `finetuning`, by name; the rest of it is frozen.

    Adapters are added in place. Of tables whose new rows alone train, the gradients of the others
    (the first `kept_rows`) are 0, and they have no weight decay: they stay to the last bit.
    """

    def __init__(self, model: SpeechGPT, finetuning: Finetuning):
        self.tables_first = finetuning.config.tables_first
        self.kept_rows: dict[str, int] = {}
        wanted = dict(model.named_parameters())
        if finetuning.adapters:
            if finetuning.base and finetuning.config.tables == "new":
                for name, field in TABLES.items():  # those that have more rows than the base's
                    rows = getattr(finetuning.base.config, field)
                    if rows < getattr(model.config, field):
                        self.kept_rows[name] = rows
            wanted = TABLES if finetuning.config.tables == "all" else self.kept_rows
            add_adapters(model, finetuning.lora)
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in wanted or is_adapter(name))
            if parameter.requires_grad:
                self.parameters[name] = parameter
        for name, rows in self.kept_rows.items():
            parameter = self.parameters[name]
            parameter.register_post_accumulate_grad_hook(partial(_clear_gradient, rows))
        if self.tables_first and not self.first_rows:
            raise KitError(
                f"finetune.tables_first = {self.tables_first}: no row of an embedding or a head is "
                "new, so nothing would train. Set finetune.tables=all, or tables_first to 0."
            )

    @property
    def first_rows(self) -> dict[str, int]:
        """Of each table that trains, the number of the first row that does."""
        return {name: self.kept_rows.get(name, 0) for name in self.parameters if name in TABLES}

    @property
    def count(self) -> int:
        """How many numbers learn: of a table with rows that stay, the others."""
        whole = sum(parameter.numel() for parameter in self.parameters.values())
        kept = (rows * self.parameters[n][0].numel() for n, rows in self.kept_rows.items())
        return whole - sum(kept)

    def set_phase(self, step: int) -> bool:
        """Let those train that do in optimiser step `step`, from 0; whether others did before."""
        changed = False
        for name, parameter in self.parameters.items():
            trains = step >= self.tables_first or name in TABLES
            changed = changed or parameter.requires_grad != trains
            parameter.requires_grad_(trains)
        return changed


def _clear_gradient(rows: int, parameter: nn.Parameter) -> None:
    parameter.grad[:rows] = 0
