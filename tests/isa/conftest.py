"""The table of all kernels, after the tests."""

import pytest

from tests.isa.compiled import Kernel, table

TABLE = pytest.StashKey[list[Kernel]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = []


@pytest.fixture(scope="session")
def all_kernels(pytestconfig: pytest.Config) -> list[Kernel]:
    """Kernels that are put here appear in the table."""
    return pytestconfig.stash[TABLE]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[TABLE]:
        terminalreporter.section("GPU kernels: compiled, not run")
        terminalreporter.write_line(table(config.stash[TABLE]))
