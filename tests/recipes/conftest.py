"""What every test of a recipe needs."""

import pytest
import torch


@pytest.fixture(autouse=True)
def threads():
    """A run gives torch as many as it is to have: put back for the tests that follow."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def threads_of_module():
    """As `threads`, for what a module's own fixtures start."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
