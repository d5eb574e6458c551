"""A run over its steps, from the rows of its log: the whole of it, and the panel's live curve.

The live curve is made in a few milliseconds, from any thread: axes, ticks and legend are drawn once
and kept as pixels; a frame restores them and draws only the lines.
"""

import io
import math

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

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
            foot = axes.get_xaxis_transform()  # wherever the limits are
            tick = {"markersize": 7, "color": PURPLE, "label": "event", "transform": foot}
            axes.plot(marks, [0.02] * len(marks), "|", **tick)
    loss.legend(frameon=False, fontsize=9)
    figure.axes[-1].set_xlabel("step", fontsize=10, color=INK)
    figure.align_ylabels()
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


def _dots(axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str = "") -> None:
    there = np.isfinite(values)
    if there.any():
        look = {"linewidth": 1.4, "marker": "o", "markersize": 4}
        axes.plot(steps[there], values[there], label=label, color=colour, **look)


class LossFigure:
    """Loss above; below it memory, and the learning rate with the device's load.

    The background is redrawn when the data leave the limits, which move in round steps.
    """

    def __init__(self, width_px: int = 1000, height_px: int = 500, dpi: int = 110):
        self.figure = Figure((width_px / dpi, height_px / dpi), dpi=dpi)
        self.canvas = FigureCanvasAgg(self.figure)
        grid = {
            "height_ratios": (3, 1, 1),
            "hspace": 0.15,
            "left": 0.075,
            "right": 0.915,
            "top": 0.935,
            "bottom": 0.1,
        }
        axes = self.figure.subplots(3, 1, sharex=True, gridspec_kw=grid)
        self.loss, self.memory, self.rate = axes
        self.load = self.rate.twinx()
        self.lines = self._lines()
        self._decorate()
        self.background = None  # pixels of everything but the lines; None: redraw

    def _lines(self) -> dict:
        dots = {"marker": "o", "markersize": 4.5, "linewidth": 1.4}
        tick = {
            "color": PURPLE,
            "linestyle": "",
            "marker": "|",
            "markersize": 9,
            "markeredgewidth": 1.6,
            "transform": self.loss.get_xaxis_transform(),
        }
        styles = {
            "event": (self.loss, tick),
            "raw": (self.loss, {"color": SKY, "linewidth": 0.8, "alpha": 0.75}),
            "smooth": (self.loss, {"color": BLUE, "linewidth": 1.8, "label": "training loss"}),
            "val": (self.loss, dict(dots, color=ORANGE, label="validation")),
            "ema": (self.loss, dict(dots, color=GREEN, label="validation, EMA", marker="s")),
            "lr": (self.rate, {"color": PALE, "linewidth": 1.1, "linestyle": "--"}),
            "load": (self.load, {"color": GREEN, "linewidth": 1.0}),
            "memory": (self.memory, {"color": RED, "linewidth": 1.6}),
            "memory_now": (self.memory, {"color": ORANGE, "linewidth": 1.4, "linestyle": ":"}),
        }
        return {
            name: axes.plot([], [], animated=True, **style)[0]
            for name, (axes, style) in styles.items()
        }

    def _decorate(self) -> None:
        for axes in (self.loss, self.memory, self.rate):
            tidy(axes)
            axes.grid(color=GRID, linewidth=0.8)
            axes.yaxis.set_label_coords(-0.06, 0.5)
            axes.set_ylim(0, 1)
        for axes in (self.loss, self.memory):
            axes.tick_params(labelbottom=False)
        self.loss.set_ylabel("loss (nats per target)", fontsize=9, color=INK)
        self.memory.set_ylabel("GiB", fontsize=9, color=INK)
        self.memory.yaxis.set_major_locator(MaxNLocator(2))
        beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "handlelength": 1.2}
        now_and_peak = [self.lines[name] for name in ("memory", "memory_now")]
        self.memory.legend(now_and_peak, ["peak", "now"], frameon=False, fontsize=8, **beside)
        self.rate.set_xlabel("step", fontsize=9, color=INK)
        self.rate.set_ylabel("rate", fontsize=9, color="#707070")
        self.rate.yaxis.set_major_locator(MaxNLocator(2))
        self.rate.yaxis.set_major_formatter(_power)
        tidy(self.load)
        self.load.set_ylim(0, 1.05)
        self.load.set_yticks((0, 1), ("0 %", "100 %"))
        self.load.set_ylabel("load", fontsize=9, color=GREEN)
        self.load.set_visible(False)  # until there is one
        keys = [self.lines[k] for k in ("smooth", "val", "ema", "event")]
        names = ["training loss", "validation", "validation, EMA weights", "event"]
        above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
        self.loss.legend(keys, names, frameon=False, fontsize=9, ncols=4, **above)

    def png(self, rows: list[dict]) -> bytes:
        """A PNG of `rows` (events as dicts, ascending steps; [] gives the empty axes)."""
        rows = thin(rows)
        self._load(rows)
        if self._fit(rows) or self.background is None:
            self.canvas.draw()
            self.background = self.canvas.copy_from_bbox(self.figure.bbox)
        self.canvas.restore_region(self.background)
        for line in self.lines.values():
            if line.axes.get_visible():
                line.axes.draw_artist(line)
        size = self.canvas.get_width_height()
        rgba = Image.frombuffer("RGBA", size, self.canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
        file = io.BytesIO()
        rgba.convert("RGB").save(file, "PNG", compress_level=1)
        return file.getvalue()

    def _load(self, rows: list[dict]) -> None:
        steps = column(rows, "step")
        loss = column(rows, "loss")
        self.lines["raw"].set_data(steps, loss)
        self.lines["smooth"].set_data(steps, smooth(loss, len(rows) // 30))
        for name, key in (("val", "val_loss"), ("ema", "ema_val_loss")):
            values = column(rows, key)
            there = np.isfinite(values)  # else the line would break between two validations
            self.lines[name].set_data(steps[there], values[there])
        self.lines["memory"].set_data(steps, column(rows, "memory_bytes") / GIB)
        self.lines["memory_now"].set_data(steps, column(rows, "memory_now_bytes") / GIB)
        self.lines["lr"].set_data(steps, column(rows, "lr"))
        load = column(rows, "load")
        sampled = np.isfinite(load)  # not at every step
        self.lines["load"].set_data(steps[sampled], load[sampled])
        marks = [row["step"] for row in rows if row.get("note")]
        self.lines["event"].set_data(marks, [0.025] * len(marks))  # at the foot, in axes' height

    def _fit(self, rows: list[dict]) -> bool:
        """Move the limits where the data ask for it; true when they moved."""
        before = self._limits()
        # As long as the run is now: MAX_STEPS may have been another before it was stopped.
        planned = rows[-1].get("steps") or 0 if rows else 0
        last = max([planned, *(row["step"] for row in rows)])
        self.loss.set_xlim(0, max(last, 1) * 1.01)
        values = np.concatenate([self.lines[n].get_ydata() for n in ("raw", "val", "ema")])
        finite = values[np.isfinite(values)]
        if len(finite):  # a single spike must not flatten the curve
            low = float(finite.min())
            high = float(np.quantile(finite, 0.995))
            self.loss.set_ylim(*roomy(low, high, self.loss.get_ylim()))
        for axes, name in ((self.memory, "memory"), (self.rate, "lr")):
            top = np.nanmax(self.lines[name].get_ydata(), initial=0.0)
            if np.isfinite(top) and top > 0:
                axes.set_ylim(0, roomy(0, top * 1.15, axes.get_ylim())[1])
        self.load.set_visible(len(self.lines["load"].get_xdata()) > 0)
        return before != self._limits()

    def _limits(self) -> list:
        """What the background depends on."""
        axes = (self.loss, self.memory, self.rate)
        return [self.load.get_visible(), *(each.viewLim.frozen().bounds for each in axes)]


def _power(value: float, _place) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def roomy(low: float, high: float, now: tuple[float, float]) -> tuple[float, float]:
    """Round limits around low..high; `now` as it is while the data fill half of it or more."""
    # A few steps hardly differ: closer than a fiftieth the ticks' many digits reach into the label.
    span = max(high - low, 0.02 * max(abs(high), abs(low)), 1e-12)
    if now[0] <= low and high <= now[1] and span >= 0.5 * (now[1] - now[0]):
        return now
    unit = 10.0 ** math.floor(math.log10(span)) / 2
    return math.floor(low / unit) * unit, math.ceil((high + 0.02 * span) / unit) * unit
