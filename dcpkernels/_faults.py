"""From a fault record in memory to the error that every rank raises."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dcpkernels.errors import DcpError, DcpMismatch, DcpPeerLost, DcpTimeout
from dcpkernels.heap.verdict import rank_list

# csrc/core/types.h: FaultKind, Op, DType, LseBase.
TIMEOUT, MISMATCH, PEER_LOST, INTERRUPTED, QUERY_OPEN, QUERY_ROWS, CHUNK_TURN = 1, 2, 3, 4, 5, 6, 7
A2A_LSE_REDUCE, QUERY_GATHER, RELEASE_QUERY, KV_GATHER = 1, 2, 3, 4
_DTYPE_NAMES = {
    0: "float32",
    1: "float16",
    2: "bfloat16",
    3: "float8_e4m3fn",
    4: "float8_e5m2",
    5: "float8_e4m3fnuz",
    6: "float8_e5m2fnuz",
}
_LSE_BASE_NAMES = {0: "e", 1: "2"}


def describe_call(descriptor: int) -> str:
    """The call behind a descriptor of csrc/core/digest.h, in the user's words."""
    if descriptor == 0:
        return "no call yet"
    op, lane = descriptor >> 56, descriptor >> 48 & 0xFF
    kind, detail, low = descriptor >> 44 & 0xF, descriptor >> 32 & 0xFFF, descriptor & 0xFFFFFFFF
    dtype = _DTYPE_NAMES.get(kind, kind)
    if op == A2A_LSE_REDUCE:
        base = _LSE_BASE_NAMES.get(detail >> 8, detail >> 8)
        return f"a2a_lse_reduce(num_tokens={low}, dtype={dtype}, lse_base={base!r}, lane={lane})"
    if op == QUERY_GATHER:
        return f"query_gather(num_tokens={low}, dtype={dtype}, {'out, ' if detail else ''}lane={lane})"
    if op == RELEASE_QUERY:
        return f"release_query(lane={lane})"
    if op == KV_GATHER:
        chunk = f"chunk_idx={detail} (mod 4096), dtype={_DTYPE_NAMES.get(kind >> 1, kind >> 1)}"
        return f"kv_gather({chunk}, plan={low:08x}, buffer {kind & 1}, lane={lane})"
    return f"op {op}(lane={lane})"


def fault_error(op: str, fault: dict[str, Any]) -> DcpError:
    """The error for a fault (`Endpoint.fault()`), as seen by a rank that is in, or enters, `op`."""
    kind, reporter = fault["kind"], fault["reporter"]
    ranks = tuple(rank for rank in range(64) if fault["ranks"] >> rank & 1)
    where = f"reported by rank {reporter}"
    if fault["has_record"]:
        where += f" in {describe_call(fault['my_call'])}, epoch {fault['epoch']}"
        if fault["waited_ns"]:
            where += f", after {fault['waited_ns'] / 1e9:.1f} s"
    if kind == TIMEOUT:
        late = rank_list(ranks) if ranks else "not known which"
        return DcpTimeout(f"{op}: all ranks must call in time ({late} did not; {where})", ranks=ranks)
    if kind == MISMATCH:
        calls = f"rank {reporter}: {describe_call(fault['my_call'])}; {rank_list(ranks)}: {describe_call(fault['peer_call'])}"
        if not fault["has_record"]:
            calls = f"rank {reporter} and {rank_list(ranks)} differ"
        elif fault["my_call"] == fault["peer_call"]:
            calls += ", a call ahead or behind"
        text = f"{op}: all ranks must make the same calls ({calls}; epoch {fault['epoch']})"
        return DcpMismatch(text, ranks=(reporter, *ranks))
    if kind == PEER_LOST:
        return lost_error(op, ranks, where)
    if kind == INTERRUPTED:
        return DcpError(f"{op}: no rank may be interrupted inside a call (rank {reporter} was; {where})", ranks=ranks)
    if kind == QUERY_OPEN:
        text = f"{op}: the query gathered before must have been released, by a2a_lse_reduce or release_query ({where})"
        return DcpError(text, ranks=ranks)
    if kind == QUERY_ROWS:
        calls = (
            f"{describe_call(fault['my_call'])} after {describe_call(fault['peer_call'])}; "
            if fault["has_record"]
            else ""
        )
        text = f"{op}: a2a_lse_reduce after query_gather must have its number of tokens ({calls}{where})"
        return DcpMismatch(text, ranks=ranks)
    if kind == CHUNK_TURN:
        return DcpError(f"{op}: starts, waits and buffers of chunks must take turns ({where})", ranks=ranks)
    return DcpError(f"{op}: a fault must have a known kind (got {kind}; {where})", ranks=ranks)


def lost_error(op: str, ranks: Iterable[int], where: str = "") -> DcpPeerLost:
    ranks = tuple(ranks)
    detail = f"; {where}" if where else ""
    lost = f"{rank_list(ranks)} {'is' if len(ranks) == 1 else 'are'}" if ranks else "one, not known which, is"
    return DcpPeerLost(f"{op}: all ranks must be alive ({lost} gone or closed{detail})", ranks=ranks)
