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


def inference() -> Figure:
    """Keys and values are kept; only the newest code is computed."""
    figure, axes = canvas(2.6)
    names = ("speaker", "text", "code 1", "code 2", "code 3")
    for place, name in enumerate(names):
        newest = place == len(names) - 1
        x = 0.2 + 1.6 * place
        box(axes, x, 0.25, 1.4, 0.5, name, ORANGE if newest else GRAY)
        box(axes, x, 1.15, 1.4, 0.5, "key, value", ORANGE if newest else BLUE)
        arrow(axes, (x + 0.7, 0.77), (x + 0.7, 1.13), color=ORANGE if newest else GRAY)
    box(axes, 8.4, 1.15, 1.4, 0.5, "code 4", GREEN)
    arrow(axes, (8.02, 1.4), (8.38, 1.4), color=GREEN)
    note(axes, 3.3, 1.95, "the cache: computed once, kept")
    note(axes, 7.3, 1.95, "a step computes only this")
    note(axes, 5.0, 2.35, "code 3 looks back at all keys and values, and the model chooses code 4")
    return figure


DIAGRAMS = {  # notebook: a function that draws its figure
    "04_inference": inference,
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
