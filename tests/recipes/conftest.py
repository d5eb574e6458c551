"""What every test of a recipe needs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import keep_threads, world

threads = pytest.fixture(autouse=True)(keep_threads)


@pytest.fixture(scope="module", autouse=True)
def threads_of_module() -> Iterator[None]:
    """For what a module's own fixtures start."""
    world()  # is where the runs are now, before a test moves them
    yield from keep_threads()


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The folder of the runs, which is empty."""
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    return tmp_path


@pytest.fixture
def watched(monkeypatch) -> None:
    """A person sees the panel of a training."""
    monkeypatch.setattr("kit.notebook.train_panel.is_watched", lambda: True)
