"""A pass: the loss of one micro-batch; on a GPU whole passes as CUDA graphs.

Python needs longer to start a kernel than a GPU needs to run it, unless the kernel is large: at
XTTS-v2's size with 8 rows an H200 worked 45 of 100 ms. A CUDA graph starts all kernels of forward,
loss and backward by one call. Its shapes and addresses are fixed, so there is one for each number
of rows and tokens; what differs from batch to batch is copied into its inputs first.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kit.base import compiler
from kit.base.formatting import describe_error
from kit.base.hardware import autocast, release_memory
from kit.model.gpt import SpeechGPT, weighted_loss
from kit.model.sequence import IGNORE_INDEX, Batch
from kit.settings import GPTConfig
from kit.training import checkpoint

# Steps before the first recording: the largest pass of these comes first, others use its memory.
FIRST_RECORDING = 5
MAX_GRAPHS = 64  # each takes some megabytes beside that memory

Number = float | Tensor


def pass_loss(
    model: SpeechGPT,
    precision: str,
    batch: Batch,
    text_total: Number,
    code_total: Number,
    guide_weight: Number = 0.0,
    text_width: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return what `batch` adds to the loss of the step, detached, and the objective of this pass.

    The totals count the targets of all passes of the step, so gradients do not depend on how it is
    split. With `text_width`, the most text tokens of a row, the objective has guided attention.
    """
    with autocast(batch.tokens.device.type, precision):
        sums = model(batch, text_width)
    loss = weighted_loss(model.config, sums, text_total, code_total)
    objective = loss
    if text_width:
        objective = loss + guide_weight * sums[2] / code_total
    return loss.detach(), objective


def fixed_targets(config: GPTConfig, batch: Batch) -> Batch:
    """Return `batch` with as many targets as its shape may ever have; those added do not count."""
    rows, width = batch.tokens.shape
    columns = dict(vars(batch))
    for kind, positions in (("text", config.max_text), ("code", config.max_code)):
        indices, targets = f"{kind}_indices", f"{kind}_targets"
        added = rows * min(positions, width) - len(columns[targets])
        columns[indices] = F.pad(columns[indices], (0, added))
        columns[targets] = F.pad(columns[targets], (0, added), value=IGNORE_INDEX)
    return Batch(**columns)


class RecordedPass(NamedTuple):
    """A pass as a CUDA graph: its inputs, which each replay overwrites, and its result."""

    batch: Batch
    numbers: list[Tensor]  # as `PassGraphs.compute` takes them
    loss: Tensor
    graph: torch.cuda.CUDAGraph


class PassGraphs:
    """The passes of a Trainer: recorded after the first one of a shape, replayed from then on.

    Recorded or not, a pass computes the same. Gradients are added in place, so the trainer must
    keep their memory from step to step.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.recorded: dict[tuple, RecordedPass] = {}
        self.seen: dict[tuple, Batch] = {}  # one of each shape that is to be recorded
        self.steps = 0  # so far

    def run(self, batch: Batch, text_total: int, code_total: int, guide_weight: float) -> Tensor:
        """Add the gradients of `batch`, which is on the device; return its part of the loss.

        The next call may overwrite the result.
        """
        batch = fixed_targets(self.trainer.model.config, batch)
        numbers = (text_total, code_total, guide_weight)
        shape = (*batch.tokens.shape, batch.cond.shape[-1], guide_weight > 0)
        if shape in self.recorded:
            recorded = self.recorded[shape]
            for name, tensor in vars(batch).items():
                getattr(recorded.batch, name).copy_(tensor)
            for own, number in zip(recorded.numbers, numbers):
                own.fill_(number)
            recorded.graph.replay()
            return recorded.loss
        self.seen[shape] = batch
        return self.compute(batch, on_device(numbers, batch), guide_weight > 0)

    def compute(self, batch: Batch, numbers: list[Tensor], guided: bool) -> Tensor:
        """What a graph records; `numbers` are the totals of targets and the guide's weight."""
        trainer = self.trainer
        text_width = 0
        if guided:
            text_width = min(trainer.model.config.max_text, batch.tokens.shape[1])
        precision = trainer.applied.precision
        loss, objective = pass_loss(trainer.model, precision, batch, *numbers, text_width)
        trainer.scaler.scale(objective).backward()
        return loss

    def record_seen(self) -> None:
        """Record the shapes that have come, the largest first. Call it between two steps.

        Where one cannot be recorded, none is replayed from then on, and the trainer says why.
        """
        self.steps += 1
        room = MAX_GRAPHS - len(self.recorded)
        if self.steps <= FIRST_RECORDING or not self.seen or room < 1:
            return
        before = checkpoint.random_state()
        try:
            for shape in sorted(self.seen, reverse=True, key=lambda s: s[0] * s[1])[:room]:
                release_memory(self.trainer.hw.device)
                self.recorded[shape] = self.record(self.seen[shape], guided=shape[-1])
        except Exception as error:  # also if memory runs out
            self.trainer.turn_off("cuda_graphs", describe_error(error))
        self.seen.clear()
        checkpoint.restore_random_state(before)
        self.trainer.clear_gradients()  # where recording has failed

    def record(self, batch: Batch, guided: bool) -> RecordedPass:
        batch = Batch(**{name: tensor.clone() for name, tensor in vars(batch).items()})
        numbers = on_device((1.0, 1.0, 0.0), batch)
        pool = next((each.graph.pool() for each in self.recorded.values()), None)
        graph, loss = compiler.capture_graph(
            lambda: self.compute(batch, numbers, guided), self.trainer.clear_gradients, pool
        )
        return RecordedPass(batch, numbers, loss, graph)

    def forget(self) -> None:
        """Free all graphs: what they recorded has changed, or their memory is needed."""
        self.recorded.clear()
        self.seen.clear()


def on_device(numbers: tuple[float, ...], batch: Batch) -> list[Tensor]:
    """`numbers` as tensors () beside `batch`; filled there, because a copy would wait for it."""
    return [torch.full((), float(number), device=batch.tokens.device) for number in numbers]
