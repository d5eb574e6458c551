"""coqui-tts as the reference: skipped where it is not installed."""

import pytest
from coqui import SMALL, coqui_xtts, write_coqui
from optional_packages import FULL_SIZE, skip_unavailable


def pytest_configure(config):
    config.addinivalue_line("markers", FULL_SIZE)


def pytest_collection_modifyitems(items):
    skip_unavailable(items, ("TTS", "six"), "test-xtts")


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Its folder, and coqui-tts's own model of it."""
    folder = tmp_path_factory.mktemp("small")
    model = coqui_xtts(folder, SMALL)
    return write_coqui(folder, model), model
