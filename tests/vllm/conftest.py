"""Engines run in groups of processes, each group once; tests read what its ranks wrote."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.vllm.cases import GROUPS

ROOT = Path(__file__).parents[2]
DEADLINE_S = 500  # half a minute or two on two processors of one's own

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

lines: list[str] = []  # measured figures, for the end of the run


def pytest_collection_modifyitems(items):
    """Tests are skipped where vLLM is not installed (it is not imported here: that takes seconds)."""
    if importlib.util.find_spec("vllm") is not None:
        return
    if os.environ.get("DCPKERNELS_REQUIRE_VLLM") == "1":
        raise pytest.UsageError("vLLM is not installed, and DCPKERNELS_REQUIRE_VLLM=1")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs vLLM, in an environment of its own: make test-vllm"))


def pytest_terminal_summary(terminalreporter):
    for line in lines:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "model"
    run([[sys.executable, "-m", "tests.vllm.checkpoint", str(folder)]], [folder.parent / "checkpoint.log"], [{}])
    return folder


@pytest.fixture(scope="session")
def oracle(model) -> list[dict]:
    return json.loads((model / "answers.json").read_text())


@pytest.fixture(scope="session")
def two(model, tmp_path_factory) -> list[dict]:
    return group("two", model, tmp_path_factory)


@pytest.fixture(scope="session")
def four(model, tmp_path_factory) -> list[dict]:
    return group("four", model, tmp_path_factory)


@pytest.fixture(scope="session")
def without(model, tmp_path_factory) -> list[dict]:
    return group("without", model, tmp_path_factory)


def group(name: str, model: Path, tmp_path_factory) -> list[dict]:
    """What each rank of the group wrote."""
    num_ranks, engines, with_us = GROUPS[name]
    folder = tmp_path_factory.mktemp(name)
    job = {"group": name, "model": str(model), "ports": free_ports(len(engines)), "results": str(folder)}
    (folder / "job.json").write_text(json.dumps(job))
    start = time.perf_counter()
    run(
        [[sys.executable, "-m", "tests.vllm.rank", str(folder / "job.json")]] * num_ranks,
        [folder / f"{rank}.log" for rank in range(num_ranks)],
        [{"RANK": str(rank)} | ({"DCPKERNELS_VLLM": "direct"} if with_us else {}) for rank in range(num_ranks)],
    )
    lines.append(f"vllm: {num_ranks} ranks, {len(engines)} engines in {time.perf_counter() - start:.0f} s")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:  # all at once, or one may be given twice
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]


def run(commands: list[list[str]], logs: list[Path], environments: list[dict[str, str]]) -> None:
    """Processes at once; fails, with the end of each log, when one fails or is not done in time."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DCPKERNELS_", "VLLM_"))}
    inherited |= {"PYTHONPATH": str(ROOT)} | ENVIRONMENT
    deadline = time.monotonic() + DEADLINE_S
    processes: list[subprocess.Popen] = []
    with ExitStack() as stack:
        try:
            for command, log, more in zip(commands, logs, environments, strict=True):
                output = stack.enter_context(log.open("w"))
                processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=inherited | more, stdout=output, stderr=subprocess.STDOUT
                    )
                )
            codes = wait(processes, deadline)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    if codes != [0] * len(codes):
        ends = "".join(f"\n--- {log.name}\n{log.read_text()[-4000:]}" for log in logs)
        pytest.fail(f"exit codes {codes} (None: not done after {DEADLINE_S} s){ends}", pytrace=False)


def wait(processes: list[subprocess.Popen], deadline: float) -> list[int | None]:
    """Exit codes; a rank that has failed leaves the others a few seconds, for they wait for it."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return codes
        if any(codes):
            deadline = min(deadline, time.monotonic() + 20)
        time.sleep(0.1)
    return [process.poll() for process in processes]
