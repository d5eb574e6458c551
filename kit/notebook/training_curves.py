"""The curves of a training run, in the panel while it trains and in its results afterwards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kit.notebook.plots import (
    BLUE,
    GIB,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    new_figure,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def thin(rows: list[dict], max_rows: int = 400) -> list[dict]:
    """About `max_rows`: every n-th, the last, and each one with a validation loss or a note."""
    if len(rows) <= max_rows:
        return rows
    kept = {*range(0, len(rows), math.ceil(len(rows) / max_rows)), len(rows) - 1}
    kept |= {i for i, r in enumerate(rows) if r.get("val_loss") is not None or r.get("note")}
    return [rows[i] for i in sorted(kept)]


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Mean over up to `span` neighbours to either side, passing over what is not finite."""
    if not span:
        return values
    window = np.ones(2 * span + 1)
    finite = np.isfinite(values)
    count = np.convolve(finite, window, "same")
    total = np.convolve(np.where(finite, values, 0.0), window, "same")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def column(rows: list[dict], key: str) -> np.ndarray:
    """One field of every row as floats; what is missing or None is NaN."""
    return np.array([row.get(key) for row in rows], dtype=float)


def run_curves(rows: list[dict], live: bool = False, header_in: float = 0.0) -> Figure:
    """A run over its steps: loss, memory, learning rate and load; ticks where there is a note.

    Below them, unless `live`, the gradient norm, and what the averaged weights are worth: their
    validation loss over the last weights' is below 1 where the average is better. A `live` figure
    has no layout to be solved, and is drawn in a fraction of the time; `header_in` is room above.
    """
    rows = thin(rows, 400 if live else 2000)
    draws = [_losses, _memory, _rate]
    if not live:
        draws.append(_norm)
        if any(row.get("ema_val_loss") is not None for row in rows):
            draws.append(_ratio)
    grid = {"height_ratios": (3, *[1] * (len(draws) - 1))}
    if live:
        height_in = 4.6 + header_in
        figure = new_figure(9.1, height_in, dpi=110, layout="none")
        grid |= {"hspace": 0.15, "left": 0.095, "right": 0.915}
        grid |= {"top": 4.3 / height_in, "bottom": 0.46 / height_in}
    else:
        figure = new_figure(8, 1.5 + 1.5 * len(draws))
    all_axes = figure.subplots(len(draws), sharex=True, gridspec_kw=grid)
    steps = column(rows, "step")
    marks = [row["step"] for row in rows if row.get("note")]
    for draw, axes in zip(draws, all_axes):
        draw(axes, rows, steps)
        axes.grid(color=GRID, linewidth=0.8)
        if marks:
            foot = axes.get_xaxis_transform()  # wherever the limits are
            tick = {"markersize": 7, "color": PURPLE, "label": "event", "transform": foot}
            axes.plot(marks, [0.02] * len(marks), "|", **tick)
    # As long as the run is now: MAX_STEPS may have been another before it was stopped.
    planned = 0
    if rows:
        planned = rows[-1].get("steps") or 0
    all_axes[0].set_xlim(0, max([planned, 1, *(row["step"] for row in rows)]) * 1.01)
    above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    all_axes[0].legend(frameon=False, fontsize=9, ncols=4, **above)
    all_axes[-1].set_xlabel("step", fontsize=10, color=INK)
    figure.align_ylabels(all_axes)
    return figure


def panel_picture(rows: list[dict], switches: dict[str, bool]) -> Figure:
    """The training panel for those who only see the executed notebook: switches above the curves.

    `switches` are on or off by label.
    """
    line_in = 0.24
    columns = 3
    header_in = line_in * math.ceil(len(switches) / columns)
    figure = run_curves(rows, live=True, header_in=header_in)
    for number, (label, on) in enumerate(switches.items()):
        row, column = divmod(number, columns)
        height = 1 - (row + 0.6) * line_in / figure.get_figheight()
        look = {"fontsize": 9, "va": "center", "color": INK if on else PALE}
        box = "\N{BALLOT BOX WITH CHECK}" if on else "\N{BALLOT BOX}"
        figure.text(0.03 + column / columns, height, f"{box} {label}", **look)
    return figure


def _losses(axes, rows: list[dict], steps: np.ndarray) -> None:
    losses = column(rows, "loss")
    axes.plot(steps, losses, color=SKY, linewidth=0.6, alpha=0.7)
    smoothed = smooth(losses, len(rows) // 30)
    axes.plot(steps, smoothed, color=BLUE, linewidth=1.8, label="training")
    _dots(axes, steps, column(rows, "val_loss"), ORANGE, label="held out, last weights")
    _dots(axes, steps, column(rows, "ema_val_loss"), GREEN, label="held out, EMA", marker="s")
    finite = losses[np.isfinite(losses)]
    if len(finite):  # a single spike must not flatten the curve
        low, high = axes.get_ylim()
        axes.set_ylim(low, min(high, 1.1 * float(np.quantile(finite, 0.995))))
    tidy(axes, "", "loss (nats per target)")


def _memory(axes, rows: list[dict], steps: np.ndarray) -> None:
    looks = {"memory_bytes": ("peak", "-", RED), "memory_now_bytes": ("now", ":", ORANGE)}
    for key, (name, look, colour) in looks.items():
        values = column(rows, key) / GIB
        if np.isfinite(values).any():
            axes.plot(steps, values, look, color=colour, linewidth=1.5, label=name)
    axes.set_ylim(bottom=0)
    axes.locator_params("y", nbins=2)
    if axes.lines:
        beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "handlelength": 1.2}
        axes.legend(frameon=False, fontsize=8, **beside)
    on_gpu = any(row.get("reserved_bytes") for row in rows)
    tidy(axes, "", "VRAM, GiB" if on_gpu else "RAM of\ntraining, GiB")


def _rate(axes, rows: list[dict], steps: np.ndarray) -> None:
    axes.plot(steps, column(rows, "lr"), color=INK, linewidth=1.4)
    axes.set_ylim(bottom=0)
    axes.locator_params("y", nbins=2)
    tidy(axes, "", "rate")
    load = column(rows, "load")
    sampled = np.isfinite(load)  # not at every step
    if sampled.any():
        right = axes.twinx()
        right.plot(steps[sampled], load[sampled], "--", color=GREEN, linewidth=1.0)
        tidy(right)
        right.set_ylim(0, 1.05)
        right.set_yticks((0, 1), ("0 %", "100 %"))
        right.set_ylabel("load (dashed)", fontsize=9, color=INK)


def _norm(axes, rows: list[dict], steps: np.ndarray) -> None:
    axes.plot(steps, column(rows, "grad_norm"), color=SKY, linewidth=0.8)
    axes.set_yscale("log")
    tidy(axes, "", "gradient norm")


def _ratio(axes, rows: list[dict], steps: np.ndarray) -> None:
    _dots(axes, steps, column(rows, "ema_val_loss") / column(rows, "val_loss"), GREEN)
    axes.axhline(1.0, color=PALE, linewidth=1, linestyle="--")
    tidy(axes, "", "EMA / last")


def _dots(
    axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str = "", marker: str = "o"
) -> None:
    finite = np.isfinite(values)
    if finite.any():
        look = {"linewidth": 1.4, "marker": marker, "markersize": 4}
        axes.plot(steps[finite], values[finite], label=label, color=colour, **look)
