"""What of a model trains: all of it, or adapters with rows of its tables."""

from functools import partial

from torch import nn

from kit.model.gpt import SpeechGPT
from kit.model.lora import TABLES, add_adapters, is_adapter
from kit.training.config import Finetuning


class Trainable:
    """What of `model` trains under `finetuning`, by name; the rest of it is frozen.

    Adapters are added in place. Of tables whose new rows alone train, the gradients of the others
    (the first `kept_rows`) are 0, and they have no weight decay: they stay to the last bit.
    """

    def __init__(self, model: SpeechGPT, finetuning: Finetuning):
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


def _clear_gradient(rows: int, parameter: nn.Parameter) -> None:
    parameter.grad[:rows] = 0
