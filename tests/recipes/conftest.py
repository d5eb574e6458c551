"""What every test of a recipe needs."""

import pytest
import torch


def keep_threads():
    """A run gives torch as many as it is to have: put back for the tests that follow."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


threads = pytest.fixture(autouse=True)(keep_threads)
# For what a module's own fixtures start.
threads_of_module = pytest.fixture(scope="module", autouse=True)(keep_threads)
