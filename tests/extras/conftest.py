"""What every test of an extra needs: as those of the recipes."""

import pytest
from helpers import keep_threads

threads = pytest.fixture(autouse=True)(keep_threads)
threads_of_module = pytest.fixture(scope="module", autouse=True)(keep_threads)
