"""The kit on a processor without AVX-512 and bf16, as most laptops have: `make test-plain-cpu`.

Two stand-ins on any x86-64 machine. Environment variables keep torch's and oneDNN's kernels to
AVX2: quick, so whole test files run with them. QEMU's user mode pretends a Haswell to every
question a library may ask: slow (torch's import alone takes half a minute), and the strictest
there is, as an instruction that a Haswell lacks ends the process.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit.base.config import load_preset

ROOT = Path(__file__).resolve().parent.parent.parent
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
AVX2["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"
HASWELL = ["qemu-x86_64", "-cpu", "Haswell"]
# The emulator multiplies and adds in one instruction (FMA) 30 times as slowly as in two, so MKL
# takes its kernels for older processors. What torch and oneDNN pick stays the Haswell's.
TWO_INSTRUCTIONS = {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
ALONE = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "JUPYTER_PREFER_ENV_PATH": "1"}
NO_QEMU = "there is no qemu-x86_64 here: apt-get install qemu-user, or dnf install qemu-user"

X86_64 = platform.machine().lower() in ("x86_64", "amd64")
pytestmark = pytest.mark.skipif(not X86_64, reason="not an x86-64 processor")
needs_qemu = pytest.mark.skipif(not shutil.which(HASWELL[0]), reason=NO_QEMU)


def run(command: list[str], **env: str) -> str:
    """What `command` prints, in the repository's root; its last lines where it fails."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ALONE | env, **output)
    assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-60:])
    return done.stdout


ASKED = """
import torch
from kit.inference.linear_formats import choose_layer, has_bf16
kind, dtype, ran = choose_layer("bf16", torch.device("cpu"), compiled=False)
print(torch.backends.cpu.get_cpu_capability(), has_bf16(), dtype, ran, sep="|")
"""
ANSWER = ["AVX2", "False", "torch.float32"]


def test_the_variables_take_bf16_away():
    printed = run([sys.executable, "-c", ASKED], **AVX2)
    *actual, ran = printed.strip().split("|")
    assert actual == ANSWER and "no bf16 products" in ran


@needs_qemu
def test_a_haswell_has_no_bf16():
    last = run([*HASWELL, sys.executable, "-c", ASKED]).strip().splitlines()[-1]
    *actual, ran = last.split("|")
    assert actual == ANSWER and "no bf16 products" in ran


QUICK = ("linear_formats", "compare_formats", "decoder", "generate", "optim")


@pytest.mark.parametrize("name", QUICK)
def test_what_speaks_and_trains_works_with_avx2_alone(name):
    (file,) = (ROOT / "tests").glob(f"*/test_{name}.py")
    options = ["-q", "-m", "", "-p", "no:cacheprovider", str(file)]
    run([sys.executable, "-m", "pytest", *options], **AVX2)


@needs_qemu
def test_the_notebooks_run_on_a_haswell(tmp_path):
    """00 and 04 to their end at tiny size; the voice they need is made without the emulator."""
    env = {"KIT_RUNS": str(tmp_path / "runs"), "KIT_RUN": "demo", "KIT_PRESET": "tiny"}
    env["JUPYTER_PATH"] = str(tmp_path)
    spec = tmp_path / "kernels" / "haswell" / "kernel.json"
    spec.parent.mkdir(parents=True)
    start = [*HASWELL, sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": start, "display_name": "Haswell", "language": "python"}
    spec.write_text(json.dumps(kernel | {"env": TWO_INSTRUCTIONS}))

    def notebook(name: str, kernel: str) -> str:
        made = tmp_path / f"{name}-{kernel}.ipynb"
        papermill = [sys.executable, "-m", "papermill", "--kernel", kernel, "--cwd", "notebooks"]
        papermill += ["--start-timeout", "900", "--no-progress-bar", "--log-level", "WARNING"]
        run([*papermill, f"notebooks/{name}.ipynb", str(made)], **env)
        return made.read_text(encoding="utf-8")

    notebook("00_setup", "haswell")
    for name in ("01_data_prep", "02_train", "03_evaluate_ema"):
        notebook(name, "python3")
    assert "this processor has no bf16 products" in notebook("04_inference", "haswell")
    report = json.loads((tmp_path / "runs" / "demo" / "report.json").read_text(encoding="utf-8"))
    assert report["setup"]["precision"] == "fp32"
    timed = report["infer"]["variants"]
    assert set(timed) == set(load_preset("tiny")["infer"]["formats"])
    assert all(row["codes_per_s"] > 0 for row in timed.values())
