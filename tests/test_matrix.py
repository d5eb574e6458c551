"""Notebooks run to their end whatever preset, use and switches: a row of the whole matrix.

The row begins with one run's data (01_data_prep). All rows: `make test-matrix`.
"""

import matrix
import pytest
from matrix import Row


@pytest.mark.long
def test_notebooks_run_to_their_end(tmp_path):
    row = Row(preset="cpu", switch="ema", notebooks=("02_train", "03_evaluate_ema"))
    result = matrix.run_row(row, tmp_path)
    assert result["ended"], result["error"]
    left = {path.name for path in (tmp_path / row.name).glob("model-*")}
    assert left == {"model-raw.safetensors"}, "weights without an average"


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
