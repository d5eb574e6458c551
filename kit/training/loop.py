"""The training loop: a generator of step events, with every switch one line and in plain sight.

`train` is handed batches, callables that validate and judge, and a stop event, and yields a
`StepEvent` after each optimiser step; logs, plots and checkpoints listen. A step that is killed is
as if it had never begun, one that runs out of memory is done again in smaller passes, one that is
not finite is left out. Several processes take every step together: what any of them met, all know
before the weights move. Knows no dataset, no metric, no widget.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from kit.base.compiler import compiler_error, compiler_errors
from kit.base.errors import Diverged, TrainError
from kit.base.gradients import apply_gradients
from kit.base.hardware import autocast, is_oom, peak_memory_bytes
from kit.model.gpt import SpeechGPT, weighted_loss
from kit.model.guided_attention import max_text_tokens
from kit.model.sequence import EffectiveBatch
from kit.training import checkpoint
from kit.training.config import StepEvent
from kit.training.ranks import ALONE, Ranks
from kit.training.recovery import cut, release_memory
from kit.training.trainer import Trainer


def train(
    state: Trainer,
    batches: Iterable[EffectiveBatch],
    validate: Callable[[], float] = lambda: math.nan,
    stop: Callable[[], bool] = lambda: False,
    gate: Callable[[], dict] | None = None,
) -> Iterator[StepEvent]:
    """Train until `config.steps`, `stop` or the gate's end, yielding an event per optimiser step.

    `validate` returns the loss, and `gate` the figures (`cer`, `eos_rate`, ...) of whatever weights
    the model holds. Raises Diverged after `patience` non-finite steps in a row, each of which alone
    is skipped and says so; TrainError when not even one row fits into memory.
    """
    config = state.config
    skipped = 0
    ranks = state.ranks
    batches = start_stream(batches)
    while state.step < config.steps and not state.settled:
        if ranks.any(stop()):
            break
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            raise TrainError(f"The data ended at step {state.step} of {config.steps}.")
        lr = state.set_rates()
        state.set_phase()
        loss = accumulate(state, batch)
        ranks.sum_gradients(state.trainable.parameters.values())
        loss, norm = clip(state, loss)
        loss, tokens = ranks.sums(loss, batch.tokens)
        finite = math.isfinite(loss) and math.isfinite(norm)
        update(state, finite)
        state.step += 1
        state.position = batch.position
        if finite:
            skipped = 0
        elif not searching_loss_scale(state):
            skipped += 1
        if skipped > config.patience:
            raise Diverged(
                f"The loss was not finite for {skipped} steps in a row (step {state.step}). Lower "
                f"`lr` (now {config.lr}) or turn mixed precision off, then run again: it goes "
                "on from the last checkpoint."
            )
        step_s = time.perf_counter() - started
        found = validate_when_due(state, validate, gate)
        yield StepEvent(
            step=state.step,
            steps=config.steps,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            tokens=tokens,
            step_s=step_s,
            unix_s=time.time(),
            memory_bytes=peak_memory_bytes(state.hw.device),
            note=state.pop_notes(),
            epoch=(batch.position or {}).get("epoch"),
            **found,
        )


def start_stream(batches: Iterable[EffectiveBatch]) -> Iterator[EffectiveBatch]:
    """An iterator whose start leaves the random numbers where they were.

    A DataLoader draws a seed for its workers as it starts, so a resumed run, which starts one more,
    would draw other dropout than the uninterrupted one.
    """
    before = checkpoint.random_state()
    stream = iter(batches)
    first = next(stream, None)
    checkpoint.restore_random_state(before)
    return itertools.chain([first] if first else [], stream)


def accumulate(state: Trainer, batch: EffectiveBatch) -> Tensor:
    """Compute the gradients of an effective batch; returns this rank's part of its loss.

    The loss stays on the device: reading it would wait for all passes. Out of memory, the same
    batch is repeated once as it is, after freed memory went back to the device (fragmentation), and
    then in passes of half as many rows; where the compiler fails, it is repeated uncompiled. What
    one rank must repeat, all repeat. Raises TrainError when a single row does not fit.
    """
    state.model.train()
    before = checkpoint.random_state()  # dropout is drawn alike when the batch is repeated
    repeated = False
    while True:
        loss = None
        failed = ""
        oom = False
        try:
            loss = forward_backward(state, batch)
        except (MemoryError, *compiler_errors()) as error:
            compiled = state.applied.on("compile")
            oom = is_oom(error)
            failed = compiler_error(error) if compiled and not oom else ""
            if not oom and not failed:
                raise
        # Out of the handler the error lets go of the activations it holds.
        if not state.ranks.any(oom or bool(failed)):
            return loss
        loss = None
        state.model.zero_grad(set_to_none=True)
        release_memory(state.hw.device)
        checkpoint.restore_random_state(before)
        failures = list(filter(None, state.ranks.all_told(failed)))
        if failures:
            state.stop_compiling(failures[0])
        elif repeated:
            halve(state, batch)
        else:
            repeated = True
            state.notes.append("out of memory: cached memory was freed and the batch repeated")


def forward_backward(state: Trainer, batch: EffectiveBatch) -> Tensor:
    """Each part is divided by the targets of the whole, so any split gives the same gradients.

    Returns what this rank's parts add to the loss, on the device.
    """
    totals = state.ranks.sums(batch.text_targets, batch.code_targets)
    guide = state.guide_weight
    loss = torch.zeros((), device=state.hw.device)
    for micro in cut(batch, state.micro_rows):
        text_width = max_text_tokens(state.model.config, micro) if guide else 0
        with autocast(state.hw.device, state.applied.precision):
            sums = state.model(micro.to(state.hw.device), text_width)
        part = weighted_loss(state.model.config, sums, *totals)
        loss += part.detach()
        if guide:
            part = part + guide * sums[2] / totals[1]
        state.scaler.scale(part).backward()
    if not batch.micro:  # a scaler that has scaled nothing cannot step with the others
        state.scaler.scale(torch.zeros((), device=state.hw.device))
    return loss


def halve(state: Trainer, batch: EffectiveBatch) -> None:
    """Half the rows a pass from here on. Raises TrainError when there is but one already."""
    shapes = [tuple(micro.tokens.shape) for micro in cut(batch, state.micro_rows)]
    rows, tokens = max(state.ranks.all_told(max(shapes, default=(0, 0))))
    if rows == 1:
        raise TrainError(
            f"Out of memory with a single row of {tokens} tokens in a pass. Turn gradient "
            "checkpointing and mixed precision on and run again: it goes on from its last "
            "checkpoint. Or begin a new run without the longest utterances (`LONGEST_S` in "
            "01_data_prep), or with the preset of a smaller model."
        )
    state.micro_rows = 2 ** math.ceil(math.log2(rows)) // 2
    state.notes.append(
        f"out of memory: passes of {rows} rows are cut to {state.micro_rows}, more of them make "
        "the same effective batch; this one was done again whole"
    )


def clip(state: Trainer, loss: Tensor) -> tuple[float, float]:
    """Scale the gradients down to the clipping norm; returns `loss` and the norm they had.

    The two are read together: it is the one time in a step that the CPU waits for the device.
    """
    for optimizer in state.optimizers:
        state.scaler.unscale_(optimizer)
    params = [p for p in state.model.parameters() if p.grad is not None]
    total = nn.utils.get_total_norm([p.grad for p in params])
    loss, norm = torch.stack((loss, total)).tolist()
    limit, note = state.adaptation.clip_norm(state.config, norm)
    if norm > limit:
        nn.utils.clip_grads_with_norm_(params, limit, total)
    if note:
        state.notes.append(note)
    return loss, norm


def update(state: Trainer, finite: bool) -> None:
    """Move the weights and their average; a step that is not finite moves neither."""
    apply_gradients(state.scaler, state.optimizers, finite)
    state.model.zero_grad(set_to_none=True)
    if finite and state.ema:
        state.ema.update()
    if not finite:
        scale = f"; the scale of fp16 is now {state.scaler.get_scale():g}"
        scale = scale if state.scaler.is_enabled() else ""
        state.notes.append(f"skipped: the loss was not finite{scale}")


def searching_loss_scale(state: Trainer) -> bool:
    """Whether a step that was not finite may be an overflow in fp16 alone.

    The scale begins high and is halved by each; training has diverged when even 1 is too much.
    """
    return state.scaler.is_enabled() and state.scaler.get_scale() >= 1


def validate_when_due(state: Trainer, validate: Callable, gate: Callable | None) -> dict:
    """Validation losses and the gate's figures where the step calls for them; marks the best."""
    config = state.config
    found = {}

    def due(every: int) -> bool:
        return bool(every) and (state.step % every == 0 or state.step == config.steps)

    if due(config.val_every):
        state.model.eval()
        found["val_loss"] = validate()
        if state.ema:
            with state.ema.swapped_in():
                found["ema_val_loss"] = validate()
        state.record_validation(found.get("ema_val_loss", found["val_loss"]))
    if gate and due(config.gate_every):
        state.model.eval()
        with state.averaged():
            found["gate"] = gate()
        state.record_evaluation(found["gate"])
    return found


@torch.inference_mode()
def validation_loss(
    model: SpeechGPT,
    batches: list[EffectiveBatch],
    device: str,
    precision: str,
    rows: int = 0,
    ranks: Ranks = ALONE,
) -> float:
    """Weighted loss of `model` over all of `batches`, nats per target; `rows` as in `cut`.

    Each of the `ranks` does its share of them.
    """
    sums = torch.zeros(2)
    passes = [micro for batch in ranks.share(batches) for micro in cut(batch, rows)]
    for micro in passes:
        with autocast(device, precision):
            sums += torch.stack(model(micro.to(device))).cpu()
    text = sum(batch.text_targets for batch in batches)
    code = sum(batch.code_targets for batch in batches)
    if ranks.several:
        sums = torch.tensor(ranks.sums(*sums.tolist()))
    return weighted_loss(model.config, tuple(sums), text, code).item()


def listen(
    events: Iterator[StepEvent], *listeners: Callable[[StepEvent], None]
) -> Iterator[StepEvent]:
    """Pass every event on, after each listener has seen it."""
    for event in events:
        for hear in listeners:
            hear(event)
        yield event


def checkpointer(
    state: Trainer, folder: Path, stop: Callable[[], bool] = lambda: False
) -> Callable[[StepEvent], None]:
    """A listener that saves every `checkpoint_every` steps, the best, the last, and when stopped.

    A step that was not finite waits: what is kept must be good to go back to.
    """
    saved = state.step

    def save(event: StepEvent) -> None:
        nonlocal saved
        every = state.config.checkpoint_every
        due = event.step // every > saved // every or event.step in (event.steps, state.best.step)
        if (due and math.isfinite(event.loss)) or stop() or state.settled:
            state.save(folder)
            saved = event.step

    return save
