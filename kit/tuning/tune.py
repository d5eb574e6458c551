"""Search for the settings that train fastest on this device, under a person's target.

Coordinate search: one setting at a time is varied while the others stay, until none helps any more.
The values of a setting are compared by successive halving: all of them for a few steps, the better
half for more. The effective batch stays, so the loss must stay where it was; a setting that moves
it is refused. `judge` and `search` train nothing themselves: `measure` does.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import psutil
import torch

from kit.base.errors import KitError
from kit.base.formatting import format_gib
from kit.base.hardware import ATTENTION_KERNELS, is_here
from kit.base.processes import run_in_process
from kit.training.switches import LABELS, SpeedConfig
from kit.tuning.preflight import Verdict, Workload, changed_settings, divisors, preflight
from kit.tuning.recommend import (
    DROPOUT_TOLERANCE,
    LEAST_GAIN,
    LEAST_SAVING,
    LEFT_OUT,
    TOLERANCE,
)

UNITS = {
    "memory": {"gib": 2**30, "gb": 1e9, "mib": 2**20, "mb": 1e6},  # bytes
    "step": {"s": 1.0, "ms": 1e-3},  # seconds
}
HEAD = ("settings", "steps", "step", "memory", "loss change", "why not")
FEWEST = 4  # steps of a first comparison
TOO_SLOW = 1.25  # times the best's seconds after a few steps: not measured further


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What a person allows a step."""

    memory: float = math.inf  # bytes
    step: float = math.inf  # seconds

    def excess(self, memory_bytes: float, step_s: float) -> float:
        """How far a step is beyond the target, relative to it; 0 within."""
        return max(0.0, memory_bytes / self.memory - 1) + max(0.0, step_s / self.step - 1)


def parse_target(text: str) -> Target:
    """Read "memory<5GiB, step<2s", either part or none. Raises KitError for anything else."""
    limits = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(memory|step)\s*<=?\s*(\d+\.?\d*|\.\d+)\s*([a-z]+)", part.lower())
        unit = UNITS[match[1]].get(match[3]) if match else None
        if unit is None or not float(match[2]) or match[1] in limits:
            raise KitError(
                f"target {text!r}: {part!r} cannot be read. Write memory<5GiB (or GB, MiB, MB), "
                "step<2s (or ms), or both with a comma between them."
            )
        limits[match[1]] = float(match[2]) * unit
    return Target(**limits)


class Tried(NamedTuple):
    """One candidate's figures; `reason` is why it is refused, "" if it is not."""

    work: Workload
    steps: int
    step_s: float = math.inf
    memory_bytes: float = math.inf  # the larger of the plan at the longest lengths and the peak
    loss_change: float | None = None  # relative to the start's after the same steps
    excess: float = math.inf  # over the target
    reason: str = ""


def judge(work: Workload, steps: int, figures: dict, start: dict, target: Target) -> Tried:
    """Judge `figures` of a trial against those of the `start` after as many steps."""
    if "error" in figures:
        return Tried(work, steps, reason=figures["error"])
    # All see the same batches, and the median passes over moments in which others computed.
    step_s = statistics.median(figures["step_seconds"])
    memory_bytes = max(work.planned_bytes, figures["peak_memory_bytes"])
    loss_change = figures["loss"] / start["loss"] - 1
    tolerance = max(TOLERANCE[figures["precision"]], TOLERANCE[start["precision"]])
    if work.model.dropout:  # other passes and kernels drop other activations
        tolerance = DROPOUT_TOLERANCE
    reason = ""
    if not abs(loss_change) <= tolerance:  # a loss that is not a number is refused, too
        reason = f"the loss moved by {loss_change:+.2%}, over {tolerance:.1%}"
    excess = target.excess(memory_bytes, step_s)
    return Tried(work, steps, step_s, memory_bytes, loss_change, excess, reason)


def fastest(turns: Sequence[dict]) -> dict:
    """Figures of several trials of one setting as one: each step as fast as it was once.

    What else the machine does only makes a step slower.
    """
    failed = [figures for figures in turns if "error" in figures]
    if failed:
        return failed[0]
    steps = zip(*(figures["step_seconds"] for figures in turns))
    return turns[0] | {"step_seconds": [min(seconds) for seconds in steps]}


def is_better(new: Tried, old: Tried) -> bool:
    """Nearer to the target; within it faster, or as fast with clearly less memory."""
    if new.reason:
        return False
    if new.excess or old.excess:
        return new.excess < old.excess
    if new.step_s <= (1 - LEAST_GAIN) * old.step_s:
        return True
    as_fast = new.step_s <= (1 + LEAST_GAIN) * old.step_s
    return as_fast and new.memory_bytes <= (1 - LEAST_SAVING) * old.memory_bytes


def search(
    start: Workload,
    axes: Sequence[list[dict]],
    measure: Callable[[Workload, int], dict],
    target: Target,
    steps: int,
    tried: list[Tried],
) -> Iterator[Tried]:
    """Yield the best so far: the start, then after each axis, until nothing changes any more.

    `axes` are settings of SpeedConfig that are varied together; the micro-batch is always varied.
    `measure(work, steps)` returns a trial's figures, or raises TimeoutError at the end of the
    search's time. All that was tried is appended to `tried`.
    Raises KitError if the start itself cannot be measured.
    """
    few = min(steps, max(FEWEST, steps // 4))
    first = {}  # figures of the start, by number of steps

    def compare(works: list[Workload], count: int) -> list[Tried]:
        # The best so far is measured again beside its rivals, and in long trials both twice, in
        # turns: the machine's load may change.
        turns = range(1 if count == few else 2)
        found = [fastest(t) for t in zip(*([measure(w, count) for w in works] for _ in turns))]
        if count not in first:
            first[count] = found[0] if works[0] == start else measure(start, count)
        if "error" in first[count]:
            raise KitError(f"The settings as they are do not train here: {first[count]['error']}")
        rows = [judge(w, count, f, first[count], target) for w, f in zip(works, found)]
        for row in rows:
            if not any(t.work == row.work and t.steps > count for t in tried):
                tried[:] = [t for t in tried if t.work != row.work] + [row]
        return rows

    best = compare([start], few)[0]
    yield best
    changed = True
    try:
        while changed:
            changed = False
            for axis in (None, *axes):
                rivals = variations(best.work, axis)
                best, *rows = compare([best.work, *rivals], few)
                rows = survivors(rows, best)
                if rows:
                    best, *rows = compare([best.work, *(row.work for row in rows)], steps)
                    winner = min(rows, key=rank)
                    if is_better(winner, best):
                        best = winner
                        changed = True
                yield best
    except TimeoutError:
        return


def rank(row: Tried) -> tuple:
    return bool(row.reason), row.excess, row.step_s


def survivors(rows: list[Tried], best: Tried) -> list[Tried]:
    """The better half of `rows`, without those that are refused or much slower than `best`."""
    half = sorted(rows, key=rank)[: (len(rows) + 1) // 2]
    return [
        row
        for row in half
        if not row.reason
        and (row.excess < best.excess or (row.excess == 0 and row.step_s <= TOO_SLOW * best.step_s))
    ]


def variations(work: Workload, axis: list[dict] | None) -> list[Workload]:
    """`work` with other values of `axis`; None: with a quarter to four times the micro-batch."""
    if axis is not None:
        speeds = [dataclasses.replace(work.speed, **values) for values in axis]
        return [dataclasses.replace(work, speed=s) for s in speeds if s != work.speed]
    rows = work.data.micro_batch
    sizes = [n for n in divisors(work.data.effective_batch) if rows <= 4 * n and n <= 4 * rows]
    return [work.with_rows(n) for n in sizes if n != rows]


def axes_of(
    speed: SpeedConfig, unavailable: dict[str, str], kernels: dict[str, str]
) -> tuple[list[list[dict]], list[tuple[str, str]]]:
    """What of `speed` can be varied here, and (setting, reason) of what cannot.

    `unavailable` are reasons by switch, `kernels` by attention kernel, "" for one that runs.
    """
    off = [(f"attention_kernel {name}", reason) for name, reason in kernels.items() if reason]
    attention = [{"sdpa": False, "attention_kernel": ""}]
    for name in ("", *(name for name in ATTENTION_KERNELS if not kernels[name])):
        attention.append({"sdpa": True, "attention_kernel": name})
    shares = [{"gradient_checkpointing": False, "recompute_every": 1}]
    shares += [{"gradient_checkpointing": True, "recompute_every": n} for n in (4, 2, 1)]
    compiled = [{"compile": value, "cuda_graphs": False} for value in (False, True)]
    if "cuda_graphs" not in unavailable:
        compiled.append({"compile": True, "cuda_graphs": True})
    by_switch = {"gradient_checkpointing": shares, "sdpa": attention, "compile": compiled}
    for name in ("pinned_memory", "adamw_8bit", "ema_offload"):
        by_switch[name] = [{name: False}, {name: True}]
    if not speed.ema:
        del by_switch["ema_offload"]
    names = [*by_switch, "cuda_graphs"]
    off += [(LABELS[name], unavailable[name]) for name in names if name in unavailable]
    return [axis for name, axis in by_switch.items() if name not in unavailable], off


def tried_cells(rows: Sequence[Tried], start: Workload, off: list[tuple[str, str]]) -> list[tuple]:
    """A table of all that was tried, the best first, and of what could not be."""
    cells = [HEAD]
    for row in sorted(rows, key=lambda row: (bool(row.reason), -row.steps, *rank(row))):
        changes = ", ".join(changed_settings(start, row.work)) or "as they were"
        if row.step_s == math.inf:
            cells.append((changes, str(row.steps), "", "", "", row.reason))
            continue
        reason = row.reason or (f"{row.excess:.0%} over the target" if row.excess else "")
        figures = (f"{row.step_s:.3g} s", format_gib(row.memory_bytes), f"{row.loss_change:+.3%}")
        cells.append((changes, str(row.steps), *figures, reason))
    return cells + [(name, "", "", "", "", reason) for name, reason in off if reason != LEFT_OUT]


def check_step(work: Workload, threads: int) -> tuple[Verdict, int]:
    """`preflight` in a process of its own, and the device's free bytes. KitError where it dies."""
    return run_in_process(_check_step, work, threads, preload=(__name__, "torch._dynamo"))


def _check_step(work: Workload, threads: int) -> tuple[Verdict, int]:
    torch.set_num_threads(threads)
    free_bytes = psutil.virtual_memory().available
    if work.hw.device == "cuda":
        free_bytes = torch.cuda.mem_get_info()[0] if is_here(work.hw) else work.hw.memory_bytes
    return preflight(work), free_bytes
