"""Draw the diagram at the head of each notebook: `python tests/tools/diagrams.py [02_train ...]`.

A diagram is boxes and arrows on a transparent ground, so that it suits a light and a dark page. It
is attached to the notebook's first cell, which shows it as `attachment:diagram.png`.
"""

import base64
import io
import sys
from pathlib import Path

import nbformat
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
GRAY, BLUE, ORANGE, GREEN = "#6b6b6b", "#0072b2", "#b45f06", "#00735c"  # white text is legible
WIDTH, DPI = 10, 100  # inches; a notebook shows 1,000 pixels


def canvas(height: float) -> tuple[Figure, Axes]:
    """Axes over the whole figure, in units of an inch: x 0 to 10, y 0 to `height` upwards."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color=GRAY) -> None:
    """A box with its lower left corner at (x, y)."""
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, color=color, lw=0))
    middle = (x + width / 2, y + height / 2)
    axes.text(*middle, text, ha="center", va="center", color="white", fontsize=11)


def arrow(axes: Axes, start: tuple, end: tuple, bend: float = 0, color=GRAY) -> None:
    """An arrow between two points, curved by `bend` (-1 to 1)."""
    style = {"arrowstyle": "-|>", "mutation_scale": 14, "connectionstyle": f"arc3,rad={bend}"}
    axes.add_patch(FancyArrowPatch(start, end, color=color, lw=1.8, **style))


def note(axes: Axes, x: float, y: float, text: str, color="#8a8a8a") -> None:
    """Words beside the boxes, in a gray that can be read on white and on black."""
    axes.text(x, y, text, ha="center", va="center", color=color, fontsize=10)


def setup() -> Figure:
    """What a reader has got, and the notebooks that lead on from there."""
    figure, axes = canvas(2.75)
    rows = {
        "nothing yet": (BLUE, ["01\ndata", "02\ntrain", "03\nevaluate", "04\nspeak"]),
        "recordings\nof one voice": (GREEN, ["your_voice\nfrom a folder to a typed sentence"]),
        "a question": (
            ORANGE,
            ["05\nwhat helps here?", "06\nlong recordings", "07\nreleased models"],
        ),
    }
    for row, (have, (color, notebooks)) in enumerate(rows.items()):
        y = 1.95 - 0.92 * row
        box(axes, 0.1, y, 1.9, 0.7, have)
        width = (7.2 + 0.4) / len(notebooks) - 0.4
        for place, name in enumerate(notebooks):
            x = 2.7 + place * (width + 0.4)
            box(axes, x, y, width, 0.7, name, color)
            if place == 0:
                arrow(axes, (2.0, y + 0.35), (2.7, y + 0.35))
            elif color == BLUE:
                arrow(axes, (x - 0.4, y + 0.35), (x, y + 0.35))
    return figure


def data_prep() -> Figure:
    """From recordings and texts to batches."""
    figure, axes = canvas(2.6)
    lines = {
        "recordings": (1.65, "codec", "codes", "370 49 361 ..."),
        "texts": (0.25, "tokenizer", "tokens", "12 7 155 ..."),
    }
    for name, (y, network, numbers, example) in lines.items():
        box(axes, 0.1, y, 1.5, 0.7, name)
        arrow(axes, (1.6, y + 0.35), (2.2, y + 0.35))
        box(axes, 2.2, y, 1.5, 0.7, network, BLUE)
        arrow(axes, (3.7, y + 0.35), (4.3, y + 0.35))
        box(axes, 4.3, y, 1.7, 0.7, f"{numbers}\n{example}", GREEN)
        arrow(axes, (6.0, y + 0.35), (6.6, 1.3))
    arrow(axes, (0.6, 1.65), (0.6, 0.95))
    arrow(axes, (0.6, 0.95), (0.6, 1.65))
    note(axes, 1.55, 1.3, "do they match?")
    box(axes, 6.6, 0.95, 1.4, 0.7, "on disk", GREEN)
    arrow(axes, (8.0, 1.3), (8.5, 1.3))
    box(axes, 8.5, 0.95, 1.4, 0.7, "batches", ORANGE)
    note(axes, 8.3, 0.45, "shuffled, similar lengths,\nresumed exactly")
    return figure


# notebook: a function that draws its figure
DIAGRAMS = {
    "00_setup": setup,
    "01_data_prep": data_prep,
}


def attach(name: str, figure: Figure) -> None:
    """Replace the attachments of the notebook's first cell by the picture of `figure`."""
    png = io.BytesIO()
    figure.savefig(png, format="png", transparent=True)
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    data = base64.b64encode(png.getvalue()).decode()
    notebook.cells[0].attachments = {"diagram.png": {"image/png": data}}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or DIAGRAMS:
        attach(name, DIAGRAMS[name]())
