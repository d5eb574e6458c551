"""What every test of a recipe needs."""

from pathlib import Path

import pytest
from helpers import keep_threads, world

world()  # is where the runs are now, before any test moves them
threads = pytest.fixture(autouse=True)(keep_threads)
# For what a module's own fixtures start.
threads_of_module = pytest.fixture(scope="module", autouse=True)(keep_threads)


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The folder of the runs, which is empty."""
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    return tmp_path


@pytest.fixture
def watched(monkeypatch) -> None:
    """A person sees the panel of a training."""
    monkeypatch.setattr("kit.notebook.train_panel.is_watched", lambda: True)
