"""Shared by the tests of kit/. Threads, preset and runs folder are set in ../conftest.py."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def runs_folder() -> Path:
    """The temporary KIT_RUNS of this session, shared with the notebooks; removed at the end."""
    return Path(os.environ["KIT_RUNS"])
