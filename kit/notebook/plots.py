"""The charts of the notebooks, each a figure of its own with units on its axes.

None holds the text of a sentence, for the default font has no Ethiopic. The curves of a run
are in run_plots.py.
"""

import math
from collections.abc import Iterable, Sequence

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
    PALETTE,
    RED,
    new_figure,
    png,
    shown_width_px,
    tidy,
)

HEATMAP_COLUMNS = 4
CELL = {"align": "edge", "edgecolor": "white", "linewidth": 0.4}  # of a token


def show(figure: Figure) -> None:
    """Display `figure` in the notebook, sharp on dense screens, wherever in a cell.

    A Figure made without pyplot has no picture of its own in a notebook: only its repr.
    """
    import IPython.display

    image = IPython.display.Image(data=png(figure), format="png", width=shown_width_px(figure))
    IPython.display.display(image)


def histogram(
    values,
    label: str = "",
    unit: str = "",
    bins: int = 40,
    marks: dict[str, Sequence[float]] | None = None,
) -> Figure:
    """How `values` are spread; the median is marked. A dict name -> values gives one axes each.

    `marks` are values to draw a thin line at, by name.
    """
    groups = values if isinstance(values, dict) else {label: values}
    figure = new_figure(8, 2.6)
    all_axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, (name, numbers), colour in zip(all_axes, groups.items(), PALETTE * 9):
        numbers = np.asarray(numbers, dtype=float)
        middle = float(np.median(numbers)) if len(numbers) else math.nan
        axes.hist(numbers, bins=bins, color=colour, edgecolor="white", linewidth=0.3)
        axes.axvline(middle, color=INK, linewidth=1, linestyle="--")
        for mark in (marks or {}).get(name, ()):
            axes.axvline(mark, color=PALE, linewidth=0.8, linestyle=":")
        extra = f"median {middle:.3g} {unit}".strip() + f", n = {len(numbers):,}"
        # Side by side there is no room for both on one line.
        title = f"{name}  ({extra})" if len(groups) == 1 else f"{name}\n{extra}"
        tidy(axes, unit, "count", title)
    return figure


def bars(names: Sequence[str], values: Iterable[float], unit: str = "", title: str = "") -> Figure:
    """Horizontal bars from the top down, each with its value; a missing one (None, NaN) says so."""
    numbers = [math.nan if v is None else float(v) for v in values]
    figure = new_figure(8, 0.7 + 0.33 * max(len(numbers), 1))
    axes = figure.subplots()
    lengths = np.nan_to_num(numbers)
    axes.barh(range(len(numbers)), lengths, color=BLUE, height=0.65)
    widest = max(map(abs, lengths), default=1.0) or 1.0
    for place, number in enumerate(numbers):
        text = "not measured" if math.isnan(number) else f"{number:,.4g}"
        _value(axes, text, max(lengths[place], 0.0), place, widest)
    _names(axes, names, widest)
    axes.set_xlim(left=min([0.0, *lengths]) * 1.1)
    tidy(axes, unit, "", title)
    return figure


def _value(axes, text: str, end: float, place: float, widest: float) -> None:
    """`text` behind a horizontal bar that ends at `end`."""
    axes.text(end + 0.01 * widest, place, text, va="center", fontsize=9, color=INK)


def _names(axes, names: Sequence[str], widest: float) -> None:
    """Names beside horizontal bars, from the top down, with room for their values."""
    axes.set_yticks(range(len(names)), list(names))
    axes.invert_yaxis()
    axes.set_xlim(0, widest * 1.14)
    axes.tick_params(axis="y", length=0)


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
    figure = new_figure(8, 1.9 + 0.3 * len(parts))
    heights = {"height_ratios": (1, 0.45 * len(parts))}
    device, own = figure.subplots(2, 1, gridspec_kw=heights)
    device.barh(0, device_bytes / GIB, color=GRID, height=0.7, label="device")
    device.barh(0, peak_bytes / GIB, color=BLUE, height=0.7, label="planned")
    if measured_bytes is not None:
        device.barh(0, measured_bytes / GIB, color=ORANGE, height=0.25, label="measured")
    device.axvline(limit_bytes / GIB, color=RED, linestyle="--", linewidth=1.4, label="may use")
    device.set_yticks([])
    device.legend(frameon=False, fontsize=8, ncols=4, loc="upper right", bbox_to_anchor=(1, -0.3))
    tidy(device, "", "", title)
    device.set_xlabel("GiB", fontsize=10, color=INK, loc="left")
    unit = "GiB" if peak_bytes >= GIB else "MiB"
    unit_bytes = GIB if unit == "GiB" else 2**20
    sizes = [size / unit_bytes for size in parts.values()]
    own.barh(range(len(parts)), sizes, color=BLUE, height=0.65)
    for place, size in enumerate(sizes):
        _value(own, f"{size:,.3g}", size, place, max(sizes))
    _names(own, list(parts), max(sizes))
    tidy(own, f"{unit}, each part at its largest")
    return figure


def heatmaps(maps: dict[str, np.ndarray], xlabel: str, ylabel: str) -> Figure:
    """Grids (ys, xs) of numbers from 0 up by name, one picture each, on one colour scale."""
    highest = max(float(grid.max()) for grid in maps.values())
    lines = math.ceil(len(maps) / HEATMAP_COLUMNS)
    columns = min(HEATMAP_COLUMNS, len(maps))
    figure = new_figure(max(4.0, 2.6 * columns), 2.4 * lines)
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
    figure = new_figure(8, 0.9 + (0.12 + 0.19 * len(groups)) * max(len(names), 1))
    axes = figure.subplots()
    height = 0.8 / len(groups)
    widest = max((v for values in groups.values() for v in values), default=1.0) or 1.0
    for number, ((group, values), colour) in enumerate(zip(groups.items(), PALETTE * 9)):
        places = [i + (number + 0.5) * height - 0.4 for i in range(len(names))]
        axes.barh(places, values, color=colour, height=0.9 * height, label=group)
        for place, value in zip(places, values):
            _value(axes, f"{value:,.4g}", value, place, widest)
    _names(axes, names, widest)
    beside_title = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(groups)}
    axes.legend(frameon=False, fontsize=9, **beside_title)
    tidy(axes, unit, "", title)
    return figure


def spectrograms(mels: dict[str, np.ndarray], frame_rate: float | None = None) -> Figure:
    """Log-mels (M, T) side by side on one colour scale; time in seconds given frames per second."""
    arrays = {name: np.asarray(mel, dtype=float) for name, mel in mels.items()}
    figure = new_figure(max(4.0, 3.2 * len(arrays)), 2.4)
    all_axes = figure.subplots(1, len(arrays), squeeze=False)[0]
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
    figure = new_figure(8, 3.0)
    axes = figure.subplots()
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


def training_row(text: Sequence[int], codes: Sequence[int], mel: np.ndarray) -> Figure:
    """One row as the model reads it, a cell a token, and the log-mel (M, T) below its codes.

    `START text STOP START codes STOP STOP STOP`; equal ids of one kind have equal shades.
    """
    figure = new_figure(8, 2.9)
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
    figure = new_figure(8, 1.5)
    axes = figure.subplots()
    for spans, colour, label in ((kept, GREEN, "a clip"), (lost, PALE, "in no clip")):
        bars_s = [(start, end - start) for start, end in spans]
        axes.broken_barh(bars_s, (0, 1), color=colour, edgecolor="white", label=label)
    axes.set_yticks([])
    axes.set_ylim(0, 1.7)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")
    tidy(axes, "time (s)", "", title)
    return figure
