"""For all tests: torch on one thread. Ranks are threads here, 16 at times, and a pool of torch threads for each of them
would leave no processor to the code under test."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def torch_on_one_thread():
    import torch

    torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--torture",
        action="store_true",
        help="the long form of the tests in tests/torture, tests/explorer and tests/sanitizers: hours (make torture)",
    )


@pytest.fixture(scope="session")
def torture(request) -> bool:
    """True: the long form was asked for. Tests choose between two sizes of one body; none exists in one form only."""
    return request.config.getoption("--torture")
