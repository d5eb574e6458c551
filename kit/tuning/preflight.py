"""Does a training step fit? Real steps at the longest lengths answer before a run begins.

`preflight` refuses what is hopeless by the plan (memory_plan.py), and otherwise takes two steps of
a throwaway model: a run that would fail in its third hour fails now, with what to change.
`make_fit` finds the mildest change with which it fits.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Iterator

import psutil
import torch
from torch.autograd.profiler import profile

from kit.base.errors import KitError
from kit.base.formatting import format_gib
from kit.base.hardware import Hardware, is_here, is_oom, release_memory, silence_profiler
from kit.model.gpt import SpeechGPT
from kit.model.sequence import EffectiveBatch, pack
from kit.training.loop import end_step, forward_backward, gradient_norm, update
from kit.training.passes import FIRST_RECORDING
from kit.training.trainer import Trainer
from kit.tuning.memory_plan import Workload, has_8bit_adamw

CPU_RESERVE_BYTES = 2**29  # resident memory of a process beyond what its tensors take
HOPELESS = 1.2  # times the limit: the plan is not so far off, so a GPU need not try


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a workload fits, how that is known, and what to change when it does not.

    `measured_bytes`, `reserved_bytes` and `step_s` are of a real step, None without one.
    """

    fits: bool
    micro_batch: int  # rows of a pass
    planned_bytes: int
    limit_bytes: int  # on a GPU of reserved memory, on a CPU of allocated
    tried: bool  # False: refused from the plan alone
    change: str  # "" when it fits
    measured_bytes: int | None = None  # the peak
    reserved_bytes: int | None = None  # with gaps and cache; None on a CPU
    step_s: float | None = None

    def __str__(self) -> str:
        how = f"planned {format_gib(self.planned_bytes)}"
        if self.measured_bytes is not None:
            how += f", measured {format_gib(self.measured_bytes)}"
            if self.reserved_bytes is not None:
                how += f" allocated and {format_gib(self.reserved_bytes)} reserved"
        elif self.tried:
            how += ", and a real step ran out of memory"
        elif self.fits:
            how += ", not tried"
        limit = format_gib(self.limit_bytes)
        figures = f"micro_batch {self.micro_batch}: {how}, of {limit} it may use."
        return f"It fits. {figures}" if self.fits else f"It does not fit. {figures} {self.change}"


def free_memory(hw: Hardware) -> int:
    """Bytes that are free on the device; of a GPU elsewhere all that it has."""
    if hw.device == "cpu":
        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info()[0] if is_here(hw) else hw.memory_bytes


def limit_memory(hw: Hardware, fraction: float) -> int:
    """Bytes this process may use: `fraction` of the device, and no more than is free there.

    On CUDA the fraction is also set in PyTorch's allocator, for the life of the process: what would
    reserve more raises an out-of-memory error, and others on the same card keep their share.
    """
    share = int(fraction * hw.memory_bytes)
    if hw.device == "cpu":
        return min(share, max(0, free_memory(hw) - CPU_RESERVE_BYTES))
    if not is_here(hw):
        return share
    torch.cuda.set_per_process_memory_fraction(float(fraction))  # it refuses the integer 1
    return min(share, free_memory(hw) + torch.cuda.memory_reserved())


def preflight(work: Workload, threads: int = 0) -> Verdict:
    """Plan `work`'s longest step, try it where that is safe, and say what to change.

    It is tried with so many `threads` of PyTorch; 0: as many as there are.

    On a CPU what the plan refuses is not tried, because a process that uses all memory is killed.
    On a GPU the memory that the trial reserved decides, because the fraction limits that. For a GPU
    that is not in this machine, the plan alone decides.
    """
    torch.set_num_threads(threads or torch.get_num_threads())
    limit = limit_memory(work.hw, work.max_memory_fraction)
    planned = work.planned_bytes
    tried = is_here(work.hw) and planned <= limit * (1 if work.hw.device == "cpu" else HOPELESS)
    peak = trial_peak(work) if tried else {}
    if peak:
        fits = (peak["reserved_bytes"] or peak["measured_bytes"]) <= limit
    else:  # memory ran out, or was bound to
        fits = not is_here(work.hw) and planned <= limit
    # Where a step ran out below the limit, the limit is not what it seems.
    room = min(limit, planned * 3 // 4) if tried else limit
    return Verdict(
        fits=fits,
        micro_batch=work.data.micro_batch,
        planned_bytes=planned,
        limit_bytes=limit,
        tried=tried,
        change="" if fits else change(work, room),
        **peak,
    )


def make_fit(work: Workload, kept: Collection[str] = ()) -> tuple[Workload, Verdict]:
    """Return `work` with the mildest change with which it fits, and the verdict on that.

    The gradients stay. So do the switches `kept`, which a person has set. Raises KitError when
    nothing helps.
    """
    room_bytes = limit_memory(work.hw, work.max_memory_fraction)
    *others, least = milder(work, kept)
    for other in others:
        if other.planned_bytes > room_bytes:
            continue
        verdict = preflight(other)
        if verdict.fits:
            return other, verdict
        room_bytes = other.planned_bytes - 1
    verdict = preflight(least)  # whatever is planned: that may be too high
    if verdict.fits:
        return least, verdict
    raise KitError(f"Not even one row a pass fits, so training cannot begin. {verdict}")


def first_fitting(work: Workload, room_bytes: int) -> Workload | None:
    """The mildest of `milder` that is planned to fit into `room_bytes`; None where none is."""
    return next((o for o in milder(work) if o.planned_bytes <= room_bytes), None)


def check_changes(work: Workload, checked: Verdict, chosen: Workload) -> str:
    """Return a note on settings `chosen` after `work` was `checked`; "" if none is needed.

    Settings whose plan needs no more memory pass at once; others get their own preflight. Raises
    KitError if they do not fit, with the changed settings and a fix.
    """
    if chosen.planned_bytes <= max(work.planned_bytes, checked.planned_bytes):
        return ""
    verdict = preflight(chosen)
    changed = ", ".join(changed_settings(work, chosen))
    note = f"since the check before the run: {changed}. {verdict}"
    if not verdict.fits:
        raise KitError(note)
    return note


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def change(work: Workload, room_bytes: int) -> str:
    """Describe the mildest change with which `work` should fit into `room_bytes`."""
    fitting = first_fitting(work, room_bytes)
    if fitting is not None:
        return f"Change: {', '.join(changed_settings(work, fitting))}."
    *_, least = milder(work)
    smaller = "choose the preset of a smaller tier"
    if work.finetuning.base is not None and not work.finetuning.adapters:
        smaller = "train adapters (`finetune.method` lora)"
    return (
        "Even single rows with every saving on need "
        f"{format_gib(least.planned_bytes)}: {smaller}, or leave the longest utterances out "
        "(`MAX_CLIP_SECONDS` in 01_data_prep)."
    )


def milder(work: Workload, kept: Collection[str] = ()) -> Iterator[Workload]:
    """Variants of `work` that need less, the cheapest in speed first; the switches `kept` stay.

    Fused attention and half precision cost nothing, a quarter of the rows little; recomputing
    costs a third of a step, an average in the CPU's memory a copy, moments in 8 bits some
    exactness, passes of few rows the most time.
    """
    free = dataclasses.replace(work.speed, sdpa=True)
    if work.precision != "fp32":  # else it would change nothing here
        free = dataclasses.replace(free, mixed_precision=True)
    recompute = dataclasses.replace(free, gradient_checkpointing=True)
    offload = work.speed.ema and work.hw.device == "cuda"
    away = dataclasses.replace(recompute, ema_offload=offload)
    small = dataclasses.replace(away, adamw_8bit=has_8bit_adamw(work.hw) or away.adamw_8bit)
    rows = [n for n in reversed(divisors(work.data.effective_batch)) if n <= work.data.micro_batch]
    many = [n for n in rows if 4 * n >= work.data.micro_batch]
    few = [n for n in rows if 4 * n < work.data.micro_batch]
    order = [*itertools.product((free, recompute, away, small), many)]
    order += itertools.product((recompute, away, small), few)
    stay = {name: getattr(work.speed, name) for name in kept}
    for speed, micro_batch in order:
        speed = dataclasses.replace(speed, **stay)
        yield dataclasses.replace(work.with_rows(micro_batch), speed=speed)


def changed_settings(work: Workload, other: Workload) -> list[str]:
    """What to set to come from `work` to `other`: ["micro_batch 4 -> 2", "sdpa on"]."""
    before = {"micro_batch": work.data.micro_batch} | vars(work.speed)
    after = {"micro_batch": other.data.micro_batch} | vars(other.speed)
    changed = {name: value for name, value in after.items() if value != before[name]}
    words = {True: "on", False: "off"}
    return [
        f"{name} {words[value]}" if isinstance(value, bool) else f"{name} {before[name]} -> {value}"
        for name, value in changed.items()
    ]


def trial_peak(work: Workload) -> dict:
    """The fields of Verdict that some real optimiser steps of `work` measure; {} without memory."""
    devices = [torch.cuda.current_device()] if work.hw.device == "cuda" else []
    peak = {}
    try:
        with torch.random.fork_rng(devices):
            peak = measure_peak(lambda: some_steps(work), work.hw.device)
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
    release_memory(work.hw.device)  # out of the handler the error frees what the step held
    return peak


def some_steps(work: Workload) -> float:
    """Train a throwaway model for some steps; return the seconds of the last.

    The second is the first that has the optimizer's moments; CUDA graphs come later.
    """
    speed = dataclasses.replace(work.speed, compile=False)  # minutes, and it would keep less
    with torch.device(work.hw.device):
        model = SpeechGPT(work.model)
    state = Trainer(model, work.train, speed, work.hw, work.finetuning)
    state.model.train()
    # No overflow at this scale: a skipped update would leave the moments out.
    half = state.scaler.is_enabled()
    state.scaler = torch.amp.GradScaler(work.hw.device, init_scale=1.0, enabled=half)
    texts = [[0] * work.longest_text] * work.rows
    codes = [[0] * work.longest_codes] * work.rows
    cond = torch.randn(work.rows, work.model.n_mels, work.data.reference_frames)
    micro = pack(work.model, texts, codes, cond, work.length)
    # Two passes stand for however many there are.
    batch = EffectiveBatch(micro=[micro] * (2 if work.accumulates else 1), position={})
    for _ in range(FIRST_RECORDING + 2 if state.graphs else 2):
        if state.graphs:
            state.graphs.record_seen()
        started_s = time.perf_counter()
        forward_backward(state, batch)
        norm = gradient_norm(state).item()
        update(state, norm, finite=True)
        end_step(state, norm, finite=True)
        getattr(torch, work.hw.device).synchronize()
    return time.perf_counter() - started_s


def measure_peak(step: Callable[[], float | None], device: str) -> dict:
    """Bytes that PyTorch's allocator had at once at most during `step()`, and what that returned.

    On a CPU only what `step` itself allocates counts, so it must make its own model; the
    profiler's cost is below what the steps' times differ by.
    """
    release_memory(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step_s = step()
        measured = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
        return {"measured_bytes": measured, "reserved_bytes": reserved, "step_s": step_s}
    silence_profiler()
    with profile(profile_memory=True) as record:
        step_s = step()
    events = [event for event in record.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    measured = max(itertools.accumulate(event.nbytes() for event in events))
    return {"measured_bytes": measured, "reserved_bytes": None, "step_s": step_s}
