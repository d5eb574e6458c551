"""What every test of a recipe needs."""

import pytest
from helpers import keep_threads

threads = pytest.fixture(autouse=True)(keep_threads)
# For what a module's own fixtures start.
threads_of_module = pytest.fixture(scope="module", autouse=True)(keep_threads)
