"""A run over its steps, from the rows of its log: live in the panel, and whole afterwards."""

import math

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kit.notebook.style import (
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


def thin(rows: list[dict], most: int = 400) -> list[dict]:
    """About `most` rows: every n-th, the last, and each one with a validation loss or a note."""
    if len(rows) <= most:
        return rows
    every = math.ceil(len(rows) / most)
    last = len(rows) - 1
    special = {i for i, r in enumerate(rows) if r.get("val_loss") is not None or r.get("note")}
    return [r for i, r in enumerate(rows) if i % every == 0 or i == last or i in special]


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
    """One field of every row as floats; what is missing is NaN."""
    values = (row.get(key) for row in rows)
    return np.array([math.nan if v is None else v for v in values], dtype=float)


def run_curves(rows: list[dict], live: bool = False) -> Figure:
    """A run over its steps: loss, memory, learning rate and load; ticks where there is a note.

    Below them, unless `live`, the gradient norm, and what the averaged weights are worth: their
    validation loss over the last weights' is below 1 where the average is better. A `live` figure
    has no layout to be solved, and is drawn in a fraction of the time.
    """
    rows = thin(rows, 400 if live else 2000)
    draws = [_losses, _memory, _rate]
    if not live:
        draws.append(_norm)
        if any(row.get("ema_val_loss") is not None for row in rows):
            draws.append(_ratio)
    grid = {"height_ratios": (3, *[1] * (len(draws) - 1))}
    if live:
        figure = Figure((9.1, 4.6), dpi=110)
        grid |= {"hspace": 0.15, "left": 0.095, "right": 0.915, "top": 0.935, "bottom": 0.1}
    else:
        figure = new_figure(8, 1.5 + 1.5 * len(draws))
    all_axes = figure.subplots(len(draws), sharex=True, gridspec_kw=grid)
    steps = column(rows, "step")
    marks = [row["step"] for row in rows if row.get("note")]
    for draw, axes in zip(draws, all_axes):
        draw(axes, rows, steps)
        axes.grid(color=GRID, linewidth=0.8)
        foot = axes.get_xaxis_transform()  # wherever the limits are
        tick = {"markersize": 7, "color": PURPLE, "label": "event", "transform": foot}
        if marks:
            axes.plot(marks, [0.02] * len(marks), "|", **tick)
    # As long as the run is now: MAX_STEPS may have been another before it was stopped.
    planned = rows[-1].get("steps") or 0 if rows else 0
    all_axes[0].set_xlim(0, max([planned, 1, *(row["step"] for row in rows)]) * 1.01)
    above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    all_axes[0].legend(frameon=False, fontsize=9, ncols=4, **above)
    all_axes[-1].set_xlabel("step", fontsize=10, color=INK)
    figure.align_ylabels(all_axes)
    return figure


def _losses(axes, rows: list[dict], steps: np.ndarray) -> None:
    losses = column(rows, "loss")
    axes.plot(steps, losses, color=SKY, linewidth=0.6, alpha=0.7)
    smoothed = smooth(losses, len(rows) // 30)
    axes.plot(steps, smoothed, color=BLUE, linewidth=1.8, label="training")
    _dots(axes, steps, column(rows, "val_loss"), ORANGE, label="held out, last weights")
    _dots(axes, steps, column(rows, "ema_val_loss"), GREEN, label="held out, EMA")
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
    axes.yaxis.set_major_locator(MaxNLocator(2))
    if axes.lines:
        beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "handlelength": 1.2}
        axes.legend(frameon=False, fontsize=8, **beside)
    tidy(axes, "", "GiB")


def _rate(axes, rows: list[dict], steps: np.ndarray) -> None:
    axes.plot(steps, column(rows, "lr"), color=INK, linewidth=1.4)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(2))
    tidy(axes, "", "rate")
    load = column(rows, "load")
    sampled = np.isfinite(load)  # not at every step
    if sampled.any():
        right = axes.twinx()
        right.plot(steps[sampled], load[sampled], color=GREEN, linewidth=1.0)
        tidy(right)
        right.set_ylim(0, 1.05)
        right.set_yticks((0, 1), ("0 %", "100 %"))
        right.set_ylabel("load", fontsize=9, color=GREEN)


def _norm(axes, rows: list[dict], steps: np.ndarray) -> None:
    axes.plot(steps, column(rows, "grad_norm"), color=SKY, linewidth=0.8)
    axes.set_yscale("log")
    tidy(axes, "", "gradient norm")


def _ratio(axes, rows: list[dict], steps: np.ndarray) -> None:
    _dots(axes, steps, column(rows, "ema_val_loss") / column(rows, "val_loss"), GREEN)
    axes.axhline(1.0, color=PALE, linewidth=1, linestyle="--")
    tidy(axes, "", "EMA / last")


def _dots(axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str = "") -> None:
    there = np.isfinite(values)
    if there.any():
        look = {"linewidth": 1.4, "marker": "o", "markersize": 4}
        axes.plot(steps[there], values[there], label=label, color=colour, **look)
