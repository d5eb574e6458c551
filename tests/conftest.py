"""Shared by the tests of kit/. Threads, preset and runs folder are set in ../conftest.py."""

import gc
import multiprocessing
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def runs_folder() -> Path:
    """The temporary KIT_RUNS of this session, shared with the notebooks; removed at the end."""
    return Path(os.environ["KIT_RUNS"])


# What a child process would import on its own in five seconds; an optimizer imports torch._dynamo.
IMPORTED_ONCE = ["helpers", "commands", "kit.recipes.train", "torch._dynamo"]


@pytest.fixture(scope="module")
def processes():
    """Starts child processes that have torch and the kit imported already, to be killed."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{before}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    yield context
    os.environ["PYTHONPATH"] = before


def pytest_collection_finish() -> None:
    """Keep `gc.collect`, which frees memory between steps, from searching all that is imported."""
    gc.freeze()
