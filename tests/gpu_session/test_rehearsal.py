"""The GPU session rehearsed without a GPU, in an environment that lacks what such a machine lacks.

`make test-gpu-session` makes .venv-gpu from requirements.txt and a folder of wheels beside it. Run
without the wheels, parts that need a package are rows that name it; with them nothing fails.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
VENV = ROOT / ".venv-gpu"
PYTHON = VENV / "bin" / "python"
LACKING = ("soundfile", "cffi", "orjson", "IPython", "ipywidgets", "nbmake", "bitsandbytes")

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="run by `make test-gpu-session`")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder of runs with a tiny one that can be trained, as `make gpu-run` leaves it."""
    folder = tmp_path_factory.mktemp("runs")
    command = [ROOT / ".venv/bin/python", "-m", "kit", "prepare", "--run", "gpu"]
    command += ["--preset", "tiny", "--set", "train.max_steps=24"]
    environment = os.environ | {"KIT_RUNS": str(folder), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    shutil.rmtree(folder / "gpu" / "corpus" / "wavs")
    return folder


def session(wheels: Path, out: Path, prepared: Path, *arguments: str) -> list[dict]:
    """Run the script as on the other machine: no environment of ours, no git folder needed."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(out), "PYTHON": str(PYTHON)}
    environment |= {"KIT_GPU_RUNS": str(prepared), "OMP_NUM_THREADS": "2"}
    environment["KIT_COMMIT"] = "rehearsal"
    command = ["bash", ROOT / "tests/bench/gpu_session.sh", wheels, out, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    table = json.loads((out / "gpu-pretended.json").read_text(encoding="utf-8"))
    assert table["machine"]["commit"] == "rehearsal"
    return table["rows"]


def installed(package: str) -> bool:
    return not subprocess.run([PYTHON, "-c", f"import {package}"], capture_output=True).returncode


def uninstall_wheels() -> None:
    command = [PYTHON, "-m", "pip", "uninstall", "--yes", "-q", *LACKING, "pycparser"]
    subprocess.run(command, check=True, capture_output=True)


def test_without_the_wheels_a_lacking_package_is_a_row(tmp_path, prepared):
    uninstall_wheels()
    assert not any(installed(package) for package in LACKING)
    rows = session(tmp_path / "no-wheels", tmp_path / "out", prepared, "400", "decide")
    failed = [row for row in rows if row.get("status") == "failed"]
    assert all("No module named" in row["note"] for row in failed), failed
    parts_measured = {row["part"] for row in rows if row["value"] is not None}
    assert {"machine", "kernels", "passes"} <= parts_measured


@pytest.mark.parametrize("command", ["decide", "confirm", "rest"])
def test_with_the_wheels_every_part_runs(tmp_path, prepared, command):
    uninstall_wheels()
    rows = session(VENV / "wheels", tmp_path / "out", prepared, "900", command)
    assert installed("soundfile") and installed("orjson") and installed("bitsandbytes")
    troubled = [row for row in rows if row.get("status") in ("failed", "off")]
    assert not troubled, troubled
    assert all(row["note"] for row in rows if row.get("status") == "skipped")
