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


def evaluation() -> Figure:
    """03: what goes through the recogniser, and what its transcripts are compared with."""
    figure, axes = canvas(2.9)
    box(axes, 0.2, 2.1, 1.6, 0.6, "recording", GREEN)
    arrow(axes, (1.8, 2.4), (5.3, 1.75))
    note(axes, 3.9, 2.35, "noise floor")
    arrow(axes, (1.0, 2.1), (1.0, 1.75))
    box(axes, 0.2, 1.15, 1.6, 0.6, "codec", GREEN)
    arrow(axes, (1.8, 1.45), (5.3, 1.45))
    note(axes, 3.9, 1.65, "guide")
    box(axes, 0.2, 0.2, 1.6, 0.6, "text", ORANGE)
    arrow(axes, (1.8, 0.5), (2.3, 0.5))
    box(axes, 2.3, 0.2, 1.9, 0.6, "voice: raw, EMA", BLUE)
    arrow(axes, (4.2, 0.5), (5.3, 1.15))
    box(axes, 5.3, 1.15, 1.5, 0.6, "recogniser")
    arrow(axes, (6.8, 1.45), (7.3, 1.45))
    box(axes, 7.3, 1.15, 1.4, 0.6, "transcript")
    arrow(axes, (8.7, 1.45), (9.1, 1.45))
    box(axes, 9.1, 1.15, 0.7, 0.6, "CER", ORANGE)
    axes.plot((1.0, 1.0, 9.45), (0.2, 0.06, 0.06), color=GRAY, lw=1.8)
    arrow(axes, (9.45, 0.06), (9.45, 1.15))
    note(axes, 7.0, 0.25, "wrong letters, beside the text")
    return figure


def benchmark() -> Figure:
    """05: the two limits of a matmul, and what decides which of them is felt."""
    figure, axes = canvas(2.2)
    box(axes, 0.2, 0.7, 1.9, 0.9, "memory:\nweights", GREEN)
    arrow(axes, (2.1, 1.15), (4.6, 1.15))
    note(axes, 3.35, 1.45, "bandwidth: bytes a second")
    box(axes, 4.6, 0.7, 1.9, 0.9, "arithmetic units", BLUE)
    note(axes, 5.55, 1.85, "compute speed: FLOP a second")
    arrow(axes, (6.5, 1.15), (7.9, 1.15))
    box(axes, 7.9, 0.7, 1.9, 0.9, "result", ORANGE)
    note(axes, 3.35, 0.35, "one column: the units wait for bytes")
    note(axes, 7.4, 0.35, "many columns: the bytes wait for the units")
    return figure


DIAGRAMS = {"03_evaluate_ema": evaluation, "05_benchmark": benchmark}  # draws a notebook's figure


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
