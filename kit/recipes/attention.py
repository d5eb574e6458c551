"""How the codes of one training row look at its text, kept as training goes on.

A GPT that speaks has heads that follow the text from piece to piece as the codes go on.
`AttentionLog` listens to a run and keeps at a few steps what the best of them does;
`kept_attention` reads that again.

Shapes: N codes, T text pieces with START and STOP.
"""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from kit.base.files import write_atomic
from kit.base.hardware import autocast
from kit.model.alignment_head import head_diagonality, text_attention_maps
from kit.model.gpt import SpeechGPT
from kit.model.sequence import Batch
from kit.training.config import StepEvent
from kit.training.trainer import Trainer


class AttentionLog:
    """A listener that keeps a map of `row`, a batch of one, in `folder`.

    It does so after the first step, after 1, 2, 4, 8 ... validations, and after the last step.
    `state()` gives the run, whose model is looked at in the precision in which it trains.
    """

    def __init__(self, state: Callable[[], Trainer], row: Batch, folder: Path):
        self.state = state
        self.row = row
        self.folder = folder
        self.validations = 0

    def __call__(self, event: StepEvent) -> None:
        if event.step == 1:
            for stale in self.folder.glob("step-*.npy"):
                stale.unlink()
        due = event.step in (1, event.steps)
        if event.val_loss is not None:
            self.validations += 1
            due = due or self.validations.bit_count() == 1  # a power of two
        if due:
            state = self.state()
            with autocast(state.hw.device, state.applied.precision):
                found = best_map(state.model, self.row)
            file = io.BytesIO()
            np.save(file, found.numpy().astype(np.float16))
            write_atomic(self.folder / f"step-{event.step:07}.npy", file.getvalue())


def kept_attention(folder: Path) -> dict[int, np.ndarray]:
    """What an AttentionLog has kept: a map (N, T) by step, in order."""
    paths = sorted(folder.glob("step-*.npy"))
    return {int(path.stem.removeprefix("step-")): np.load(path) for path in paths}


def best_map(model: SpeechGPT, row: Batch) -> Tensor:
    """The map (N, T), of all layers and heads, in which the codes follow the text best."""
    best = int(head_diagonality(model, row).argmax())
    return text_attention_maps(model, row).flatten(0, 1)[best].cpu()
