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


def more_data() -> Figure:
    """An hour of radio becomes clips: windows, words with times, cuts at pauses, what is left."""
    figure, axes = canvas(3.9)
    left, right, height = 2.3, 9.9, 0.5
    labels = ("a long recording\nand its transcript", "read in windows", "each word gets a time")
    labels += ("cut at pauses\ninto clips", "what is left\nis listed")
    rows = [3.25, 2.5, 1.75, 1.0, 0.25]
    for y, label in zip(rows, labels):
        note(axes, 1.1, y + height / 2, label)
    box(axes, left, rows[0], right - left, height, "radio.wav  +  radio.txt")
    width = (right - left) / 3
    for number in range(3):
        x = left + number * width
        box(axes, x, rows[1], width - 0.08, height, f"window {number + 1}", BLUE)
    words = {"here": 0.1, "is": 0.72, "the": 1.34, "radio": 2.6, "news": 3.22, "of": 3.84}
    words |= {"day": 5.2, "one": 5.82, "hello": 6.44}
    for word, start in words.items():
        box(axes, left + start, rows[2], 0.58, height, word, BLUE)
    for name, start, end in (("1", 0.05, 1.97), ("2", 2.55, 4.47), ("3", 5.15, 7.07)):
        box(axes, left + start, rows[3], end - start, height, f"clip {name}", GREEN)
    for reason, start, end in (("pause", 1.97, 2.55), ("music", 4.47, 5.15), ("noise", 7.07, 7.6)):
        box(axes, left + start + 0.03, rows[4], end - start - 0.06, height, "", ORANGE)
        note(axes, left + start - 0.35, rows[4] + height / 2, reason)
    for y in rows[:3]:
        arrow(axes, (1.1, y + 0.02), (1.1, y - 0.18))
    return figure


def finetuning() -> Figure:
    """The parts of a base model: what stays, what learns, and where new tokens go."""
    figure, axes = canvas(3.9)
    box(axes, 0.1, 2.9, 1.9, 0.7, "reference encoder", GRAY)
    box(axes, 0.1, 1.95, 1.9, 0.7, "rows of the old tokens", GRAY)
    box(axes, 0.1, 1.35, 1.9, 0.55, "new ones after them", ORANGE)
    box(axes, 0.1, 0.4, 1.9, 0.7, "codec: sound to codes", GRAY)
    box(axes, 3.0, 0.6, 3.3, 2.9, "", BLUE)
    box(axes, 3.2, 1.95, 2.9, 1.1, "its weights", GRAY)
    box(axes, 3.2, 0.8, 2.9, 0.9, "adapters: small matrices\nbeside them", ORANGE)
    axes.text(
        4.65, 3.28, "each layer of the GPT", ha="center", va="center", color="white", fontsize=11
    )
    box(axes, 7.3, 1.95, 2.5, 0.7, "rows of the codes", GRAY)
    box(axes, 7.3, 0.6, 2.5, 0.7, "vocoder: codes to sound", GRAY)
    for y in (3.25, 2.05, 0.75):
        arrow(axes, (2.05, y), (2.95, y))
    arrow(axes, (6.35, 2.3), (7.25, 2.3))
    arrow(axes, (8.55, 1.9), (8.55, 1.35))
    box(axes, 6.7, 3.45, 0.25, 0.25, "", GRAY)
    note(axes, 7.85, 3.57, "frozen: stays as it is")
    box(axes, 6.7, 3.1, 0.25, 0.25, "", ORANGE)
    note(axes, 7.35, 3.22, "learns")
    return figure


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


def your_voice() -> Figure:
    """Recordings, a report, one of two ways, training, and what comes out."""
    figure, axes = canvas(1.9)
    box(axes, 0.1, 0.6, 1.5, 0.7, "your\nrecordings")
    box(axes, 2.1, 0.6, 1.3, 0.7, "report")
    box(axes, 4.0, 1.1, 1.7, 0.65, "from scratch", BLUE)
    box(axes, 4.0, 0.15, 1.7, 0.65, "from XTTS-v2", BLUE)
    box(axes, 6.3, 0.6, 1.3, 0.7, "training", ORANGE)
    box(axes, 8.2, 1.1, 1.7, 0.65, "a sentence\nyou type", GREEN)
    box(axes, 8.2, 0.15, 1.7, 0.65, "a zip", GREEN)
    arrow(axes, (1.62, 0.95), (2.08, 0.95))
    arrow(axes, (3.42, 1.05), (3.98, 1.4))
    arrow(axes, (3.42, 0.85), (3.98, 0.5))
    arrow(axes, (5.72, 1.4), (6.28, 1.05))
    arrow(axes, (5.72, 0.5), (6.28, 0.85))
    arrow(axes, (7.62, 1.05), (8.18, 1.4))
    arrow(axes, (7.62, 0.85), (8.18, 0.5))
    note(axes, 4.85, 0.96, "one of two ways")
    return figure


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


DIAGRAMS = {  # notebook: a function that draws its figure
    "00_setup": setup,
    "01_data_prep": data_prep,
    "02_train": training_loop,
    "03_evaluate_ema": evaluation,
    "04_inference": inference,
    "05_benchmark": benchmark,
    "06_more_data": more_data,
    "07_finetune_xtts": finetuning,
    "your_voice": your_voice,
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
