"""The small charts of the notebooks, and what every picture of a run has in common.

Everything is matplotlib's object-oriented interface on the Agg canvas: pyplot keeps one global
figure that a second thread corrupts. Every figure has units on its axes and Okabe and Ito's
colour-blind-safe palette; none holds the text of a sentence, for the default font has no Ethiopic.
Knows the rows of a run's log, not training, widgets or audio. The live curve is in live_plot.py.
"""

import io
import math
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = PALETTE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
)
INK = "#333333"
PALE = "#9a9a9a"
GRID = "#e6e6e6"
GIB = 2**30
CELL = {"align": "edge", "edgecolor": "white", "linewidth": 0.4}  # of a token


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


def png(figure: Figure) -> bytes:
    """`figure` as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def show(figure: Figure) -> None:
    """Display `figure` in the notebook, sharp on dense screens, wherever in a cell.

    A Figure made without pyplot has no picture of its own in a notebook: only its repr.
    """
    import IPython.display

    image = IPython.display.Image(data=png(figure), format="png", width=shown_width_px(figure))
    IPython.display.display(image)


def shown_width_px(figure: Figure) -> int:
    """Half the picture's own width: sharp on dense screens."""
    return round(figure.get_figwidth() * figure.dpi / 2)


def column(rows: list[dict], key: str) -> np.ndarray:
    """One field of every row as floats; what is missing is NaN."""
    values = (row.get(key) for row in rows)
    return np.array([math.nan if v is None else v for v in values], dtype=float)


def tidy(axes, xlabel: str = "", ylabel: str = "", title: str = "") -> None:
    """One look for all: no frame on top and right, small grey ticks, ink-coloured labels."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(PALE)
    axes.tick_params(labelsize=9, color=PALE, labelcolor=INK)
    axes.set_axisbelow(True)
    if xlabel:
        axes.set_xlabel(xlabel, fontsize=10, color=INK)
    if ylabel:
        axes.set_ylabel(ylabel, fontsize=10, color=INK)
    if title:
        axes.set_title(title, fontsize=11, color=INK, loc="left")


def _figure(width_in: float, height_in: float, columns: int = 1):
    # 200 dots an inch, shown at half that: `show` gives the picture its width.
    figure = Figure((width_in, height_in), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def histogram(values, label: str = "", unit: str = "", bins: int = 40) -> Figure:
    """How `values` are spread; the median is marked. A dict name -> values gives one axes each."""
    groups = values if isinstance(values, dict) else {label: values}
    figure, all_axes = _figure(8, 2.6, len(groups))
    for axes, (name, numbers), colour in zip(all_axes, groups.items(), PALETTE * 9):
        numbers = np.asarray(numbers, dtype=float)
        middle = float(np.median(numbers)) if len(numbers) else math.nan
        axes.hist(numbers, bins=bins, color=colour, edgecolor="white", linewidth=0.3)
        axes.axvline(middle, color=INK, linewidth=1, linestyle="--")
        extra = f"median {middle:.3g} {unit}".strip() + f", n = {len(numbers):,}"
        # Side by side there is no room for both on one line.
        title = f"{name}  ({extra})" if len(groups) == 1 else f"{name}\n{extra}"
        tidy(axes, unit, "count", title)
    return figure


def bars(names: Sequence[str], values: Iterable[float], unit: str = "", title: str = "") -> Figure:
    """Horizontal bars from the top down, each with its value; a missing one (None, NaN) says so."""
    numbers = [math.nan if v is None else float(v) for v in values]
    figure, (axes,) = _figure(8, 0.7 + 0.33 * max(len(numbers), 1))
    axes.barh(range(len(numbers)), np.nan_to_num(numbers), color=BLUE, height=0.65)
    widest = max(map(abs, np.nan_to_num(numbers)), default=1.0) or 1.0
    for place, number in enumerate(numbers):
        text = "not measured" if math.isnan(number) else f"{number:,.4g}"
        end = 0.0 if math.isnan(number) else max(number, 0.0)
        axes.text(end + 0.01 * widest, place, text, va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(numbers)), list(names))
    axes.invert_yaxis()
    axes.set_xlim(min([0.0, *np.nan_to_num(numbers)]) * 1.1, widest * 1.14)
    tidy(axes, unit, "", title)
    axes.tick_params(axis="y", length=0)
    return figure


def memory_bars(
    parts: dict[str, int],
    peak_bytes: int,
    measured_bytes: int | None,
    limit_bytes: int,
    device_bytes: int,
    title: str = "",
) -> Figure:
    """A training step's memory: its fullest moment against the device above, its parts below.

    The parts are each at their largest, and not all there at once: together they are more than the
    peak. `measured_bytes` is that of a real step, None where none was taken.
    """
    parts = {name: size for name, size in parts.items() if size}
    figure = Figure((8, 1.9 + 0.3 * len(parts)), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    heights = {"height_ratios": (1, 0.45 * len(parts))}
    device, own = figure.subplots(2, 1, gridspec_kw=heights)
    device.barh(0, device_bytes / GIB, color=GRID, height=0.7, label="device")
    device.barh(0, peak_bytes / GIB, color=BLUE, height=0.7, label="planned")
    if measured_bytes is not None:
        device.barh(0, measured_bytes / GIB, color=ORANGE, height=0.25, label="measured")
    device.axvline(limit_bytes / GIB, color=RED, linestyle="--", linewidth=1.4, label="may use")
    device.set_yticks([])
    below = {"loc": "upper right", "bbox_to_anchor": (1, -0.3)}
    device.legend(frameon=False, fontsize=8, ncols=4, **below)
    tidy(device, "", "", title)
    device.set_xlabel("GiB", fontsize=10, color=INK, loc="left")
    unit, unit_bytes = ("GiB", GIB) if peak_bytes >= GIB else ("MiB", 2**20)
    sizes = [size / unit_bytes for size in parts.values()]
    own.barh(range(len(parts)), sizes, color=BLUE, height=0.65)
    for place, size in enumerate(sizes):
        own.text(size + 0.01 * max(sizes), place, f"{size:,.3g}", va="center", fontsize=9)
    own.set_yticks(range(len(parts)), list(parts))
    own.invert_yaxis()
    own.set_xlim(0, 1.14 * max(sizes))
    tidy(own, f"{unit}, each part at its largest")
    own.tick_params(axis="y", length=0)
    return figure


def heatmaps(maps: dict[str, np.ndarray], xlabel: str, ylabel: str, columns: int = 4) -> Figure:
    """Grids (ys, xs) of numbers from 0 up by name, one picture each, on one colour scale."""
    highest = max(float(grid.max()) for grid in maps.values())
    lines = math.ceil(len(maps) / columns)
    columns = min(columns, len(maps))
    figure = Figure((max(4.0, 2.6 * columns), 2.4 * lines), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = [axes for line in figure.subplots(lines, columns, squeeze=False) for axes in line]
    for axes in all_axes:
        axes.set_axis_off()
    for place, (axes, (name, grid)) in enumerate(zip(all_axes, maps.items())):
        axes.set_axis_on()
        axes.imshow(grid, origin="lower", aspect="auto", cmap="magma", vmin=0, vmax=highest)
        last = place + columns >= len(maps)
        tidy(axes, xlabel if last else "", "" if place % columns else ylabel, name)
    return figure


def grouped_bars(
    names: Sequence[str], groups: dict[str, Iterable[float]], unit: str = "", title: str = ""
) -> Figure:
    """Horizontal bars from the top down, for each name one of every group, with their values."""
    figure, (axes,) = _figure(8, 0.9 + (0.12 + 0.19 * len(groups)) * max(len(names), 1))
    height = 0.8 / len(groups)
    widest = max((v for values in groups.values() for v in values), default=1.0) or 1.0
    for number, ((group, values), colour) in enumerate(zip(groups.items(), PALETTE * 9)):
        places = [i + (number + 0.5) * height - 0.4 for i in range(len(names))]
        axes.barh(places, values, color=colour, height=0.9 * height, label=group)
        for place, value in zip(places, values):
            axes.text(value + 0.01 * widest, place, f"{value:,.4g}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), list(names))
    axes.invert_yaxis()
    axes.set_xlim(0, widest * 1.14)
    axes.legend(frameon=False, fontsize=9)
    tidy(axes, unit, "", title)
    axes.tick_params(axis="y", length=0)
    return figure


def spectrograms(mels: dict[str, np.ndarray], frame_rate: float | None = None) -> Figure:
    """Log-mels (M, T) side by side on one colour scale; time in seconds given frames per second."""
    arrays = {name: np.asarray(mel, dtype=float) for name, mel in mels.items()}
    figure, all_axes = _figure(max(4.0, 3.2 * len(arrays)), 2.4, len(arrays))
    low = min(np.quantile(mel, 0.02) for mel in arrays.values())
    high = max(mel.max() for mel in arrays.values())
    for axes, (name, mel) in zip(all_axes, arrays.items()):
        length = mel.shape[1] / frame_rate if frame_rate else mel.shape[1]
        axes.imshow(
            mel,
            origin="lower",
            aspect="auto",
            cmap="magma",
            vmin=low,
            vmax=high,
            extent=(0, length, 0, mel.shape[0]),
        )
        first = axes is all_axes[0]
        tidy(axes, "time (s)" if frame_rate else "frame", "mel band" if first else "", name)
    return figure


def curves(lines: dict[str, tuple], xlabel: str, ylabel: str, title: str = "") -> Figure:
    """Lines by name, each `(xs, ys)`, with dots where there are few points."""
    figure, (axes,) = _figure(8, 3.0)
    for (name, (xs, ys)), colour in zip(lines.items(), PALETTE * 9):
        dot = "o" if len(xs) <= 30 else None
        axes.plot(xs, ys, label=name, color=colour, linewidth=1.6, marker=dot, markersize=4)
    if all(float(x).is_integer() for xs, _ in lines.values() for x in xs):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=GRID, linewidth=0.8)
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=9)
    tidy(axes, xlabel, ylabel, title)
    return figure


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
    figure = Figure((8, 1.2 + 1.5 * panels), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
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
    place = {"transform": axes.get_xaxis_transform(), "markersize": 7}
    return place | {"color": PURPLE, "label": "event"}


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
        style = {"color": colour, "linewidth": 1.4, "marker": "o", "markersize": 4}
        axes.plot(steps[there], values[there], label=label, **style)


def training_row(text: Sequence[int], codes: Sequence[int], mel: np.ndarray) -> Figure:
    """One row as the model reads it, a cell a token, and the log-mel (M, T) below its codes.

    `START text STOP START codes STOP STOP STOP`; equal ids of one kind have equal shades.
    """
    figure = Figure((8, 2.9), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    heights = {"height_ratios": (1, 3)}
    row, sound = figure.subplots(2, sharex=True, gridspec_kw=heights)
    text_end = 1 + len(text)
    code_start = text_end + 2
    code_end = code_start + len(codes)
    row.bar([0, text_end, text_end + 1, *range(code_end, code_end + 3)], 1, 1, color=INK, **CELL)
    _tokens(row, text, 1, BLUE, "text pieces")
    _tokens(row, codes, code_start, ORANGE, "codes")
    row.set_ylim(0, 1.6)
    row.set_axis_off()
    extent = (code_start, code_end, 0, mel.shape[0])
    sound.imshow(mel, origin="lower", aspect="auto", cmap="magma", extent=extent)
    sound.set_xlim(0, code_end + 3)
    tidy(sound, "token of the row (black: START and STOP)", "mel band")
    return figure


def _tokens(axes, ids: Sequence[int], start: int, colour: str, name: str) -> None:
    """A cell for each of `ids` from `start` on, and how many there are above them."""
    most = max([1, *ids])
    for place, number in enumerate(ids, start):
        axes.bar(place, 1, 1, color=colour, alpha=0.3 + 0.7 * number / most, **CELL)
    middle = start + len(ids) / 2
    label = f"{len(ids)} {name}"
    axes.text(middle, 1.1, label, ha="center", va="bottom", fontsize=9, color=colour)


def timeline(kept: Sequence[tuple], lost: Sequence[tuple], title: str = "") -> Figure:
    """What became of a recording: (start s, end s) spans that are clips, and those in no clip."""
    figure, (axes,) = _figure(8, 1.5)
    for spans, colour, label in ((kept, GREEN, "a clip"), (lost, PALE, "in no clip")):
        bars_s = [(start, end - start) for start, end in spans]
        axes.broken_barh(bars_s, (0, 1), color=colour, edgecolor="white", label=label)
    axes.set_yticks([])
    axes.set_ylim(0, 1.7)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")
    tidy(axes, "time (s)", "", title)
    return figure
