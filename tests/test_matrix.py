"""Notebooks run to their end whatever preset, use and switches: a few rows of the whole matrix.

The rows begin with one run's data (01_data_prep). All rows: `make test-matrix`.
"""

import json
import os
import signal
from pathlib import Path

import matrix
import pytest
from matrix import Row

pytestmark = pytest.mark.long

# Between them: weights without an average and with one, gate and none, muon and adamw, passes that
# add up, dropout, both kinds of schedule, recomputed layers, every number format of the presets.
WHY = "it takes half a minute; KIT_SLOW=1 runs it, too"
slow = pytest.mark.skipif("KIT_SLOW" not in os.environ, reason=WHY)
FEW = [Row(preset="cpu", use="speed")]
FEW += [pytest.param(Row(preset="24gb", use="low_memory"), marks=slow)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def data(runs) -> Path:
    return matrix.data_of("cpu", runs)


@pytest.mark.parametrize("row", FEW, ids=lambda row: row.name)
def test_every_notebook_runs_to_its_end(row, runs, data, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, *_: None)  # compiling takes a minute a row
    matrix.run_row(row, runs, data)
    said, left = capsys.readouterr().out, {path.name for path in (runs / row.name).glob("model-*")}
    one = row.use == "speed"
    assert left == {"model-raw.safetensors"} | (set() if one else {"model-ema.safetensors"})
    assert ("weights: raw, ema" in said) != one


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


def test_an_exception_ends_its_row_and_rows_that_ended_are_kept(tmp_path, monkeypatch):
    def stop(name, **parameters):
        raise ValueError("no")

    monkeypatch.setattr("matrix.run_cells", stop)
    found = matrix.outcome(Row(preset="tiny", notebooks=("01_data_prep",)), tmp_path)
    assert not found["ended"] and found["error"].startswith("ValueError: no")
    ended = {"name": "cpu", "ended": True, "seconds": {}, "error": ""}
    failed = dict(ended, name="cpu-speed", ended=False, error="ValueError: no")
    path = tmp_path / "matrix.json"
    assert matrix.earlier(path, "a") == []
    path.write_text(json.dumps({"code": "a", "rows": [ended, failed]}))
    assert matrix.earlier(path, "a") == [ended] and matrix.earlier(path, "b") == []
    assert matrix.code_digest() == matrix.code_digest()


def dies(row: Row, runs: Path) -> dict:
    if row.use == "speed":
        os.kill(os.getpid(), signal.SIGKILL)
    return matrix.result_row(row, {}, "")


@slow
def test_a_process_that_dies_costs_its_own_row_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("matrix.outcome", dies)
    rows = [Row(preset="tiny", use=use, notebooks=matrix.ALL) for use in ("", "speed", "quality")]
    found = {row["name"]: row["error"] for row in matrix.outcomes(rows, tmp_path, 2)}
    assert found == {"tiny": "", "tiny-speed": "its process died", "tiny-quality": ""}
