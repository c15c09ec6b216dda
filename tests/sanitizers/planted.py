"""The module of planted faults, in a copy of the checkout, and ranks that commit them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig

from tests.sanitizers.sanitized import HERE, Tree

# What a report says of each.
ADDRESS = {
    "read_past_the_end": "heap-buffer-overflow",
    "write_past_the_end": "heap-buffer-overflow",
    "use_after_free": "heap-use-after-free",
}
UNDEFINED = {
    "signed_overflow": "signed integer overflow",
    "misaligned_load": "misaligned address",
    "cast_out_of_range": "outside the range of representable values",
    "shift_too_far": "shift exponent 32 is too large",
    "copy_from_null": "null pointer passed as argument",
}

# A test of the copy, which passes whatever becomes of its ranks: so reports alone make the difference.
RANKS = """
import importlib
import torch.distributed as dist
from dcpkernels.testing import RankFailure, run_ranks

def commit(group, names):
    fault = getattr(importlib.import_module("dcpkernels._C_planted"), names[group.rank()])
    try:
        dist.barrier(group)  # a rank that has not started yet would fail to
    except RuntimeError:  # one that is through has died of its fault
        pass
    fault()

def test_ranks():
    names = {names!r}
    try:
        run_ranks(commit, len(names), names, mode="process", timeout_s=120)
    except RankFailure:
        pass
"""


def build_planted(tree: Tree) -> None:
    cxx = shlex.split(os.environ.get("DCPKERNELS_CXX") or os.environ.get("CXX") or "g++")
    target = tree.root / "dcpkernels" / f"_C_planted{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_path("include")
    checks = tree.sanitizers.replace("undefined", "undefined,float-cast-overflow")
    flags = ["-O0", "-g1", "-fno-omit-frame-pointer", f"-fsanitize={checks}"]  # as in setup.py
    command = [*cxx, "-std=c++20", "-fPIC", "-shared", "-pthread", *flags, "-isystem", include]
    done = subprocess.run(
        [*command, str(HERE / "planted.cpp"), "-o", str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def commit_in_ranks(tree: Tree, names: list[str]) -> subprocess.CompletedProcess[str]:
    """Each fault in a process of its own, a fork of a fork server."""
    path = tree.root / "tests" / "test_planted_ranks.py"
    path.write_text(RANKS.format(names=names))
    return tree.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(path), timeout_s=300)
