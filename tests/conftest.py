"""For all tests: torch on one thread. Ranks are threads here, 16 at times, and a pool of torch threads for each of them
would leave no processor to the code under test."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def torch_on_one_thread():
    import torch

    torch.set_num_threads(1)
