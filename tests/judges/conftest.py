"""The judges' networks: skipped where they are not installed."""

import pytest
from judges import NEEDED, Judges
from optional_packages import skip_unavailable


def pytest_collection_modifyitems(items):
    skip_unavailable(items, NEEDED, "test-judges")


@pytest.fixture(scope="session")
def judges(tmp_path_factory):
    return Judges("en", tmp_path_factory.mktemp("models"))
