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


def training_loop() -> Figure:
    """The steps of the loop in 02, and below each the switches that change it."""
    figure, axes = canvas(2.6)
    steps = {
        "batch": ("Micro-batch", GRAY),
        "forward\npass": ("Fused attention\nMixed precision\ntorch.compile", BLUE),
        "loss": ("Loss scaling\n(fp16)", BLUE),
        "backward\npass": ("Gradient\ncheckpointing", ORANGE),
        "step": ("Fused AdamW", GREEN),
        "average": ("EMA of\nthe weights", GREEN),
    }
    for number, (name, (switches, color)) in enumerate(steps.items()):
        x = 0.15 + 1.66 * number
        box(axes, x, 1.15, 1.3, 0.7, name, color)
        note(axes, x + 0.65, 0.6, switches)
        if number:
            arrow(axes, (x - 0.34, 1.5), (x - 0.02, 1.5))
    arrow(axes, (7.44, 1.9), (0.8, 1.9), bend=0.08)
    note(axes, 4.12, 2.42, "the next batch")
    return figure


DIAGRAMS = {"02_train": training_loop}  # notebook: a function that draws its figure


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
