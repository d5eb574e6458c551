"""The package indextts2-inference as the reference: skipped where it is not installed."""

import pytest
from optional_packages import FULL_SIZE, skip_unavailable
from published_indextts2 import SMALL, package_model, write_release


def pytest_configure(config):
    config.addinivalue_line("markers", FULL_SIZE)


def pytest_collection_modifyitems(items):
    skip_unavailable(items, ("indextts", "transformers"), "test-indextts2")


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of a small release with random weights, and the package's own model of it."""
    folder = tmp_path_factory.mktemp("small")
    model = package_model(SMALL)
    return write_release(folder, model, SMALL), model
