"""What to set on a device: advice from a table, and switches that pay off in trials.

The advice is in `configs/advice/devices.yaml`, by memory and architecture, and in `configs/use`, by
purpose. A switch is judged by what it changed where it was added to those before it; one that moves
the loss is refused.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import yaml

from kit.base.config import CONFIGS, load_preset, read_yaml
from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.formatting import format_gib
from kit.base.hardware import Hardware
from kit.training.switches import Switch

DEVICES = CONFIGS / "advice" / "devices.yaml"
TOLERANCE = {"fp32": 0.001, "bf16": 0.02, "fp16": 0.02}  # of the loss, relative
TF32_TOLERANCE = 0.005
DROPOUT_TOLERANCE = 0.05  # fused and compiled layers drop other activations
RECORDED = ("steps_per_s", "spread", "tokens_per_s", "mfu", "peak_memory_bytes", "warmup_s")
RECORDED += ("recompilations", "loss", "loss_change", "parity", "ran")
TRIAL_HEAD = ("variant", "steps/s", "", "spread", "tokens/s", "MFU", "memory", "warm-up")
TRIAL_HEAD += ("loss", "change", "ran, or why not")
LEAST_GAIN = 0.02  # of steps/s
LEAST_SAVING = 0.10  # of peak memory, if the goal is memory
MOST_LOSS = 0.10  # of steps/s, for such a saving
# Kept unless they cost more than LEAST_GAIN: preparing batches while the GPU computes helps most
# where the CPU or the disk is slow. A trial does not show that: its rows are already in memory.
ON_BY_DEFAULT = ("pinned_memory",)
SETS = ("baseline", "alone", "added")  # kinds of trials that differ by their switches
LEFT_OUT = "left out by the settings"  # reason of a switch that this device has


def recommend(hw: Hardware) -> dict[str, dict]:
    """The settings recommended for `hw`, each with its `value` and `why`: {"speed.tf32": {...}}."""
    table = read_yaml(DEVICES)
    if not hw.capability:
        return table["cpu"]
    gib = round(hw.memory_bytes / 2**30)
    small = [entry["settings"] for entry in table["memory"] if gib < entry["below_gib"]]
    architecture = next(
        entry for entry in table["architecture"] if list(hw.capability) < entry["below"]
    )
    return table["gpu"] | (small[0] if small else {}) | architecture["settings"]


def use_advice(name: str) -> dict[str, dict]:
    """What the use `name` of `configs/use` sets, as `recommend` returns it. Raises KitError."""
    sections = load_preset(name, CONFIGS / "use")
    why = sections.pop("why")
    values = {f"{s}.{key}": v for s, section in sections.items() for key, v in section.items()}
    return {setting: {"value": value, "why": why[setting]} for setting, value in values.items()}


def format_setting(value: object) -> str:
    """A setting's value as a person reads it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def advice_table(advice: dict[str, dict]) -> dict[str, str]:
    """One line a setting, for a notebook."""
    return {
        name: f"{format_setting(each['value'])}: {each['why']}" for name, each in advice.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A set of switches to measure, and what it did in its median round; None before that."""

    kind: str  # "baseline", "alone", "added" (to those before it), "cost", "extra" or "chosen"
    label: str
    on: tuple = ()  # names of switches, and settings such as "recompute_every=2"
    reason: str = ""  # why it cannot be measured or has no figures, or what happened besides
    steps_per_s: float | None = None
    spread: float | None = None  # of the rounds' times, largest less smallest over the median
    tokens_per_s: float | None = None  # real tokens, padding left out
    mfu: float | None = None  # share of the matmuls that the device could do in that time
    peak_memory_bytes: int | None = None
    warmup_s: float | None = None  # the first steps, with all that is compiled; the slowest round
    recompilations: int | None = None  # after the warm-up
    loss: float | None = None  # nats per target, mean of the last quarter of the steps
    loss_change: float | None = None  # relative to the baseline's after as many updates
    tolerance: float | None = None  # of that change
    ran: str = ""  # precision and attention kernel by name

    @property
    def parity(self) -> bool | None:
        """Whether the loss stayed; None if unknown."""
        return None if self.loss_change is None else abs(self.loss_change) <= self.tolerance


def compare(
    variants: Sequence[Trial],
    results: list[dict],
    dropout: float,
    peak_tokens_per_s: float = math.inf,
) -> list[Trial]:
    """`variants` with their figures, from the results of all rounds; `dropout` is the model's.

    `peak_tokens_per_s` is what the device would reach if it did nothing but matmuls; inf: unknown.
    """
    baseline = _median_round(results, ())
    trials = []
    for variant in variants:
        mine = [r for r in results if tuple(r["on"]) == variant.on]
        failed = [r["error"] for r in mine if "error" in r]
        median = _median_round(results, variant.on)
        if variant.reason or failed or median is None:
            reason = variant.reason or (failed or ["not measured yet"])[0]
            trials.append(dataclasses.replace(variant, reason=reason))
            continue
        tolerance = TOLERANCE[median["precision"]]
        if "tf32" in variant.on:
            tolerance = max(tolerance, TF32_TOLERANCE)
        if dropout and {"sdpa", "compile"} & {*variant.on}:
            tolerance = DROPOUT_TOLERANCE
        # A step that fp16 skipped while it looked for its scale is missing from the curve.
        alike = baseline and baseline["skipped"] == median["skipped"]
        seconds = [r["seconds"] for r in mine]
        mfu = median["tokens"] / median["seconds"] / peak_tokens_per_s
        trial = dataclasses.replace(
            variant,
            steps_per_s=median["steps"] / median["seconds"],
            spread=(max(seconds) - min(seconds)) / median["seconds"],
            tokens_per_s=median["tokens"] / median["seconds"],
            mfu=mfu if math.isfinite(peak_tokens_per_s) else None,
            peak_memory_bytes=median["peak_memory_bytes"],
            warmup_s=max(r["warmup_s"] for r in mine),
            recompilations=max(r["recompilations"] for r in mine),
            loss=median["loss"],
            loss_change=median["loss"] / baseline["loss"] - 1 if alike else None,
            tolerance=tolerance,
            ran=f"{median['precision']}, {median['attention']}",
            reason="; ".join(median["notes"]),
        )
        trials.append(trial)
    return trials


def _median_round(results: list[dict], on: tuple) -> dict | None:
    rounds = [r for r in results if tuple(r["on"]) == on and "error" not in r]
    middle = statistics.median_low([r["seconds"] for r in rounds]) if rounds else None
    return next((r for r in rounds if r["seconds"] == middle), None)


def choose_switches(rows: Sequence[Trial], goal: str = "speed") -> list[Switch]:
    """Turn on each switch that pays, with the reason for each.

    For `goal` "speed" it pays when training is at least 2 % faster; for "memory" also when it
    takes at least 10 % less memory and is at most 10 % slower. Where the loss moved it never does.
    One of ON_BY_DEFAULT is kept unless training is over 2 % slower. Raises KitError when not one
    variant ran: nothing is known then of any switch.
    """
    if goal not in ("speed", "memory"):
        raise KitError(f"goal = {goal!r}: choose speed or memory.")
    ran = {r.on: r for r in rows if r.kind in SETS and r.loss}
    if rows and not ran:
        raise KitError(
            f"None of the {len(rows)} variants ran, so no switch can be judged; the preset's stay. "
            f"The baseline: {rows[0].reason}. Fix that, delete the run's folder bench/ and run "
            "this notebook again."
        )
    return [_decide(row, ran, goal) for row in rows if row.kind == "alone"]


def _decide(row: Trial, ran: dict[tuple, Trial], goal: str) -> Switch:
    (name,) = row.on
    ends = sorted((on for on in ran if on and on[-1] == name), key=len)
    pairs = [(ran[on[:-1]], ran[on]) for on in ends if on[:-1] in ran]
    if pairs:  # the pair with the most other switches is nearest to the set that will run
        keep, reason = _judge(name, *pairs[-1], goal)
    elif ran and () not in ran and name in min(ran, key=len):
        keep = True
        reason = "the smallest set that ran here has it"
    elif name in ON_BY_DEFAULT and row.reason == LEFT_OUT:
        keep = True
        reason = f"on by default; {LEFT_OUT}"
    else:
        keep = False
        reason = row.reason or "not measured"
    ran_here = row.loss is not None
    return Switch(name=name, label=row.label, on=keep, available=ran_here, reason=reason)


def _judge(name: str, before: Trial, after: Trial, goal: str) -> tuple[bool, str]:
    by_default = name in ON_BY_DEFAULT
    moved_before = by_default and before.parity is False  # by the others
    if after.parity is False and not moved_before:
        return False, f"the loss moved by {after.loss_change:+.2%}, over {after.tolerance:.1%}"
    faster, grown = changes(before, after)
    beside = ""
    if before.on:
        others = "1 other" if len(before.on) == 1 else f"{len(before.on)} others"
        beside = f" beside {others}"
    pays = pays_off(before, after, goal)
    if by_default:
        pays = faster >= -LEAST_GAIN
        beside += f"; on by default, unless over {LEAST_GAIN:.0%} slower"
    return pays, f"{faster:+.1%} speed, {grown:+.1%} memory{beside}"


def changes(before: Trial, after: Trial) -> tuple[float, float]:
    """The relative change of speed and of peak memory."""
    faster = after.steps_per_s / before.steps_per_s - 1
    grown = after.peak_memory_bytes / max(before.peak_memory_bytes, 1) - 1
    return faster, grown


def pays_off(before: Trial, after: Trial, goal: str, least_gain: float = LEAST_GAIN) -> bool:
    """Whether `after` is faster by `least_gain`, or for the goal "memory" much smaller."""
    faster, grown = changes(before, after)
    saves = goal == "memory" and grown <= -LEAST_SAVING and faster >= -MOST_LOSS
    return faster >= least_gain or saves


def prefer_measured(decisions: Sequence[Switch], rows: Sequence[Trial]) -> list[Switch]:
    """Take another measured set if it is faster than the chosen one, which is the last of `rows`.

    It must be faster by more than the rounds differ; the baseline need only be as fast. Switches
    that help one after another may not help together, or not even run: then the fastest is taken.
    """
    baseline, together = rows[0], rows[-1]
    same = [r for r in rows[:-1] if r.kind in SETS and r.loss and r.parity is not False]
    if not same:
        return list(decisions)
    best = max(same, key=lambda row: row.steps_per_s)
    if together.loss is None:
        current = best
        why = f"the chosen set did not run ({together.reason}), {best.label} did"
    else:
        current = together
        if baseline in same and baseline.steps_per_s >= together.steps_per_s:
            current = baseline
        noise = (best.spread + current.spread) / 2
        if best.steps_per_s > (1 + max(LEAST_GAIN, noise)) * current.steps_per_s:
            current = best
        times = current.steps_per_s / together.steps_per_s
        why = f"{current.label} is {times:.2f}x as fast as the chosen set"
    if current is together:
        return list(decisions)
    preferred = []
    for each in decisions:
        on = each.name in current.on or (each.on and each.name in ON_BY_DEFAULT)
        reason = each.reason if on == each.on else f"{each.reason}; {why}"
        preferred.append(dataclasses.replace(each, on=on, reason=reason))
    return preferred


def chosen(decisions: Sequence[Switch]) -> Trial:
    """The winning set, to be measured as it is."""
    on = tuple(d.name for d in decisions if d.on)
    return Trial(kind="chosen", label="Chosen set", on=on)


def write_choice(
    decisions: Sequence[Switch], path: Path, measured_on: str, sections: dict | None = None
) -> None:
    """Write the winning set as YAML, each switch with its reason; all of it or nothing.

    With `sections`, the rest of a preset, the file is one.
    """
    sections = dict(sections or {})
    speed = sections.pop("speed", {})  # beside switches: settings that were not measured
    lines = [f"# Measured on {measured_on}."]
    if sections:
        lines.append(yaml.safe_dump(sections, allow_unicode=True, sort_keys=False).rstrip())
    lines.append("speed:")
    measured = {d.name for d in decisions}
    others = {name: value for name, value in speed.items() if name not in measured}
    lines += [f"  {name}: {json.dumps(value)}" for name, value in others.items()]
    lines += [f"  {d.name}: {str(d.on).lower()}  # {' '.join(d.reason.split())}" for d in decisions]
    write_atomic(path, "\n".join(lines) + "\n")


def trial_figures(rows: Sequence[Trial]) -> dict[str, dict]:
    """The rows as plain values for a run's record, by their switches."""
    figures = {}
    for row in rows:
        kept = RECORDED if row.loss is not None else ("reason",)
        figures["+".join(row.on) or "baseline"] = {name: getattr(row, name) for name in kept}
    return figures


def trial_cells(rows: Sequence[Trial]) -> list[tuple[str, ...]]:
    """The rows as a table's cells, the headings first."""
    cells = [TRIAL_HEAD]
    for row in rows:
        if row.loss is None:
            cells.append((row.label, *[""] * (len(TRIAL_HEAD) - 2), row.reason))
            continue
        times = ""
        if rows[0].steps_per_s:
            times = f"{row.steps_per_s / rows[0].steps_per_s:.2f}x"
        speed = (f"{row.steps_per_s:.3g}", times, f"{row.spread:.0%}")
        tokens = (f"{row.tokens_per_s:,.0f}", "" if row.mfu is None else f"{row.mfu:.0%}")
        costs = (format_gib(row.peak_memory_bytes), f"{row.warmup_s:.1f} s", f"{row.loss:.4f}")
        change = ""
        if row.loss_change is not None:
            parity = "same" if row.parity else f"beyond {row.tolerance:.1%}"
            change = f"{row.loss_change:+.3%} {parity}"
        again = f"{row.recompilations} recompilations" if row.recompilations else ""
        ran = "; ".join(filter(None, (row.ran, again, row.reason)))
        cells.append((row.label, *speed, *tokens, *costs, change, ran))
    return cells
