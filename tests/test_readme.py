"""README and docs keep their word: snippets run, names and links exist, tables say what the code says."""

from __future__ import annotations

import ast
import contextlib
import io
import math
import os
import random
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcpkernels
from dcpkernels import env, errors
from dcpkernels.cli import parser
from dcpkernels.testing import run_ranks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "csrc/README.md", *sorted(ROOT.glob("docs/*.md"))]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def script(page: str, name: str) -> str:
    """The Python block whose first line names it."""
    (found,) = [block for block in blocks(page, "python") if block.startswith(f"# {name}")]
    return found


# Ranks that an example starts are forks of a server, which imports torch once for all of them. To them it is as if
# spawned: the script is imported anew, and arguments are pickled.
RUN = """
import functools, multiprocessing, runpy, sys
import torch.multiprocessing
multiprocessing.set_forkserver_preload(["torch.distributed"])
torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_script(folder: Path, text: str) -> str:
    """What it prints. One that starts no processes runs in a fork of a process that has torch imported."""
    file = folder / "example.py"
    file.write_text(text)
    if "multiprocessing.spawn(" not in text:
        return run_ranks(_printed, 1, str(file), mode="process", timeout_s=120)[0]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", RUN, file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _printed(_: Any, file: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(file, run_name="__main__")
    return printed.getvalue()


# -- snippets


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    printed = run_script(tmp_path, script("README.md", "example.py"))
    # Four processes write to one pipe: a line's end may come after the next line's beginning.
    found = re.findall(r"rank (\d): \[2, 4, 64\], largest error ([\d.]+e[-+]\d\d)", printed)
    assert sorted(rank for rank, _ in found) == ["0", "1", "2", "3"], printed
    assert all(float(error) < 1e-6 for _, error in found)


def test_the_zero_copy_example_of_the_readme_runs(tmp_path: Path) -> None:
    assert len(blocks("README.md", "python")) == 3  # this one, the one above and the one below
    printed = run_script(tmp_path, script("README.md", "zero_copy.py"))
    found = re.findall(r"rank (\d): (\[8, 24, 512\], all 3\.5)", printed)
    assert sorted(rank for rank, _ in found) == ["0", "1", "2", "3"], printed
    assert f"`{found[0][1]}`" in (ROOT / "README.md").read_text()


def test_the_example_of_the_readme_with_both_ends_of_a_layer_runs(tmp_path: Path) -> None:
    printed = run_script(tmp_path, script("README.md", "layer.py"))
    shape, error = re.fullmatch(r"(\[.+\]), largest error (\S+)\n", printed).groups()
    assert float(error) < 1e-6
    assert f"`{shape}`" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["parts.py", "chunks.py", "gather_size.py"])
def test_the_examples_of_the_gathers_print_what_the_page_says(tmp_path: Path, name: str) -> None:
    assert len(blocks("docs/gathers.md", "python")) == 3
    assert run_script(tmp_path, script("docs/gathers.md", name)) in blocks("docs/gathers.md", "text")


def test_the_example_for_engines_prints_what_the_page_says(tmp_path: Path) -> None:
    assert len(blocks("docs/engines.md", "python")) == 1
    assert [run_script(tmp_path, script("docs/engines.md", "engine.py"))] == blocks("docs/engines.md", "text")


def test_the_sizes_in_the_docs_are_those_of_the_code(tmp_path: Path) -> None:
    printed = run_script(tmp_path, script("docs/workspace.md", "size.py"))
    assert printed in blocks("docs/workspace.md", "text")
    assert len(printed.splitlines()) == 6


def test_the_formulas_of_the_sizes_in_the_docs() -> None:
    """The table of parts, written out once more, for a geometry in which nothing is round."""
    lanes, channels, ranks, heads, dim, tokens, item = 3, 2, 3, 15, 50, 7, 2
    local = heads // ranks

    def up(value: int, alignment: int) -> int:
        return -(-value // alignment) * alignment

    plain = up(up(local * dim * item, 16) + local * 4, 64)
    packet, payload = 16, 12
    packets = up(packet * (-(-local * 4 // payload) + local * -(-dim * item // payload)), 64)
    lse = up(local * 4, 64)
    expected = {
        (): (2 * (ranks - 1) * tokens * plain, 0, 0),
        (("zero_copy", True),): (2 * (ranks - 1) * tokens * lse, 0, 2 * up(tokens * heads * dim * item, 4096)),
        (("wire", "packet"), ("packet_bytes", packet)): (
            2 * (ranks - 1) * tokens * packets, (ranks - 1) * tokens * plain, 0
        ),
    }  # fmt: skip
    for fields, sizes in expected.items():
        config = dcpkernels.WorkspaceConfig(heads, dim, tokens, num_lanes=lanes, num_channels=channels, **dict(fields))
        parts = dcpkernels.Workspace.size(config, ranks).parts
        assert parts["streams"] == lanes * (64 + 128 * channels)
        assert parts["flags"] == lanes * 2 * channels * ranks * 64
        names = ("staging", "unpacked", "partial_out")
        assert tuple(parts[f"a2a_lse_reduce.{name}"] for name in names) == tuple(lanes * size for size in sizes)
        assert {f"`{name}`" for name in parts} <= set(re.findall(r"`[\w.]+`", (ROOT / "docs/workspace.md").read_text()))
    gathers = {"query_head_dim": 40, "padded_num_heads": 17, "kv_chunk_rows": 9, "kv_dim": 24, "num_lanes": lanes}
    page = (ROOT / "docs/gathers.md").read_text()
    for multicast in (True, False):
        size = dcpkernels.Workspace.size(dcpkernels.WorkspaceConfig(heads, dim, tokens, multicast=multicast, **gathers), ranks)
        parts = size.shared_parts if multicast else size.parts
        assert parts["query_gather.buffer"] == lanes * up(tokens * 17 * 40 * 2, 4096)
        assert parts["kv_gather.buffers"] == lanes * 2 * up(9 * 24 * 2, 4096)
        assert size.parts["streams"] == 3 * lanes * (64 + 128) and size.parts["flags"] == 3 * lanes * 2 * ranks * 64
        assert all(f"`{name}`" in page for name in parts if "gather" in name)
    for fields, rows in (({}, 12), ({"wire": "packet"}, 6)):
        assert dcpkernels.WorkspaceConfig(96, 512, 64, **fields).region_layout(8).max_round_rows == rows


def _recovers(group: Any, source: str) -> tuple[bool, int, list[float]]:
    config = dcpkernels.WorkspaceConfig(12, 64, 16, torch.float32, timeout_s=10, first_call_timeout_s=20)
    workspace = dcpkernels.Workspace(group, config=config)
    partial_out, partial_lse = torch.full((2, 12, 64), float(dist.get_rank())), torch.zeros(2, 12)
    out = torch.empty(2, 12 // workspace.num_ranks, 64)

    def merge() -> None:
        dcpkernels.a2a_lse_reduce(partial_out, partial_lse, workspace=workspace, lse_base="e", out=out)

    merge()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dcpkernels.DcpPeerLost) as caught:
        merge()
    is_nan = bool(out.isnan().all())
    scope: dict[str, Any] = {}
    exec(source, scope)
    workspace = scope["recover"](workspace, caught.value)
    out = torch.empty(2, 12 // workspace.num_ranks, 64)
    merge()
    workspace.close()
    return is_nan, workspace.num_ranks, out.unique().tolist()


def test_the_recovery_of_the_docs_works() -> None:
    source = script("docs/workspace.md", "recover.py")
    results = run_ranks(_recovers, 3, source, mode="process", expect_exit={1: -9})
    assert results == [(True, 2, [1.0]), None, (True, 2, [1.0])]


# -- names


def test_the_environment_table_is_that_of_env() -> None:
    rows = re.findall(r"^\| `(DCPKERNELS_\w+)` \| (.+?) \| .+ \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [(name, default.replace("`", "")) for name, default in rows] == [v[:2] for v in env.VARIABLES]
    built_with = set(re.findall(r"DCPKERNELS_\w+", (ROOT / "setup.py").read_text()))
    for name in built_with:
        assert f"`{name}`" in (ROOT / "README.md").read_text(), name


def test_every_error_is_described() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    names = {name for name in names if issubclass(getattr(errors, name), errors.DcpError)}
    assert len(names) >= 7
    assert {name for name in names if f"| `{name}`" not in text} == set()


def anchors(text: str) -> set[str]:
    """GitHub's: lower case, spaces to hyphens, other signs dropped."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](docs/protocol.md#exactness) [b](docs/protocol.md#nothing) [c](docs/nothing.md) [d](https://x.y)"
    assert broken_links(ROOT / "README.md", text) == ["docs/protocol.md#nothing", "docs/nothing.md"]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:csrc|dcpkernels|tests|docs|\.ci)/[\w/.]*\w)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_tests_that_the_protocol_page_names_exist() -> None:
    named = re.findall(r"`(test_\w+)(?:\[(.+?)\])?`", (ROOT / "docs/protocol.md").read_text())
    functions, ids = set(), set()
    for file in (ROOT / "tests/protocol").glob("test_*.py"):
        tree = ast.parse(file.read_text())
        functions |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        ids |= set(re.findall(r'\bid="([^"]+)"', file.read_text()))
    assert len(named) > 15
    assert [name for name, _ in named if name not in functions] == []
    assert [case for _, case in named if case and case not in ids] == []


def test_every_counterexample_is_on_the_protocol_page() -> None:
    page = (ROOT / "docs/protocol.md").read_text()
    files = sorted((ROOT / "tests/protocol").glob("test_counterexamples*.py"))
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    tests = [n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    assert len(files) == 5 and [name for name in tests if f"`{name}" not in page] == []


# -- the derivation of the error bound (docs/protocol.md, "Exactness")


def excess(gaps: list[float]) -> tuple[float, float]:
    """What the weights' errors add to the sum beyond the credit of the additions, and the same less 0.77 d_i."""
    weights = [math.exp(-gap) for gap in gaps]
    total = math.fsum(weights)
    added = 0.0
    for k, (weight, gap) in enumerate(zip(weights, gaps, strict=True), 1):
        error = 2.23 * gap + 1.35 if gap > 0 else 0.0
        added += weight / total * (error - max(k - 2, 0))
    smallest = min((gap for gap in gaps if gap > 0), default=0.0)
    return added, added - 0.77 * smallest


def test_the_constants_of_the_error_bound() -> None:
    """Over random LSEs, and over the family of the worst ones: gaps that grow by 1 / 2.23 from the third shard on."""
    generator = random.Random(1)
    cases = [
        sorted([0.0, *(generator.random() * generator.choice((1, 4, 12)) for _ in range(num_ranks - 1))])
        for num_ranks in (2, 3, 4, 8, 16, 64)
        for _ in range(300)
    ]
    grid = [i / 20 for i in range(61)]
    cases += [
        sorted([0.0, second, *(third + i / 2.23 for i in range(num_ranks - 2))])
        for num_ranks in (2, 3, 8, 64)
        for second in grid
        for third in grid
        if num_ranks < 64 or (second < 2 and 1 < third < 2)
    ]
    largest = [max(values) for values in zip(*map(excess, cases), strict=True)]
    assert 1.75 < largest[0] <= 1.84
    assert 1.35 < largest[1] <= 1.40
    # With that, both totals of the page stay below 2W + 4 + 3 d.
    assert 1 + largest[0] <= 4
    assert 1 + 1.35 + largest[1] <= 4


# -- commands


def commands(page: Path) -> list[str]:
    """What a page tells to type after `dcpkernels`, in blocks of any kind."""
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"^ *(?:\$ )?dcpkernels ((?:demo|bench|plan|doctor)\b[^#\n]*)", text, re.MULTILINE)
    return [" ".join(command.split()) for command in found]


@pytest.mark.parametrize(
    "command", sorted({command for page in PAGES for command in commands(page)}), ids=lambda command: command[:60]
)
def test_commands_of_the_pages_are_understood(command: str) -> None:
    args = parser().parse_args(shlex.split(command))
    assert callable(args.run)


def test_commands_are_found() -> None:
    assert len(commands(ROOT / "README.md")) >= 4 and len(commands(ROOT / "docs/cli.md")) >= 12
    with pytest.raises(SystemExit):
        parser().parse_args(["bench", "a2a_lse_reduce", "--no-such-option"])


def test_the_page_of_the_command_line_has_all_commands() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    (choices,) = [action.choices for action in parser()._actions if action.choices]
    assert sorted(sections) == sorted(choices)
