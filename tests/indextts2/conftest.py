"""The package indextts2-inference as the reference: skipped where it is not installed."""

import importlib.util

import psutil
import pytest

MISSING = [n for n in ("indextts", "transformers") if importlib.util.find_spec(n) is None]


def pytest_configure(config):
    config.addinivalue_line("markers", "full_size(gib): 24 x 1280, some minutes and much memory")


def pytest_collection_modifyitems(items):
    free_gib = psutil.virtual_memory().available / 2**30
    for item in items:
        full_size = item.get_closest_marker("full_size")
        if full_size and free_gib < full_size.kwargs["gib"]:
            why = f"needs {full_size.kwargs['gib']} GiB of memory, {free_gib:.0f} are free"
            item.add_marker(pytest.mark.skip(reason=why))
        if MISSING:
            why = f"{', '.join(MISSING)} not installed (make test-indextts2 installs it)"
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of a small release with random weights, and the package's own model of it."""
    from published_indextts2 import SMALL, package_model, write_release

    folder = tmp_path_factory.mktemp("small")
    model = package_model(SMALL)
    return write_release(folder, model, SMALL), model
