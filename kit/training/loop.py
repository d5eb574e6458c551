"""The training loop: a generator that takes optimiser steps and yields an event after each.

A step that runs out of memory is repeated in smaller passes; one that is not finite is skipped.
Several ranks take every step together and decide together before the weights change.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kit.base.compiler import compiler_error
from kit.base.errors import Diverged, KitError
from kit.base.hardware import is_oom, memory_used, release_memory
from kit.model.sequence import Batch, EffectiveBatch
from kit.model.text_attention import max_text_tokens
from kit.training import checkpoint
from kit.training.config import StepEvent
from kit.training.passes import pass_loss
from kit.training.trainer import Trainer


def train(
    trainer: Trainer,
    batches: Iterable[EffectiveBatch],
    validate: Callable[[], float] = lambda: math.nan,
    stop: Callable[[], bool] = lambda: False,
    evaluate: Callable[[], dict] | None = None,
) -> Iterator[StepEvent]:
    """Train until `config.max_steps`, `stop()` or early stopping; yields an event per step.

    `validate()` returns the loss and `evaluate()` the figures (`cer`, `eos_rate`, ...) of the
    weights that the model holds at that moment. Raises Diverged after more than `patience`
    non-finite steps in a row, and KitError when a single row does not fit into memory.
    """
    config = trainer.config
    batches = start_stream(batches)
    trainer.drop_ahead()
    skipped = 0
    ahead = None  # (batch, loss) of the next step, where its passes run already
    while trainer.step < config.max_steps and not trainer.settled and not trainer.ranks.any(stop()):
        started_s = time.perf_counter()
        current = ahead or begin_step(trainer, batches)
        if current is None:
            raise KitError(f"The data ended at step {trainer.step} of {config.max_steps}.")
        batch, loss = current
        trainer.clock.mark("reduce")
        trainer.ranks.sum_gradients(trainer.trainable.parameters.values())
        lr = trainer.set_rates()
        numbers = torch.stack((loss, gradient_norm(trainer)))
        trainer.step += 1
        trainer.position = batch.position
        ahead = None
        if trainer.updates_on_device:
            update_on_device(trainer, numbers)
            if trainer.step < config.max_steps:
                ahead = begin_step(trainer, batches)
        loss, norm = trainer.clock.wait_for(numbers)  # the CPU waits for the device only here
        loss, tokens = trainer.ranks.sums(loss, batch.tokens)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if not trainer.updates_on_device:
            update(trainer, norm, finite)
        end_step(trainer, norm, finite)
        skipped = count_skipped(trainer, skipped, finite)
        step_s = time.perf_counter() - started_s
        judged = validate_when_due(trainer, validate, evaluate)
        yield StepEvent(
            step=trainer.step,
            steps=config.max_steps,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            tokens=tokens,
            step_s=step_s,
            unix_s=time.time(),
            eval_s=time.perf_counter() - started_s - step_s,
            **memory_used(trainer.hw.device, trainer.before_bytes),
            **trainer.clock.read(),
            note=trainer.pop_notes(),
            epoch=(batch.position or {}).get("epoch"),
            **judged,
        )


def begin_step(
    trainer: Trainer, batches: Iterator[EffectiveBatch]
) -> tuple[EffectiveBatch, Tensor] | None:
    """Take the next batch and compute its gradients; returns it with this rank's part of the loss.

    None where the data have ended.
    """
    if trainer.graphs:
        trainer.graphs.record_seen()
    trainer.clock.mark("data")
    batch = next(batches, None)
    if batch is None:
        return None
    return batch, accumulate(trainer, batch)


def accumulate(trainer: Trainer, batch: EffectiveBatch) -> Tensor:
    """Compute the gradients of an effective batch; returns this rank's part of its loss.

    The loss stays on the device, because reading it waits for all passes. When memory runs out, the
    batch is repeated: first as it is, after cached memory was freed (fragmentation), then in passes
    of half as many rows. When the compiler fails, it is repeated uncompiled. What one rank must
    repeat, all repeat. Raises KitError when a single row does not fit.
    """
    trainer.model.train()
    before = checkpoint.random_state()  # so that a repeated batch draws the same dropout
    repeated = False
    while True:
        loss = None
        failed = ""
        oom = False
        try:
            with nan_detection(trainer):
                loss = forward_backward(trainer, batch)
        except Exception as error:
            compiled = trainer.applied.on("compile")
            oom = is_oom(error)
            failed = compiler_error(error) if compiled and not oom else ""
            if not oom and not failed:
                raise
        # Outside the handler, the error no longer holds the activations.
        if not trainer.ranks.any(oom or bool(failed)):
            return loss
        loss = None
        if trainer.graphs:
            trainer.graphs.forget()
        trainer.model.zero_grad(set_to_none=True)
        release_memory(trainer.hw.device)
        checkpoint.restore_random_state(before)
        failures = list(filter(None, trainer.ranks.all_gather(failed)))
        if failures:
            trainer.turn_off("compile", failures[0])
        elif repeated:
            halve(trainer, batch)
        else:
            repeated = True
            trainer.notes.append("out of memory: cached memory was freed and the batch repeated")


def forward_backward(trainer: Trainer, batch: EffectiveBatch) -> Tensor:
    """Run all passes of `batch`; returns this rank's part of the loss, on the device."""
    totals = trainer.ranks.sums(batch.text_targets, batch.code_targets)
    guide = trainer.guide_weight
    precision = trainer.applied.precision
    loss = torch.zeros((), device=trainer.hw.device)
    for micro in split_passes(batch, trainer.micro_rows):
        text_width = max_text_tokens(trainer.model.config, micro) if guide else 0
        trainer.clock.mark("copy")
        micro = micro.to(trainer.hw.device)
        if trainer.graphs:
            trainer.clock.mark("graph")
            loss += trainer.graphs.run(micro, *totals, guide)
            continue
        trainer.clock.mark("forward")
        part, objective = pass_loss(trainer.model, precision, micro, *totals, guide, text_width)
        loss += part
        trainer.clock.mark("backward")
        trainer.scaler.scale(objective).backward()
    if not batch.micro:  # a scaler that has scaled nothing cannot step with the others
        trainer.scaler.scale(torch.zeros((), device=trainer.hw.device))
    return loss


def halve(trainer: Trainer, batch: EffectiveBatch) -> None:
    """Halve the rows of a pass for the rest of the run. Raises KitError at a single row."""
    shapes = [tuple(micro.tokens.shape) for micro in split_passes(batch, trainer.micro_rows)]
    rows, tokens = max(trainer.ranks.all_gather(max(shapes, default=(0, 0))))
    if rows == 1:
        raise KitError(
            f"Out of memory with a single row of {tokens} tokens in a pass. Turn gradient "
            "checkpointing and mixed precision on and run again: training resumes from the last "
            "checkpoint. Or begin a new run without the longest utterances (`MAX_CLIP_SECONDS` in "
            "01_data_prep), or with the preset of a smaller model."
        )
    trainer.micro_rows = 2 ** math.ceil(math.log2(rows)) // 2
    trainer.notes.append(
        f"out of memory: passes now have {trainer.micro_rows} rows instead of {rows}, more of them "
        "make the same effective batch; this step was repeated"
    )


def gradient_norm(trainer: Trainer) -> Tensor:
    """Remove the scale of fp16 from the gradients; returns their norm, on the device."""
    trainer.clock.mark("update")
    for optimizer in trainer.optimizers:
        trainer.scaler.unscale_(optimizer)
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(gradients)


def update(trainer: Trainer, norm: float, finite: bool) -> None:
    """Clip gradients of this `norm` and step the optimizers, unless they are not `finite`."""
    # `scaler.step` would wait for the device once per optimizer, and step those whose own gradients
    # are finite.
    if finite:
        spike, spike_limit, usual_limit = trainer.adaptation.clip_limits(trainer.config)
        limit = spike_limit if norm > spike else usual_limit
        if norm > limit:
            params = [p for p in trainer.model.parameters() if p.grad is not None]
            nn.utils.clip_grads_with_norm_(params, limit, torch.tensor(norm))
        for optimizer in trainer.optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                optimizer.step()
    trainer.scaler.update()
    trainer.clear_gradients()


def update_on_device(trainer: Trainer, numbers: Tensor) -> None:
    """The same where no number has reached the CPU: `numbers` are the step's loss and norm.

    AdamW's fused kernel divides gradients by `grad_scale`, and does nothing if `found_inf` is 1.
    """
    (optimizer,) = trainer.optimizers
    norm = numbers[1]
    spike, spike_limit, usual_limit = trainer.adaptation.clip_limits(trainer.config)
    limit = torch.where(norm > spike, spike_limit, usual_limit)
    optimizer.grad_scale = (norm / limit).clamp(min=1)
    optimizer.found_inf = 1 - numbers.isfinite().all().float()
    optimizer.step()
    trainer.scaler.update()
    trainer.clear_gradients()
    trainer.clock.mark("")
    trainer.random_ahead = checkpoint.random_state()


def count_skipped(trainer: Trainer, before: int, finite: bool) -> int:
    """Return the steps in a row that were not finite; raises Diverged above `patience`."""
    config = trainer.config
    if finite:
        return 0
    # A mere overflow of fp16 does not count: its scale starts high and each overflow halves it.
    # Training has diverged if even 1 is too high.
    if trainer.scaler.is_enabled() and trainer.scaler.get_scale() >= 1:
        return before
    if before == config.patience:
        raise Diverged(
            f"The loss was not finite for {before + 1} steps in a row (step {trainer.step}). "
            f"Lower `lr` (now {config.lr}) or turn mixed precision off, then run again: training "
            "resumes from the last checkpoint."
        )
    return before + 1


def end_step(trainer: Trainer, norm: float, finite: bool) -> None:
    """Adapt to the norm and update the average of the weights, unless the step was skipped."""
    note = trainer.adaptation.record_norm(trainer.config, norm)
    if note:
        trainer.notes.append(note)
    if finite and trainer.ema:
        trainer.clock.mark("update")
        trainer.ema.update()
    if not finite:
        note = "skipped: the loss was not finite"
        if trainer.scaler.is_enabled():
            note += f"; the scale of fp16 is now {trainer.scaler.get_scale():g}"
        trainer.notes.append(note)
    trainer.clock.mark("")


def validate_when_due(trainer: Trainer, validate: Callable, evaluate: Callable | None) -> dict:
    """Return the validation losses and the gate's figures that are due at this step."""
    config = trainer.config
    judged = {}

    def due(every: int) -> bool:
        return bool(every) and (trainer.step % every == 0 or trainer.step == config.max_steps)

    if due(config.eval_steps):
        trainer.model.eval()
        judged["val_loss"] = validate()
        if trainer.ema:
            with trainer.ema.swapped_in():
                judged["ema_val_loss"] = validate()
        trainer.record_validation(judged.get("ema_val_loss", judged["val_loss"]))
    if evaluate and due(config.gate_every):
        trainer.model.eval()
        with trainer.averaged():
            judged["gate"] = evaluate()
        # The step counts by its character errors; a sentence that does not end counts as 1.
        score = judged["gate"]["cer"] + 1 - judged["gate"]["eos_rate"]
        trainer.judge(score, "voice", "evaluations")
    return judged


def start_stream(batches: Iterable[EffectiveBatch]) -> Iterator[EffectiveBatch]:
    """Iterate over `batches` without changing the random numbers at the start.

    A DataLoader draws a seed when it starts; a resumed run starts one more.
    """
    before = checkpoint.random_state()
    stream = iter(batches)
    first = next(stream, None)
    checkpoint.restore_random_state(before)
    return itertools.chain([first] if first else [], stream)


def split_passes(batch: EffectiveBatch, rows: int) -> list[Batch]:
    """The micro-batches of `batch` in passes of at most `rows` rows; 0 leaves them as they are."""
    if not rows:
        return batch.micro
    return [part for micro in batch.micro for part in split_batch(micro, rows)]


def split_batch(batch: Batch, rows: int) -> list[Batch]:
    """Split `batch` into parts of at most `rows` rows, as if it had been packed that way.

    A part is as wide as its longest row; a batch that was padded beyond its longest row, to a fixed
    shape for the compiler, keeps its width.
    """
    count, width = batch.tokens.shape
    if count <= rows:
        return [batch]
    fixed = bool(batch.lengths.max() < width)
    parts = []
    for first in range(0, count, rows):
        last = first + rows
        part_width = width if fixed else int(batch.lengths[first:last].max())
        columns = {
            "cond": batch.cond[first:last],
            "tokens": batch.tokens[first:last, :part_width],
            "positions": batch.positions[first:last, :part_width],
        }
        for kind in ("text", "code"):
            indices = getattr(batch, f"{kind}_indices")  # of the targets, in the flattened batch
            selected = (indices >= first * width) & (indices < last * width)
            row = indices[selected] // width - first
            column = indices[selected] % width
            columns[f"{kind}_indices"] = row * part_width + column
            columns[f"{kind}_targets"] = getattr(batch, f"{kind}_targets")[selected]
        parts.append(Batch(**columns))
    return parts


@contextmanager
def nan_detection(trainer: Trainer) -> Iterator[None]:
    """With `train.detect_anomaly`, raise KitError at the first NaN of a backward pass.

    torch names the operator, and prints the line of the forward pass that it belongs to.
    """
    if not trainer.config.detect_anomaly:
        yield
        return
    try:
        with torch.autograd.set_detect_anomaly(True):
            yield
    except RuntimeError as error:
        if "returned nan values" not in str(error):
            raise
        raise KitError(f"Step {trainer.step + 1}: {error}") from error
