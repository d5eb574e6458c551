"""Pictures that are pictures, whatever the rows; ticks where something happened."""

import base64
import html
import io
import itertools
import re

import numpy as np
import pytest
from PIL import Image

from kit.notebook import plots
from kit.notebook.plots import png, run_curves, smooth, thin
from kit.notebook.result import Result


def row(step: int, **more) -> dict:
    fixed = {"step": step, "steps": 1000, "loss": 8 / step, "lr": 1e-3, "memory_bytes": 2**30}
    return fixed | {"val_loss": None, "ema_val_loss": None, "note": ""} | more


def size(data: bytes) -> tuple[int, int]:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image.size


def test_thinning_keeps_what_matters_and_smoothing_is_the_mean_of_finite_neighbours():
    rows = [row(s) for s in range(1, 5001)]
    rows[1233]["val_loss"], rows[3332]["note"] = 2.0, "resumed"
    kept = {r["step"] for r in thin(rows, 400)}
    assert {1, 1234, 3333, 5000} <= kept
    assert len(kept) <= 404
    values = np.array([1.0, 2, np.nan, 4, 5])
    np.testing.assert_allclose(smooth(values, 1), [1.5, 1.5, 3, 4.5, 4.5])
    np.testing.assert_array_equal(smooth(values, 0), values)


def test_small_charts_are_pictures():
    rng = np.random.default_rng(0)
    for chart in (
        plots.histogram(rng.random(100), "length", "s"),
        plots.histogram({"length": rng.random(100), "letters": rng.random(9)}),
        plots.bars(["baseline", "SDPA", "compile"], [1.0, 1.5, None], "steps/s", "Speed"),
        plots.curves({"raw": ([1, 2], [3, 2]), "EMA": ([1, 2], [3, 1])}, "step", "loss (nats)"),
        plots.timeline([], [(2.0, 2.5)], "talk.wav"),
        plots.timeline([(0.0, 2.0), (2.5, 4.0)], [(2.0, 2.5)], "talk.wav"),
    ):
        width, height = size(png(chart))
        assert width > 600 and height > 200


@pytest.mark.long
def test_the_curves_of_a_run_are_a_picture_whatever_the_rows():
    many = [row(s, val_loss=1.0 if s % 50 == 0 else None) for s in range(1, 900)]
    skipped = row(1, loss=None, memory_bytes=0, lr=0.0, note="skipped")
    for rows in ([], [row(1)], [skipped], [{"step": 3}], many):
        assert size(png(run_curves(rows)))[0] == 1600
        assert size(png(run_curves(rows, live=True))) == (1001, 506)


def test_the_curves_of_a_run_show_averaging_memory_and_load():
    rows = [row(s, val_loss=2.0, ema_val_loss=1.5 + s, grad_norm=1.0) for s in (1, 2)]
    loss, *_, ratio = run_curves(rows).axes
    assert list(ratio.lines[0].get_ydata()) == [1.25, 1.75]
    names = [text.get_text() for text in loss.get_legend().get_texts()]
    assert names == ["training", "held out, last weights", "held out, EMA"]
    noted = run_curves([rows[0] | {"note": "skipped"}, *rows[1:]], live=True)
    assert [text.get_text() for text in noted.axes[0].get_legend().texts][-1] == "event"
    assert len(run_curves([r | {"ema_val_loss": None} for r in rows]).axes) == 4
    rows = [row(s, memory_now_bytes=2**29, load=0.5 if s % 2 else None) for s in range(1, 100)]
    assert len(run_curves([row(1)], live=True).axes) == 3
    _, memory, _, load = run_curves(rows, live=True).axes
    peak, now = (set(line.get_ydata()) for line in memory.lines)
    assert (peak, now) == ({1.0}, {0.5}) and len(load.lines[0].get_xdata()) == 50


def test_bars_say_what_was_not_measured_and_have_their_errors_at_their_ends():
    texts = [t.get_text() for t in plots.bars(["a", "b"], [2, None]).axes[0].texts]
    assert texts == ["2", "not measured"]
    axes = plots.bars(["a", "b"], [2.0, 1.0], errors=[0.5, 0.0]).axes[0]
    (whiskers,) = axes.collections
    start, end = whiskers.get_segments()[0]
    assert (start[0], end[0]) == (1.5, 2.5) and axes.get_xlim()[1] > 2.5


def test_show_displays_a_picture_anywhere_in_a_cell(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda views, raw: shown.append(views))
    plots.show(plots.bars(["a"], [1.0]))
    (views,) = shown
    assert size(base64.b64decode(views["image/png"]))[0] == 1600
    assert "width=800 alt='a 1'" in views["text/html"] and views["text/plain"] == "a 1"


def test_a_training_row_has_a_cell_for_each_token_and_its_sound_below_the_codes():
    text, codes = [5, 0, 7], [3] * 10
    row, sound = plots.training_row(text, codes, np.zeros((80, 20))).axes
    assert len(row.patches) == len(text) + len(codes) + 6
    assert [label.get_text() for label in row.texts] == ["3 text pieces", "10 codes"]
    assert sound.images[0].get_extent() == [6, 16, 0, 80]  # STOP and START lie before the codes
    assert sound.get_xlim() == (0, 19)


@pytest.mark.parametrize("measured", [None, 3 * 2**30])
def test_a_memory_plan_shows_every_part_that_takes_something(measured):
    parts = {"weights": 2**30, "EMA": 0, "activations": 2 * 2**30}
    figure = plots.memory_bars(parts, 3 * 2**30, measured, 10 * 2**30, 16 * 2**30, "a T4")
    device, own = figure.axes
    assert [label.get_text() for label in own.get_yticklabels()] == ["weights", "activations"]
    assert [text.get_text() for text in own.texts] == ["1", "2"] and "GiB" in own.get_xlabel()
    names = [text.get_text() for text in device.get_legend().get_texts()]
    assert ("measured" in names) == (measured is not None) and "may use" in names
    assert len(png(figure)) > 1000


def test_heatmaps_share_a_colour_scale_and_no_empty_axes_are_shown():
    rng = np.random.default_rng(0)
    maps = {f"head {i}": np.full((3, 5), i / 5) for i in range(6)}
    figure = plots.heatmaps(maps, "code", "text piece")
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in shown] == list(maps)
    assert {axes.images[0].get_clim() for axes in shown} == {(0, 1.0)}
    assert shown[0].get_ylabel() == "text piece" and shown[1].get_ylabel() == ""
    mels = {"recorded": rng.random((80, 50)), "spoken": rng.random((80, 70))}
    first, second = plots.heatmaps(mels, "time (s)", "mel band", 0.1, width=0.5).axes
    assert (first.images[0].get_extent()[1], second.images[0].get_extent()[1]) == (25, 35)


def test_a_picture_of_a_result_can_be_read_aloud():
    figure = plots.bars(["a"], [1.0], title="Padding, 'grid' < 5 %")
    drawn = Result(line="5 % of <all>\nmore", pictures=[figure])._repr_html_()
    alt = re.search(r"<img [^>]*alt='([^']*)'", drawn)[1]
    assert html.unescape(alt) == "Padding, 'grid' < 5 %. a 1. 5 % of <all>"


# --- for people who see colours in another way, or no picture at all -------------------------

# Machado, Oliveira and Fernandes 2009, doi:10.1109/TVCG.2009.113: linear RGB as they see it.
SIGHT = {
    "all colours": np.eye(3),
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
WHITE, DARK = "#ffffff", "#212121"  # pictures; JupyterLab's dark theme, behind a panel


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(colour: str, background: str) -> float:
    """The contrast ratio of WCAG 2, from 1 to 21."""
    dark, light = sorted(float(XYZ[1] @ linear(each)) for each in (colour, background))
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Linear RGB -> CIELAB, in which a distance of 2 can just be seen side by side."""
    x, y, z = np.cbrt(XYZ @ rgb.clip(1e-4, 1) / (0.9505, 1, 1.0888))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_pair_of_colours_is_distinct_and_stands_out_from_the_background():
    for sight, seen in SIGHT.items():
        colours = [lab(np.array(seen) @ linear(colour)) for colour in plots.PALETTE]
        distances = [np.linalg.norm(a - b) for a, b in itertools.combinations(colours, 2)]
        assert min(distances) > 14, sight
    for colour in (*plots.PALETTE, plots.PALE):
        assert contrast(colour, WHITE) >= 3 and contrast(colour, DARK) >= 3, colour
    assert contrast(plots.INK, WHITE) > 7, "text"


def test_groups_differ_in_more_than_their_colour():
    lines = plots.curves({name: ([1, 2], [3, 1]) for name in "abcd"}, "step", "loss").axes[0].lines
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == 4
    bars = plots.grouped_bars(["x", "y"], {"a": [1, 2], "b": [2, 1]}).axes[0].containers
    assert len({container[0].get_hatch() for container in bars}) == 2
    spans = plots.timeline([(0.0, 2.0)], [(2.0, 2.5)]).axes[0].collections
    assert len({each.get_hatch() for each in spans}) == 2
    rows = [row(s, val_loss=2.0, ema_val_loss=1.5, load=0.5) for s in (1, 2)]
    losses, _, rates, *_, load = run_curves(rows, live=True).axes
    assert len({line.get_marker() for line in losses.lines[2:]}) == 2
    assert rates.lines[0].get_linestyle() != load.lines[0].get_linestyle()


def test_a_picture_is_described_for_those_who_do_not_see_it():
    figure = plots.curves({"raw": ([1, 2], [3, 2]), "EMA": ([1, 2], [3, 1])}, "step", "loss", "Run")
    assert plots.describe(figure) == "Run. loss by step. Shown: raw, EMA"
    figure = plots.bars(["SDPA", "compile"], [1.5, None], "steps/s", "Speed")
    png(figure)
    assert plots.describe(figure) == "Speed. SDPA 1.5, compile not measured. steps/s"
