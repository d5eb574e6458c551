"""What every picture has in common: colours, axes, sharpness on a screen.

Everything is matplotlib's object-oriented interface on the Agg canvas: pyplot keeps one global
figure that a second thread corrupts. Okabe and Ito's palette, safe for the colour-blind.
"""

import io

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure of 200 dots an inch: it is shown at half that, sharp on dense screens."""
    figure = Figure((width_in, height_in), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    """`figure` as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def pixels(figure: Figure) -> np.ndarray:
    """`figure` as a picture (height, width, RGB), 0 to 255."""
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def shown_width_px(figure: Figure) -> int:
    """Half the picture's own width: sharp on dense screens."""
    return round(figure.get_figwidth() * figure.dpi / 2)


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
