"""The reader of AMD's assembly, on text: what the compilers here do not happen to emit."""

from __future__ import annotations

import pytest

from tests.isa import amd_lint
from tests.isa.amd_flow import Function
from tests.isa.compiled import (
    ACQUIRE_LOAD,
    BARRIER,
    CSRC,
    PUBLISH_BARRIER,
    RELEASE_STORE,
    STORE_BEHIND,
    Instruction,
)


def function(text: str) -> Function:
    """Assembly by hand: `.LBB0_1:` is a label, and what comes behind ` @ ` the line of a row."""
    made = Function()
    for row in filter(None, map(str.strip, text.splitlines())):
        code, _, line = row.partition(" @ ")
        if code.endswith(":"):
            made.labels[code[:-1]] = len(made.instructions)
        else:
            made.instructions.append(Instruction(code, (line or "core/channel.h:1",)))
    return made


DONE = f"arch/hip.h:{amd_lint.lines_of('publish_done', CSRC)[1]}"
FLAG = "global_store_dwordx2 v[0:1], v[2:3], off sc0 sc1"
LINTED = {
    # what is wrong, or None -> assembly
    "a wait": (None, f"buffer_wbl2 sc0 sc1\n s_waitcnt vmcnt(0)\n {FLAG}\n s_endpgm"),
    "no wait": ("hazard 1", f"buffer_wbl2 sc0 sc1\n {FLAG}\n s_endpgm"),
    "a wait for all but one": ("hazard 1", f"buffer_wbl2 sc0 sc1\n s_waitcnt vmcnt(1)\n {FLAG}\n s_endpgm"),
    "a wait for shared memory": ("hazard 1", f"buffer_wbl2 sc0 sc1\n s_waitcnt lgkmcnt(0)\n {FLAG}\n s_endpgm"),
    "a wait for both": (None, f"buffer_wbl2 sc0 sc1\n s_waitcnt vmcnt(0) lgkmcnt(0)\n {FLAG}\n s_endpgm"),
    "an atomic flag": ("hazard 1", "buffer_wbl2 sc0 sc1\n global_atomic_swap_x2 v[0:1], v[2:3], off sc1\n s_endpgm"),
    "no wait before a barrier": ("hazard 1", "buffer_wbl2 sc0 sc1\n s_barrier\n s_endpgm"),
    "a branch around the wait": ("hazard 1", f"""
        buffer_wbl2 sc0 sc1
        s_cbranch_scc1 .LBB0_1
        s_waitcnt vmcnt(0)
        .LBB0_1:
        {FLAG}
        s_endpgm"""),
    "a wait on both ways": (None, f"""
        buffer_wbl2 sc0 sc1
        s_cbranch_vccnz .LBB0_1
        s_waitcnt vmcnt(0)
        s_branch .LBB0_2
        .LBB0_1:
        s_waitcnt vmcnt(0)
        .LBB0_2:
        {FLAG}
        s_endpgm"""),
    "below in the text, and before it in time": ("hazard 1", f"""
        s_branch .LBB0_2
        .LBB0_1:
        {FLAG}
        s_endpgm
        .LBB0_2:
        buffer_wbl2 sc0 sc1
        s_branch .LBB0_1"""),
    "above in the text, and never before it": (None, f"""
        s_cbranch_scc0 .LBB0_1
        buffer_wbl2 sc0 sc1
        s_endpgm
        .LBB0_1:
        {FLAG}
        s_endpgm"""),
    "the next turn": ("hazard 1", f"""
        .LBB0_1:
        {FLAG}
        buffer_wbl2 sc0 sc1
        s_cbranch_scc1 .LBB0_1
        s_endpgm"""),
    "a store that no compiler sees": ("hazard 2", "asm: global_store_dwordx4 v[0:1], v[2:5], off\n s_endpgm"),
    "a load that no compiler sees": ("hazard 2", "asm: global_load_dwordx4 v[2:5], v[0:1], off\n s_endpgm"),
    "a store in flight": ("hazard 3", f"global_store_dwordx4 v[0:1], v[2:5], off nt\n s_barrier @ {DONE}\n s_endpgm"),
    "a store that was waited for": (None, f"""
        global_store_dwordx4 v[0:1], v[2:5], off nt
        s_waitcnt vmcnt(0)
        s_barrier @ {DONE}
        s_endpgm"""),
    "another barrier": (None, "global_store_dword v[0:1], v2, off\n s_barrier\n s_endpgm"),
    "a store of the turn before": ("hazard 3", f"""
        s_waitcnt vmcnt(0)
        .LBB0_1:
        s_barrier @ {DONE}
        global_store_dword v[0:1], v2, off
        s_cbranch_execnz .LBB0_1
        s_endpgm"""),
    "a store on one way": ("hazard 3", f"""
        s_cbranch_execz .LBB0_1
        global_store_dword v[0:1], v2, off
        .LBB0_1:
        s_barrier @ {DONE}
        s_endpgm"""),
    "an early invalidation": ("an invalidation before its load has returned", """
        global_load_dwordx2 v[0:1], v[2:3], off sc0 sc1
        buffer_inv sc0 sc1
        s_endpgm"""),
    "scratch": ("scratch memory", "scratch_store_dword off, v0, s32\n s_endpgm"),
    "flat": ("flat memory", "flat_load_dword v0, v[2:3]\n s_endpgm"),
    "a call": ("control flow", "s_swappc_b64 s[30:31], s[2:3]\n s_endpgm"),
    "a branch to nowhere": ("control flow", "s_branch .LBB0_7"),
    "no end": ("control flow", "s_nop 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", LINTED)
def test_lint(case: str) -> None:
    finding, text = LINTED[case]
    found = amd_lint.lint(function(text))
    assert [text.split(":")[0].split(",")[0] for text in found] == ([finding] if finding else [])


def kinds(text: str) -> list[str]:
    return [event.kind for event in amd_lint.ordered_events(function(text))]


def test_events_hold_on_every_path() -> None:
    released = f"buffer_wbl2 sc0 sc1\n s_waitcnt vmcnt(0)\n {FLAG}\n s_endpgm"
    assert kinds(released) == [RELEASE_STORE]
    assert kinds("s_cbranch_scc1 .LBB0_1\n" + released.replace(FLAG, f".LBB0_1:\n {FLAG}")) == []
    assert kinds(released.replace(FLAG, f"global_store_dword v[4:5], v6, off\n {FLAG}")) == []
    assert kinds(released.replace("sc0 sc1\n s_wait", "sc1\n s_wait")) == [STORE_BEHIND]  # written back for this device
    load = "global_load_dwordx2 v[0:1], v[2:3], off sc0 sc1"
    assert kinds(f"{load}\n s_waitcnt vmcnt(0)\n buffer_inv sc0 sc1\n s_endpgm") == [ACQUIRE_LOAD]
    assert kinds(f"{load}\n s_waitcnt vmcnt(0)\n buffer_inv sc1\n s_endpgm") == []
    assert kinds(f"{load}\n s_waitcnt vmcnt(0)\n buffer_inv sc0 sc1 @ core/channel.h:2\n s_endpgm") == []
    fence = "buffer_wbl2 sc0 sc1 @ core/channel.h:2\n s_waitcnt vmcnt(0) @ core/channel.h:2\n"  # of another call
    assert kinds(f"{fence} {FLAG}\n s_endpgm") == []
    assert kinds("s_waitcnt vmcnt(0)\n s_barrier\n s_endpgm") == [PUBLISH_BARRIER]
    assert kinds("s_waitcnt vmcnt(0)\n .LBB0_1:\n s_barrier\n s_cbranch_scc1 .LBB0_2\n s_endpgm\n .LBB0_2:\n "
                 "global_load_dword v0, v[2:3], off\n s_branch .LBB0_1") == [BARRIER]  # fmt: skip
