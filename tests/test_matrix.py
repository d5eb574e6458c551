"""Notebooks run to their end whatever preset, use and switches: a few rows of the whole matrix.

The rows begin with one run's data (01_data_prep). All rows: `make test-matrix`.
"""

import matrix
import pytest
from matrix import Row

pytestmark = pytest.mark.long


def test_every_notebook_runs_to_its_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, *_: None)  # compiling takes a minute a row
    row = Row(preset="cpu", use="speed")
    matrix.run_row(row, tmp_path, matrix.data_of("cpu", tmp_path))
    left = {path.name for path in (tmp_path / row.name).glob("model-*")}
    assert left == {"model-raw.safetensors"}, "weights without an average"
    assert "weights: raw, ema" not in capsys.readouterr().out


def test_an_exception_ends_its_row_with_the_reason(tmp_path, monkeypatch):
    def stop(name, **parameters):
        raise ValueError("no")

    monkeypatch.setattr("matrix.run_cells", stop)
    found = matrix.outcome(Row(preset="tiny", notebooks=("01_data_prep",)), tmp_path)
    assert not found["ended"] and found["error"].startswith("ValueError: no")


def test_the_matrix_has_every_preset_use_and_switch_at_tiny_sizes():
    rows = matrix.every_row()
    assert len({row.name for row in rows}) == len(rows)
    presets, uses, flips = len(matrix.PRESETS), 1 + len(matrix.OVERLAYS), 2 * len(matrix.LABELS)
    assert len(rows) == presets * (uses + flips)
    own, small = matrix.load_preset("24gb"), matrix.shrunk(Row(preset="24gb"))
    assert small["train"]["max_steps"] < 10 < own["train"]["max_steps"]
    assert 0 < small["codec"]["vocoder_steps"] < 10 < own["codec"]["vocoder_steps"]
    assert small["model"]["layers"] == 2 and small["model"]["dropout"] == own["model"]["dropout"]
    for section, name in (("train", "optimizer"), ("train", "schedule"), ("infer", "formats")):
        assert small[section][name] == own[section][name]
    assert matrix.shrunk(Row(preset="cpu", switch="ema", on=False))["speed"]["ema"] is False
