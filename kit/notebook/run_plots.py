"""A run over its steps, from the rows of its log, and the few rows a picture needs."""

import math

import numpy as np
from matplotlib.figure import Figure

from kit.notebook.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PALE,
    PURPLE,
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
    return [r for i, r in enumerate(rows) if i % every == 0 or i == last or _special(r)]


def _special(row: dict) -> bool:
    return row.get("val_loss") is not None or bool(row.get("note"))


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Mean over up to `span` neighbours to either side, passing over what is not finite."""
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    place = np.arange(len(values))
    first = np.maximum(place - span, 0)
    end = np.minimum(place + span + 1, len(values))
    many = count[end] - count[first]
    return np.where(many > 0, (total[end] - total[first]) / np.maximum(many, 1), np.nan)


def column(rows: list[dict], key: str) -> np.ndarray:
    """One field of every row as floats; what is missing is NaN."""
    values = (row.get(key) for row in rows)
    return np.array([math.nan if v is None else v for v in values], dtype=float)


def run_curves(rows: list[dict]) -> Figure:
    """A whole run over its steps: loss, learning rate, gradient norm, and what averaging is worth.

    The last, the averaged weights' validation loss over the last weights', is below 1 where the
    average is better; without an average it is left out.
    """
    rows = thin(rows, 2000)
    steps = column(rows, "step")
    marks = [row["step"] for row in rows if row.get("note")]
    ratio = column(rows, "ema_val_loss") / column(rows, "val_loss")
    panels = 4 if np.isfinite(ratio).any() else 3
    figure = new_figure(8, 1.2 + 1.5 * panels)
    heights = {"height_ratios": (2, *[1] * (panels - 1))}
    loss, rate, norm, *more = figure.subplots(panels, sharex=True, gridspec_kw=heights)
    _losses(loss, rows, steps)
    rate.plot(steps, column(rows, "lr"), color=INK, linewidth=1.4)
    norm.plot(steps, column(rows, "grad_norm"), color=SKY, linewidth=0.8)
    norm.set_yscale("log")
    tidy(rate, "", "learning rate")
    tidy(norm, "", "gradient norm")
    for axes in more:
        _dots(axes, steps, ratio, GREEN)
        axes.axhline(1.0, color=PALE, linewidth=1, linestyle="--")
        tidy(axes, "", "EMA / last")
    for axes in (loss, rate, norm, *more):
        axes.grid(color=GRID, linewidth=0.8)
        if marks:
            axes.plot(marks, [0.02] * len(marks), "|", **_tick(axes))
    loss.legend(frameon=False, fontsize=9)
    figure.axes[-1].set_xlabel("step", fontsize=10, color=INK)
    figure.align_ylabels()
    return figure


def _tick(axes) -> dict:
    """A small tick at the foot of `axes` for a step with a note, wherever its limits are."""
    return {
        "transform": axes.get_xaxis_transform(),
        "markersize": 7,
        "color": PURPLE,
        "label": "event",
    }


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


def _dots(axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str = "") -> None:
    there = np.isfinite(values)
    if there.any():
        axes.plot(
            steps[there],
            values[there],
            label=label,
            color=colour,
            linewidth=1.4,
            marker="o",
            markersize=4,
        )
