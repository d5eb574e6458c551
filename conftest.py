"""Surroundings of every test and of every notebook's kernel: small, quiet, and out of the way.

It is at the root because nbmake's kernels inherit this process's environment, and tests/ and
notebooks/ are both collected from here. Set before anything imports torch.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parent

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads slow busy cores down 4-10 times
os.environ["GOMP_SPINCOUNT"] = "10000"  # ... but falling asleep at once costs twice the time
BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ  # one of several processes that test
if BESIDE_OTHERS:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # more would be processes that import torch
os.environ["KIT_PRESET"] = "tiny"
os.environ["KIT_RUN"] = "demo"
os.environ["PYTHONPATH"] = str(ROOT)
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel, not the user's
os.environ.pop("KIT_DEMO_STARTED", None)


def pytest_configure(config):
    config.kit_runs = tempfile.mkdtemp(prefix="kit-runs-")
    os.environ["KIT_RUNS"] = config.kit_runs  # shared by all notebooks, never the user's runs/
    # Not the user's kernels, nor another process's: one that is overwritten while it runs crashes.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{config.kit_runs}/.inductor"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The notebooks begin, as they take longest; 05 and later ones are long tests."""
    items.sort(key=lambda item: item.path.suffix != ".ipynb")
    for item in items:
        if item.path.name == "01_data_prep.ipynb":
            item.add_marker(pytest.mark.basis)
        if item.path.name >= "05" and item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """The notebook that begins with a published voice finds one; your_voice has its own run."""
    with contextlib.ExitStack() as stack:
        if item.path.name == "your_voice.ipynb":
            stack.enter_context(patch.dict(os.environ, KIT_RUN="your-voice"))
        if item.path.name == "07_finetune_xtts.ipynb":
            stack.enter_context(patch.object(sys, "path", [*sys.path, str(ROOT / "tests")]))
            from hub import hub_with_a_release

            stack.enter_context(hub_with_a_release())
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests share what was made for them, and each notebook continues from the one before.

    (xdist's own groups do nothing under pytest 9.2, which names its tests otherwise.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "notebooks" if file.endswith(".ipynb") else file

    return ByFile(config, log)


def pytest_unconfigure(config):
    shutil.rmtree(config.kit_runs, ignore_errors=True)
