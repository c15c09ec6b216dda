"""Programs that the tests of this folder share: made once, as they take longer than what they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.explorer.mutations import MUTATIONS, NOT_FOUND
from tests.explorer.program import CSRC, HERE, build
from tests.explorer.schema import write_copy

SCENARIOS = [HERE / f"{name}.cpp" for name in ("world", "scenario_a2a", "scenario_query", "scenario_kv", "ops")]
KERNELS = [f"ops/{name}.cc" for name in ("a2a_lse_reduce", "query_gather", "kv_gather")]


@pytest.fixture(scope="session")
def explorer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("explorer")


@pytest.fixture(scope="session")
def ops_program(explorer_folder: Path) -> Path:
    """Of the kernel source as it is."""
    return build(explorer_folder, "ops", [*SCENARIOS, *[CSRC / kernel for kernel in KERNELS]])


@pytest.fixture(scope="session")
def together_program(explorer_folder: Path, ops_program: Path) -> Path:
    """The same, with the order of signals that a GPU has: the one op that asks is compiled anew."""
    others = [explorer_folder / "ops" / f"{source.name}.o" for source in [*SCENARIOS, *map(Path, KERNELS[1:])]]
    assert ops_program.exists()
    return build(explorer_folder, "together", [CSRC / KERNELS[0]], "-DDCP_SIGNALS_TOGETHER=true", objects=others)


@pytest.fixture(scope="session")
def mutants_program(explorer_folder: Path) -> Path:
    """Of a copy that holds all planted faults; `mutation=0`, the default, has none of them on."""
    numbered = [(number, mutation.edits) for number, mutation in enumerate([*MUTATIONS, *NOT_FOUND], 1)]
    copy = write_copy(CSRC, explorer_folder, numbered)
    # A fault may leave a parameter unused.
    return build(explorer_folder, "mutants", [*SCENARIOS, *[copy / kernel for kernel in KERNELS]], "-w", csrc=copy)
