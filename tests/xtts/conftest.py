"""coqui-tts as the reference: skipped where it is not installed."""

import importlib.util

import psutil
import pytest
from coqui import SMALL, coqui_xtts, write_coqui

MISSING = [name for name in ("TTS", "six") if importlib.util.find_spec(name) is None]
FULL_SIZE_GIB = 10


def pytest_configure(config):
    config.addinivalue_line("markers", "full_size: 30 x 1024, some minutes and much memory")


def pytest_collection_modifyitems(items):
    free_gib = psutil.virtual_memory().available / 2**30
    for item in items:
        if item.get_closest_marker("full_size") and free_gib < FULL_SIZE_GIB:
            why = f"needs {FULL_SIZE_GIB} GiB of memory, {free_gib:.0f} are free"
            item.add_marker(pytest.mark.skip(reason=why))
    if MISSING:
        why = f"{', '.join(MISSING)} not installed (make test-xtts installs it)"
        for item in items:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Its folder, and coqui-tts's own model of it."""
    folder = tmp_path_factory.mktemp("small")
    model = coqui_xtts(folder, SMALL)
    return write_coqui(folder, model), model
