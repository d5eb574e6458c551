"""`make check-gpu` without a GPU: every part runs its own lines at tiny size, and none stops it."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import CPU

BENCH = Path(__file__).resolve().parent / "bench"
sys.path.insert(0, str(BENCH))

import check_gpu  # noqa: E402
from gpu_setting import Setting  # noqa: E402

pytestmark = pytest.mark.long

SETTING = Setting(hw=CPU, steps=3, codes=4)
EXACT = ("parity", "recovery", "resume", "variants")  # on any device
KEYS = {"row", "value", "unit", "peer", "peer_value", "ratio"}
MACHINE = {"name": "a card", "gpu": True, "commit": "abc", "date": "2026-01-01T00:00:00"}


@pytest.fixture(autouse=True)
def process_as_it_was():
    before = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_float32_matmul_precision(before)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize("part", [part for part in check_gpu.PARTS if part != "tests"])
def test_every_part_measures_what_it_is_for(part, monkeypatch, tmp_path):
    monkeypatch.setattr("gpu_training.PREPARED", tmp_path / "not prepared")
    rows = list(check_gpu.part_rows(part, SETTING))
    assert rows and all(row.keys() >= KEYS and row["part"] == part for row in rows)
    assert json.loads(json.dumps(rows)) and len({row["row"] for row in rows}) == len(rows)
    assert not [row for row in rows if row.get("status") == "failed"]
    assert any(row["value"] is not None for row in rows) == (part != "a real run")
    assert all(math.isfinite(row["value"]) for row in rows if row["value"] is not None)
    if part in EXACT:
        assert {row.get("status") or "ok" for row in rows} <= {"ok", "skipped"}, rows


BREAKING = """
def rows(setting):
    yield {"row": "first"}
    raise RuntimeError("CUDA error: device-side assert triggered\\nmore")
def needs(setting):
    import no_such_package
    yield
"""


def test_a_part_that_fails_keeps_its_rows_and_says_why(monkeypatch, tmp_path):
    (tmp_path / "breaking.py").write_text(BREAKING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(check_gpu.PARTS, "memory", "breaking:rows")
    first, last = check_gpu.part_rows("memory", SETTING)
    assert first["row"] == "first" and last["status"] == "failed"
    assert last["note"] == "RuntimeError: CUDA error: device-side assert triggered"
    monkeypatch.setitem(check_gpu.PARTS, "memory", "breaking:needs")
    (row,) = check_gpu.part_rows("memory", SETTING)
    assert row["status"] == "failed" and "no_such_package" in row["note"]


CHILD = """
import json, subprocess, sys, time
path = sys.argv[sys.argv.index("--rows") + 1]
part = sys.argv[sys.argv.index("--part") + 1]
open(path, "w").write(json.dumps([{"row": "measured before", "part": part}]))
if part == "machine":
    sys.exit(3)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(60)
"""


def test_a_part_without_end_is_stopped_and_the_others_keep_their_rows(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(check_gpu, "__file__", str(child))
    measured = check_gpu.Table(tmp_path / "bench" / "gpu.json", MACHINE)
    started_s = time.monotonic()
    for part in ("memory", "machine"):
        check_gpu.measure(part, 2, measured)
    assert time.monotonic() - started_s < 50
    memory, machine = measured.rows["memory"], measured.rows["machine"]
    assert [row["row"] for row in memory] == ["measured before", "memory"]
    assert memory[1]["status"] == "failed" and "2 s" in memory[1]["note"]
    assert "code 3" in machine[1]["note"]
    written = json.loads(measured.path.read_text())
    assert written["machine"] == MACHINE and len(written["rows"]) == 4
    assert {row["commit"] for row in written["rows"]} == {"abc"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: its table is real")
def test_without_a_gpu_it_says_so_and_leaves_the_real_table_alone(tmp_path):
    command = [sys.executable, BENCH / "check_gpu.py", "--only", "machine"]
    command += ["--folder", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "sees no GPU" in ended.stdout and not (tmp_path / "gpu.json").exists()
    written = json.loads((tmp_path / "gpu-pretended.json").read_text())
    assert not written["machine"]["gpu"] and {row["part"] for row in written["rows"]} == {"machine"}
