"""The judges' networks: skipped where they are not installed."""

import pytest
from judges import Judges, missing


def pytest_collection_modifyitems(items):
    if missing():
        why = f"{', '.join(missing())} not installed (make test-judges installs it)"
        for item in items:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def judges(tmp_path_factory):
    return Judges("en", tmp_path_factory.mktemp("models"))
