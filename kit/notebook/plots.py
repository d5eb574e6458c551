"""The charts of the notebooks, each a figure of its own with units on its axes.

All is matplotlib's object-oriented interface: pyplot keeps one global figure that a second thread
corrupts. It is loaded with the first chart, so that a training process does without. No chart holds
the text of a sentence: the default font has no Ethiopic.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's, with three colours darker: the colour-blind can distinguish them all, and each
# stands out from white (WCAG 2: 3 to 1). Lines and bars of several kinds also differ in style.
PALETTE = ("#0072B2", "#D97700", "#009E73", "#C43C00", "#CC79A7", "#1998EF")
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = PALETTE
INK = "#333333"
PALE = "#8c8c8c"
GRID = "#e6e6e6"
# The second sign of a group, beside its colour.
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")
HATCHES = ("", "////", "....", "xxxx")
GIB = 2**30
# On white and on a dark page (#111111) its contrast is above 4 to 1. The ink of pictures that hold
# an image: they are transparent, and look the same in every theme.
NEUTRAL = "#767676"
# A dark theme of JupyterLab, Colab or VS Code turns a chart's white into the page's black, and
# keeps its hues. Anywhere else charts stay dark on white.
DARK_THEMES = ("[data-jp-theme-light=false]", "[theme=dark]", ".vscode-dark")
_CHARTS = ",".join(f"{theme} .kit-chart" for theme in DARK_THEMES)
_PLAYERS = ",".join(f"{theme} audio" for theme in DARK_THEMES)
THEME_STYLE = (
    f"<style>{_CHARTS}{{filter:invert(.93) hue-rotate(180deg)}}"
    f"{_PLAYERS}{{color-scheme:dark}}</style>"
)


def new_figure(
    width_in: float, height_in: float, dpi: int = 200, layout: str = "constrained"
) -> Figure:
    """An empty figure; one of 200 dots an inch is shown at half that, sharp on dense screens."""
    from matplotlib.figure import Figure

    return Figure((width_in, height_in), dpi=dpi, layout=layout)


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    if has_image(figure):
        _neutral_ink(figure)
    figure.savefig(buffer, format="png", transparent=has_image(figure))
    return buffer.getvalue()


def has_image(figure: Figure) -> bool:
    """Whether it holds a spectrogram or another image, whose colours no theme may turn round."""
    return any(axes.images for axes in figure.axes)


def _neutral_ink(figure: Figure) -> None:
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.tick_params(labelcolor=NEUTRAL)
    for text in figure.findobj(Text):
        text.set_color(NEUTRAL)


def tidy(axes, xlabel: str = "", ylabel: str = "", title: str = "") -> None:
    """One look for all: no frame on top and right, small grey ticks, ink-coloured labels."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(PALE)
    axes.tick_params(labelsize=9, color=PALE, labelcolor=INK)
    axes.set_axisbelow(True)
    axes.set_xlabel(xlabel, fontsize=10, color=INK)
    axes.set_ylabel(ylabel, fontsize=10, color=INK)
    axes.set_title(title, fontsize=11, color=INK, loc="left")


def number_text(number: float) -> str:
    """Two digits, and all of a number that has more before its point."""
    return f"{number:,.0f}" if abs(number) >= 99.5 else f"{number:.2g}"


def show(figure: Figure) -> None:
    """Display `figure` anywhere in a cell: made without pyplot, it has no picture of its own."""
    import IPython.display

    # The plain PNG is for programs that show no HTML.
    data = base64.b64encode(png(figure)).decode()
    drawn = f"{THEME_STYLE}{picture_html(figure)}"
    views = {"text/plain": describe(figure), "text/html": drawn, "image/png": data}
    IPython.display.display(views, raw=True)


def picture_html(picture: Figure, lines: Sequence[str] = ()) -> str:
    """`picture` as an image that is sharp on dense screens and never wider than the cell.

    Read aloud, it is its description and `lines`, which are HTML. THEME_STYLE goes with it.
    """
    words = ". ".join(filter(None, [html.escape(describe(picture)), *lines]))
    words = words.replace("\n", " ").replace("'", "&#x27;")
    data = base64.b64encode(png(picture)).decode()
    width_px = round(picture.get_figwidth() * picture.dpi / 2)
    kind = "image" if has_image(picture) else "chart"
    size = f"class='kit-{kind}' style='max-width:100%' width={width_px}"
    return f"<img {size} alt='{words}' src='data:image/png;base64,{data}'>"


def describe(figure: Figure) -> str:
    """What `figure` shows, to be read aloud: titles, axes, names of lines, and bars with values."""
    parts = [", ".join(text.get_text() for text in figure.texts)]
    for axes in figure.axes:
        parts.append(axes.get_title(loc="left"))
        bar_names = [label.get_text() for label in axes.get_yticklabels()]
        bar_values = [text.get_text() for text in axes.texts]
        if bar_values and len(bar_names) == len(bar_values):
            bars_read = [f"{name} {value}" for name, value in zip(bar_names, bar_values)]
            parts.append(", ".join(bars_read))
        parts.append(" by ".join(filter(None, [axes.get_ylabel(), axes.get_xlabel()])))
        if axes.get_legend():
            names = [text.get_text() for text in axes.get_legend().get_texts()]
            parts.append(f"Shown: {', '.join(names)}")
    return ". ".join(filter(None, parts))


def histogram(groups: dict, marks: dict[str, Sequence[float]] | None = None) -> Figure:
    """How each of `groups`, numbers by name, is spread, on axes of its own; the median is marked.

    `marks` are lists of values to draw a thin line at, by name.
    """
    figure = new_figure(8, 2.6)
    all_axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, (name, numbers), colour in zip(all_axes, groups.items(), PALETTE * 9):
        numbers = np.asarray(numbers, dtype=float)
        middle = float(np.median(numbers)) if len(numbers) else math.nan
        axes.hist(numbers, bins=40, color=colour, edgecolor="white", linewidth=0.3)
        axes.axvline(middle, color=INK, linewidth=1, linestyle="--")
        for mark in (marks or {}).get(name, ()):
            axes.axvline(mark, color=PALE, linewidth=0.8, linestyle=":")
        title = f"{name}\nmedian {middle:.3g}, n = {len(numbers):,}"
        tidy(axes, "", "count", title)
    return figure


def bars(
    names: Sequence[str],
    values: Iterable[float] | dict[str, Iterable[float]],
    unit: str = "",
    title: str = "",
    errors: Sequence[float] = (),
) -> Figure:
    """Horizontal bars from the top down, each with its value; a missing one (None, NaN) says so.

    A dict group -> values gives each name a bar of every group. `errors` are drawn to both sides of
    the bars' ends.
    """
    groups = values if isinstance(values, dict) else {"": values}
    figure = new_figure(8, 0.7 + (0.14 + 0.19 * len(groups)) * max(len(names), 1))
    axes = figure.subplots()
    height = 0.8 / len(groups)
    numbers = np.array([list(group) for group in groups.values()], dtype=float)
    lengths = np.nan_to_num(numbers)
    errors = np.array(errors or [0.0] * len(names))
    widest = max(np.abs(lengths).max(initial=0.0), (lengths + errors).max(initial=0.0)) or 1.0
    whiskers = {"xerr": errors, "error_kw": {"ecolor": INK, "capsize": 3}} if any(errors) else {}
    looks = zip(PALETTE * 9, HATCHES * 9)
    for number, (group, (colour, hatch)) in enumerate(zip(groups, looks)):
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0, **whiskers}
        places = [i + (number + 0.5) * height - 0.4 for i in range(len(names))]
        axes.barh(places, lengths[number], height=0.9 * height, label=group, **look)
        ends = np.maximum(lengths[number], 0.0) + errors
        for place, value, end in zip(places, numbers[number], ends):
            text = "not measured" if math.isnan(value) else number_text(value)
            _value(axes, text, end, place, widest)
    _names(axes, names, widest)
    axes.set_xlim(left=1.1 * lengths.min(initial=0.0))
    if len(groups) > 1:
        beside_title = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(groups)}
        axes.legend(frameon=False, fontsize=9, **beside_title)
    tidy(axes, unit, "", title)
    return figure


def _value(axes, text: str, bar_end: float, place: float, widest: float) -> None:
    axes.text(bar_end + 0.01 * widest, place, text, va="center", fontsize=9, color=INK)


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

    The parts, bytes by name, are each at their largest, and not all there at once: together they
    are more than the peak. `measured_bytes` is that of a real step, None where none was taken.
    """
    parts = {name: size for name, size in parts.items() if size}
    figure = new_figure(8, 1.9 + 0.3 * len(parts))
    device, own = figure.subplots(2, height_ratios=(1, 0.45 * len(parts)))
    device.barh(0, device_bytes / GIB, color=GRID, height=0.7, label="device")
    device.barh(0, peak_bytes / GIB, color=BLUE, height=0.7, label="planned")
    if measured_bytes is not None:
        device.barh(0, measured_bytes / GIB, color=ORANGE, height=0.25, label="measured")
    device.axvline(limit_bytes / GIB, color=RED, linestyle="--", linewidth=1.4, label="may use")
    device.set_yticks([])
    device.legend(frameon=False, fontsize=8, ncols=4, loc="upper right", bbox_to_anchor=(1, -0.3))
    tidy(device, "", "", title)
    device.set_xlabel("GiB", fontsize=10, color=INK, loc="left")
    unit, unit_bytes = ("GiB", GIB) if peak_bytes >= GIB else ("MiB", 2**20)
    sizes = [size / unit_bytes for size in parts.values()]
    own.barh(range(len(parts)), sizes, color=BLUE, height=0.65)
    for place, size in enumerate(sizes):
        _value(own, number_text(size), size, place, max(sizes))
    _names(own, list(parts), max(sizes))
    tidy(own, f"{unit}, each part at its largest")
    return figure


def heatmaps(
    maps: dict[str, np.ndarray], xlabel: str, ylabel: str, low: float = 0.0, width: float = 1.0
) -> Figure:
    """Grids (ys, xs) of numbers by name, one picture each, on one colour scale from `low` up.

    A column is `width` wide.
    """
    highest = max(float(grid.max()) for grid in maps.values())
    columns = min(4, len(maps))
    rows = math.ceil(len(maps) / columns)
    figure = new_figure(max(4.0, 2.8 * columns), 2.4 * rows)
    all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in all_axes[len(maps) :]:
        axes.set_axis_off()
    look = {"origin": "lower", "aspect": "auto", "cmap": "magma", "vmin": low, "vmax": highest}
    for place, (axes, (name, grid)) in enumerate(zip(all_axes, maps.items())):
        axes.imshow(grid, extent=(0, width * grid.shape[1], 0, grid.shape[0]), **look)
        last = place + columns >= len(maps)
        tidy(axes, xlabel if last else "", "" if place % columns else ylabel, name)
    return figure


def mel_picture(waves: dict, sample_rate: int, front_end) -> Figure:
    """Log-mel spectrograms by `front_end`, a Mel, of `waves` (L,) by name, side by side."""
    mels = {name: front_end.clip_mel(wave, sample_rate).numpy() for name, wave in waves.items()}
    low = min(float(np.quantile(mel, 0.02)) for mel in mels.values())
    return heatmaps(mels, "time (s)", "mel band", low, 1 / front_end.config.frames_per_s)


def curves(lines: dict[str, tuple], xlabel: str, ylabel: str, title: str = "") -> Figure:
    """Lines by name, each `(xs, ys)`, with dots where there are few points."""
    figure = new_figure(8, 3.0)
    axes = figure.subplots()
    looks = zip(PALETTE * 9, LINES * 9, MARKERS * 9)
    for (name, (xs, ys)), (colour, line, marker) in zip(lines.items(), looks):
        look = {"color": colour, "linestyle": line, "linewidth": 1.6}
        if len(xs) <= 30:
            look |= {"marker": marker, "markersize": 4}
        axes.plot(xs, ys, label=name, **look)
    if all(float(x).is_integer() for xs, _ in lines.values() for x in xs):
        axes.locator_params("x", integer=True)
    axes.grid(color=GRID, linewidth=0.8)
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=9)
    tidy(axes, xlabel, ylabel, title)
    return figure


CELL = {"align": "edge", "edgecolor": "white", "linewidth": 0.4}  # of a token


def training_row(text: Sequence[int], codes: Sequence[int], mel: np.ndarray) -> Figure:
    """One row as the model reads it, a cell a token, and the log-mel (M, T) below its codes.

    `START text STOP START codes STOP STOP STOP`; equal ids of one kind have equal shades.
    """
    figure = new_figure(8, 2.9)
    row, sound = figure.subplots(2, sharex=True, height_ratios=(1, 3))
    text_end = 1 + len(text)
    code_start = text_end + 2
    code_end = code_start + len(codes)
    row.bar([0, text_end, text_end + 1, *range(code_end, code_end + 3)], 1, 1, color=PALE, **CELL)
    _tokens(row, text, 1, BLUE, "text pieces")
    _tokens(row, codes, code_start, ORANGE, "codes")
    row.set_ylim(0, 1.6)
    row.set_axis_off()
    extent = (code_start, code_end, 0, mel.shape[0])
    sound.imshow(mel, origin="lower", aspect="auto", cmap="magma", extent=extent)
    sound.set_xlim(0, code_end + 3)
    tidy(sound, "token of the row (grey: START and STOP)", "mel band")
    return figure


def _tokens(axes, ids: Sequence[int], start: int, colour: str, name: str) -> None:
    highest = max([1, *ids])
    for place, number in enumerate(ids, start):
        axes.bar(place, 1, 1, color=colour, alpha=0.3 + 0.7 * number / highest, **CELL)
    look = {"ha": "center", "va": "bottom", "fontsize": 9, "color": INK}
    axes.text(start + len(ids) / 2, 1.1, f"{len(ids)} {name}", **look)


def padding_picture(batches: dict[str, Sequence], lengths: Sequence[int]) -> Figure:
    """The first batches (lists of indices into `lengths`) of each way to form them, an example a
    line: its tokens, and the padding up to the longest of its batch. A title has the share of all.
    """
    figure = new_figure(8, 3.2)
    all_axes = figure.subplots(1, len(batches), sharex=True, squeeze=False)[0]
    for axes, (name, own) in zip(all_axes, batches.items()):
        longest = [max(lengths[i] for i in batch) for batch in own]
        padded = sum(each * len(batch) for each, batch in zip(longest, own))
        wasted = 1 - sum(lengths[i] for batch in own for i in batch) / padded
        rows = [(i, each) for each, batch in zip(longest, own) for i in batch][:64]
        look = {"height": 1.0, "linewidth": 0}
        axes.barh(range(len(rows)), [each for _, each in rows], color=ORANGE, **look)
        axes.barh(range(len(rows)), [lengths[i] for i, _ in rows], color=BLUE, **look)
        axes.invert_yaxis()
        tidy(axes, "tokens", "example", f"{name}: {wasted:.1%} padding")
    return figure


def timeline(kept: Sequence[tuple], lost: Sequence[tuple], title: str = "") -> Figure:
    """What became of a recording: (start s, end s) spans that are clips, and those in no clip."""
    figure = new_figure(8, 1.5)
    axes = figure.subplots()
    kinds = ((kept, GREEN, "", "a clip"), (lost, PALE, "////", "in no clip"))
    for spans, colour, hatch, label in kinds:
        bars_s = [(start, end - start) for start, end in spans]
        look = {"facecolor": colour, "edgecolor": "white", "hatch": hatch, "label": label}
        axes.broken_barh(bars_s, (0, 1), **look)
    axes.set_yticks([])
    axes.set_ylim(0, 1.7)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")
    tidy(axes, "time (s)", "", title)
    return figure
