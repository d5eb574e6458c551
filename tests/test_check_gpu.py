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

SETTING = Setting(hw=CPU, steps=3, codes=4)
EXACT = ("parity", "recovery", "resume", "codec", "recogniser")  # the same on any device
KEYS = {"row", "value", "unit", "peer", "peer_value", "ratio"}


@pytest.fixture(autouse=True)
def process_as_it_was():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("part", check_gpu.PARTS)
def test_every_part_finds_what_it_looks_for(part):
    rows = list(check_gpu.attempt(part, SETTING))
    assert rows and all(row.keys() >= KEYS and row["part"] == part for row in rows)
    assert json.loads(json.dumps(rows)) and len({row["row"] for row in rows}) == len(rows)
    failed = [row for row in rows if row.get("status") == "failed"]
    assert not failed and any(row["value"] is not None for row in rows) == (part != "tests")
    assert all(math.isfinite(row["value"]) for row in rows if row["value"] is not None)
    if part in EXACT:
        assert {row.get("status", "ok") for row in rows} <= {"ok", "skipped"}, rows


def test_a_part_that_fails_keeps_what_it_found_and_says_why(monkeypatch):
    def breaks(setting):
        yield check_gpu.told("first", "as it should be")
        raise RuntimeError("CUDA error: device-side assert triggered\nmore")

    monkeypatch.setitem(check_gpu.PARTS, "copies", (breaks, 30))
    first, last = check_gpu.attempt("copies", SETTING)
    assert first["row"] == "first" and last["status"] == "failed"
    assert last["note"] == "RuntimeError: CUDA error: device-side assert triggered"


SLOW = """
import json, subprocess, sys, time
path = sys.argv[sys.argv.index("--rows") + 1]
open(path, "w").write(json.dumps([{"row": "found before"}]))
if "monitor" in sys.argv:
    sys.exit(3)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(60)
"""


def test_a_part_without_end_is_stopped_and_the_rest_goes_on(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(SLOW)
    monkeypatch.setattr(check_gpu, "__file__", str(child))
    monkeypatch.setitem(check_gpu.PARTS, "copies", (None, 2))
    begun, path = time.monotonic(), tmp_path / "bench" / "gpu.json"
    rows = check_gpu.run_all(["copies", "monitor"], [], "here", path)
    assert time.monotonic() - begun < 50
    assert [row["row"] for row in rows] == ["found before", "copies", "found before", "monitor"]
    assert [rows[1]["note"], rows[3]["note"]] == [
        "stopped after its 2 s",
        "its process ended with code 3",
    ]
    assert json.loads(path.read_text()) == rows and rows[0]["where"] == "here"


def test_after_ten_minutes_what_is_left_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(check_gpu, "WHOLE_S", 5)
    (row,) = check_gpu.run_all(["copies"], [], "here", tmp_path / "gpu.json")
    assert row["status"] == "skipped" and "--only" in row["note"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: its table is real")
def test_without_a_gpu_it_says_so_and_leaves_the_real_table_alone(tmp_path):
    command = [sys.executable, str(BENCH / "check_gpu.py"), "--only", "tests"]
    ended = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "torch sees no GPU here" in ended.stdout and not (tmp_path / "gpu.json").exists()
    (row,) = json.loads((tmp_path / "gpu-pretended.json").read_text())
    assert row["status"] == "skipped" and row["where"].startswith("no GPU: tiny sizes on ")
