"""What every test of a recipe needs: a machine that says at once that nobody else is busy on it."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(autouse=True)
def threads():
    """A run gives torch as many as it finds free: put back for the tests that follow."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """A busy one is listened to for six seconds, at every start."""
    idle = SimpleNamespace(idle=100.0, nice=0.0)
    monkeypatch.setattr("psutil.cpu_times_percent", lambda _seconds: idle)
