"""Choose the switches that pay, from what was measured of each (measure.py).

A switch is judged by what it changed where it was added to those before it. A change of speed that
is smaller than what rounds of the same variant differ by is noise: then the preset's choice stays.
A switch that moves the loss is refused.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from kit.base.config import merge
from kit.base.errors import KitError
from kit.base.files import write_atomic
from kit.base.formatting import format_gib
from kit.settings import SpeedConfig
from kit.training.switches import Switch

TOLERANCE = {"fp32": 0.001, "bf16": 0.02, "fp16": 0.02}  # of the loss, relative
TF32_TOLERANCE = 0.005
DROPOUT_TOLERANCE = 0.05  # fused and compiled layers drop other activations
LEAST_GAIN = 0.02  # of steps/s
LEFT_OUT = "left out by the settings"  # reason of a switch that this device has
STAYS = "the preset's choice stays"
HEAD = ("variant", "steps/s", "speed", "spread", "tokens/s", "memory", "of baseline", "warm-up")
HEAD += ("loss", "change", "ran, or why not")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A set of switches to measure, and what it did in its median round; None before that."""

    kind: str  # "baseline", "alone", "added" (to those before it), "cost" or "set"
    label: str
    on: tuple = ()  # names of switches
    reason: str = ""  # why it cannot be measured or has no figures, or what happened besides
    steps_per_s: float | None = None
    spread: float | None = None  # of the rounds' times, largest less smallest over the median
    noise: float | None = None  # a relative change of steps/s up to this may be chance
    tokens_per_s: float | None = None  # real tokens, padding left out
    peak_memory_bytes: int | None = None
    warmup_s: float | None = None  # the first steps, with all that is compiled; the slowest round
    recompilations: int | None = None  # after the warm-up
    loss: float | None = None  # nats per target, mean of the last quarter of the steps
    loss_change: float | None = None  # relative to the baseline's after as many updates
    parity: bool | None = None  # whether the loss stayed; None if unknown
    ran: str = ""  # precision and attention kernel by name


def compare(
    variants: Sequence[Trial], results: dict[tuple, list[dict]], dropout: float
) -> list[Trial]:
    """`variants` with their figures, from the results of their rounds by their switches.

    `dropout` is the model's.
    """
    baseline = median_round(results.get((), []))
    # Two rounds may be alike by chance: noise is at least what is usual of all variants.
    spreads = [spread(rounds) for rounds in results.values() if median_round(rounds)]
    usual = max(LEAST_GAIN, statistics.median(spreads or [0.0]))
    trials = []
    for variant in variants:
        rounds = results.get(variant.on, [])
        failed = [r["error"] for r in rounds if "error" in r]
        median = median_round(rounds)
        if variant.reason or failed or median is None:
            reason = variant.reason or (failed or ["not measured yet"])[0]
            trials.append(dataclasses.replace(variant, reason=reason))
            continue
        loss_change = parity = None
        # A step that fp16 skipped while it looked for its scale is missing from the curve.
        if baseline and baseline["skipped"] == median["skipped"]:
            loss_change = median["loss"] / baseline["loss"] - 1
            parity = abs(loss_change) <= tolerance(variant.on, median["precision"], dropout)
        trial = dataclasses.replace(
            variant,
            steps_per_s=median["steps"] / median["seconds"],
            spread=spread(rounds),
            noise=max(usual, spread(rounds)),
            tokens_per_s=median["tokens"] / median["seconds"],
            peak_memory_bytes=median["peak_memory_bytes"],
            warmup_s=max(r["warmup_s"] for r in rounds),
            recompilations=max(r["recompilations"] for r in rounds),
            loss=median["loss"],
            loss_change=loss_change,
            parity=parity,
            ran=f"{median['precision']}, {median['attention']}",
            reason="; ".join(median["notes"]),
        )
        trials.append(trial)
    return trials


def median_round(rounds: list[dict]) -> dict | None:
    """The round whose time is the median; None where one failed or there is none."""
    if not rounds or any("error" in r for r in rounds):
        return None
    return sorted(rounds, key=lambda r: r["seconds"])[(len(rounds) - 1) // 2]


def spread(rounds: list[dict]) -> float:
    seconds = [r["seconds"] for r in rounds]
    return (max(seconds) - min(seconds)) / median_round(rounds)["seconds"]


def tolerance(on: tuple, precision: str, dropout: float) -> float:
    """How far the loss may move, relative to the baseline's."""
    if dropout and {"sdpa", "compile"} & {*on}:
        return DROPOUT_TOLERANCE
    return max(TOLERANCE[precision], TF32_TOLERANCE if "tf32" in on else 0.0)


def changes(before: Trial, after: Trial) -> tuple[float, float]:
    """The relative change of speed and of peak memory."""
    faster = after.steps_per_s / before.steps_per_s - 1
    grown = after.peak_memory_bytes / max(before.peak_memory_bytes, 1) - 1
    return faster, grown


def is_noise(before: Trial, after: Trial) -> bool:
    return abs(changes(before, after)[0]) <= max(before.noise, after.noise)


def pays_off(before: Trial, after: Trial) -> bool:
    """Whether `after` ran, and is faster beyond noise."""
    if after.loss is None:
        return False
    return changes(before, after)[0] > 0 and not is_noise(before, after)


def choose_switches(rows: Sequence[Trial], preset: SpeedConfig) -> list[Switch]:
    """Turn on each switch with which training is faster by more than noise, and say why.

    Where the loss moved it stays off; within noise the choice of `preset` stays. Raises KitError
    when not one variant ran: nothing is known then of any switch.
    """
    ran = {r.on: r for r in rows if r.kind in ("baseline", "alone", "added") and r.loss}
    if rows and not ran:
        raise KitError(
            f"None of the {len(rows)} variants ran, so no switch can be judged; the preset's stay. "
            f"The baseline: {rows[0].reason}. Fix that, delete the run's folder bench/ and run "
            "this notebook again."
        )
    decisions = []
    for row in rows:
        if row.kind != "alone":
            continue
        (name,) = row.on
        keep = getattr(preset, name)
        ends = sorted((on for on in ran if on and on[-1] == name), key=len)
        pairs = [(ran[on[:-1]], ran[on]) for on in ends if on[:-1] in ran]
        if pairs:  # the pair with the most other switches is nearest to the set that will run
            keep, reason = judge(*pairs[-1], keep)
        elif row.reason == LEFT_OUT or any(name in on for on in ran):
            reason = f"{row.reason or 'nothing to compare it with'}: {STAYS}"
        else:
            keep, reason = False, row.reason
        ran_here = row.loss is not None
        decisions.append(
            Switch(name=name, label=row.label, on=keep, available=ran_here, reason=reason)
        )
    return decisions


def judge(before: Trial, after: Trial, by_preset: bool) -> tuple[bool, str]:
    """Whether what `after` has more than `before` pays, and why; in doubt `by_preset`."""
    if after.parity is False and before.parity is not False:  # else the others have moved it
        return False, f"the loss moved by {after.loss_change:+.2%}"
    faster, grown = changes(before, after)
    figures = f"{faster:+.1%} speed, {grown:+.1%} memory"
    if before.on:
        figures += f" beside {len(before.on)} other{'s' if len(before.on) > 1 else ''}"
    if is_noise(before, after):
        return by_preset, f"{figures}, within noise: {STAYS}"
    return faster > 0, figures


def set_of(label: str, names: Iterable[str]) -> Trial:
    """Switches together, to be measured as they are."""
    return Trial(kind="set", label=label, on=tuple(names))


def keep_or_replace(decisions: Sequence[Switch], preset: Trial, chosen: Trial) -> list[Switch]:
    """The decisions if the `chosen` set pays off beside the preset's, both measured; else those.

    Switches that help one after another may not help together, or not even run.
    """
    runs = chosen.loss is not None
    if runs and (chosen.on == preset.on or preset.loss is None or pays_off(preset, chosen)):
        return list(decisions)
    why = "together they do not pay off beside the preset's set"
    if not runs:
        why = f"the chosen set did not run ({chosen.reason})"
    kept = []
    for each in decisions:
        on = each.name in preset.on
        reason = each.reason if on == each.on else f"{each.reason}; {why}: {STAYS}"
        kept.append(dataclasses.replace(each, on=on, reason=reason))
    return kept


def write_choice(decisions: Sequence[Switch], path: Path, measured_on: str, sections: dict) -> None:
    """Write a preset: `sections`, and the switches, each with its reason."""
    lines = [f"# Measured on {measured_on}."]
    lines += [f"# {d.name}: {' '.join(d.reason.split())}" for d in decisions]
    preset = merge(sections, {"speed": {d.name: d.on for d in decisions}})
    lines.append(yaml.safe_dump(preset, allow_unicode=True, sort_keys=False))
    write_atomic(path, "\n".join(lines))


def trial_figures(rows: Sequence[Trial]) -> dict[str, dict]:
    """The rows as plain values for a run's record, by their switches."""
    figures = {}
    for row in rows:
        values = {name: value for name, value in vars(row).items() if value is not None}
        for name in ("kind", "label", "on"):
            del values[name]
        figures["+".join(row.on) or "baseline"] = values
    return figures


def trial_cells(rows: Sequence[Trial]) -> list[tuple[str, ...]]:
    """The rows as a table's cells, the headings first."""
    cells = [HEAD]
    baseline = rows[0]
    for row in rows:
        if row.loss is None:
            cells.append((row.label, *[""] * (len(HEAD) - 2), row.reason))
            continue
        times = share = change = ""
        if baseline.loss is not None:
            faster, grown = changes(baseline, row)
            times = f"{1 + faster:.2f}x"
            share = f"{1 + grown:.0%}"
            if row is not baseline and is_noise(baseline, row):
                times += ", within noise"
        if row.loss_change is not None:
            change = f"{row.loss_change:+.3%} {'same' if row.parity else 'moved'}"
        again = f"{row.recompilations} recompilations" if row.recompilations else ""
        cell = (
            row.label,
            f"{row.steps_per_s:.3g}",
            times,
            f"{row.spread:.0%}",
            f"{row.tokens_per_s:,.0f}",
            format_gib(row.peak_memory_bytes),
            share,
            f"{row.warmup_s:.1f} s",
            f"{row.loss:.4f}",
            change,
            "; ".join(filter(None, (row.ran, again, row.reason))),
        )
        cells.append(cell)
    return cells
