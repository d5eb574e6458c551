"""What every test of a recipe needs: a machine that says at once that nobody else is busy on it."""

from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """A busy one is listened to for six seconds, at every start."""
    idle = SimpleNamespace(idle=100.0, nice=0.0)
    monkeypatch.setattr("psutil.cpu_times_percent", lambda _seconds: idle)
