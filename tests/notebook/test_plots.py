"""Pictures that are pictures, whatever the rows; ticks where something happened."""

import base64
import io

import numpy as np
from PIL import Image

from kit.notebook import plots
from kit.notebook.plots import png
from kit.notebook.training_curves import panel_picture, run_curves, smooth, thin


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
        plots.histogram({"length": rng.random(100), "letters": rng.random(9)}, {"length": [0.5]}),
        plots.bars(["baseline", "SDPA", "compile"], [1.0, 1.5, None], "steps/s", "Speed"),
        plots.curves({"raw": ([1, 2], [3, 2]), "EMA": ([1, 2], [3, 1])}, "step", "loss (nats)"),
        plots.timeline([], [(2.0, 2.5)], "talk.wav"),
        plots.timeline([(0.0, 2.0), (2.5, 4.0)], [(2.0, 2.5)], "talk.wav"),
        plots.training_row([5, 0, 7], [3] * 10, np.zeros((80, 20))),
        plots.padding_picture({"any": [[0, 2], [1]], "by length": [[0, 1], [2]]}, [1, 2, 9]),
        plots.memory_bars(
            {"weights": 2**30, "EMA": 0}, 2**30, None, 10 * 2**30, 16 * 2**30, "a T4"
        ),
        plots.heatmaps({f"head {i}": np.full((3, 5), i / 5) for i in range(6)}, "code", "piece"),
        plots.bars(["x", "y"], {"a": [1, 2], "b": [2, 1]}),
        run_curves([]),
        run_curves([row(1, loss=None, memory_bytes=0, lr=0.0, note="skipped")]),
    ):
        width, height = size(png(chart))
        assert width > 600 and height > 200


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


def test_show_displays_a_picture_anywhere_in_a_cell(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda views, raw: shown.append(views))
    plots.show(plots.bars(["a"], [1.0]))
    (views,) = shown
    assert size(base64.b64decode(views["image/png"]))[0] == 1600
    assert "width=800 alt='a 1'" in views["text/html"] and views["text/plain"] == "a 1"


def test_the_panel_as_a_picture_has_its_switches_above_the_curves():
    picture = panel_picture([row(1), row(2)], {"SDPA": True, "compile": False})
    assert "☑ SDPA, ☐ compile" in plots.describe(picture)
    top = max(axes.get_position().ymax for axes in picture.axes)
    assert all(text.get_position()[1] > top for text in picture.texts)


def test_pictures_can_be_read_on_a_white_and_on_a_dark_page():
    chart = plots.bars(["a"], [1.0])
    image = plots.heatmaps({"head": np.eye(3)}, "code", "piece")
    corners = [
        Image.open(io.BytesIO(png(f))).convert("RGBA").getpixel((0, 0)) for f in (chart, image)
    ]
    assert corners[0] == (255, 255, 255, 255), "a chart stays readable where no theme turns it dark"
    assert corners[1][3] == 0, "an image has no block around it"
    assert "class='kit-chart'" in plots.picture_html(chart)
    assert "class='kit-image'" in plots.picture_html(image)


def test_a_picture_is_described_for_those_who_do_not_see_it():
    figure = plots.curves({"raw": ([1, 2], [3, 2]), "EMA": ([1, 2], [3, 1])}, "step", "loss", "Run")
    assert plots.describe(figure) == "Run. loss by step. Shown: raw, EMA"
    figure = plots.bars(["SDPA", "compile"], [1.5, None], "steps/s", "Speed")
    png(figure)
    assert plots.describe(figure) == "Speed. SDPA 1.5, compile not measured. steps/s"
