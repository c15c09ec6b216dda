"""DCPDirectReduceWorkspace, of https://github.com/flashinfer-ai/flashinfer/pull/4586; found in `flashinfer.py`."""

from __future__ import annotations

from typing import Any

import torch

from dcpkernels.integrations import _drop_in


class DCPDirectReduceWorkspace:
    """The merge of [T, total_heads, D] with its LSE, under the name of FlashInfer's PR 4586.

    Collective, as making a `dcpkernels.Workspace`. As there, a call without `out` returns views of one buffer a slot,
    valid until the next `run` of that slot; of another slot they are not touched.

    Args:
        group: a torch.distributed process group, or its name.
        max_tokens: of the usual largest call.
        total_heads: of all ranks; rank r owns total_heads / world_size of them, from r * total_heads / world_size on.
        head_dim, dtype: of partial_output.
        num_slots: independent calls that may run at the same time: lanes of the workspace.
        device, backend, fields: as in `flashinfer.decode_cp_a2a_lse_reduce_create_workspace`.

    More than FlashInfer's: any number of ranks, up to 64, and any head_dim, where that one has 2 or 4, and 128, 256 or
    512; float32; CPUs; a deadline for every wait; ranks whose calls differ get a DcpMismatch.

    Attributes:
        group, rank, world_size, max_tokens, total_heads, local_heads, head_dim, dtype, num_slots, device;
        combined_output [num_slots, max_tokens, local_heads, D], combined_lse [num_slots, max_tokens, local_heads];
        workspace: the dcpkernels.Workspace.

    Raises:
        DcpInvalidArgument: a wrong count, or total_heads does not divide by the ranks.
        What `dcpkernels.Workspace` raises, on all ranks.
    """

    supports_output_view: bool = True

    def __init__(
        self,
        group: Any,
        max_tokens: int,
        total_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_slots: int = 1,
        *,
        device: Any = None,
        backend: str = "auto",
        **fields: Any,
    ) -> None:
        op = "DCPDirectReduceWorkspace"
        counts = {"max_tokens": max_tokens, "total_heads": total_heads, "head_dim": head_dim, "num_slots": num_slots}
        _drop_in.require_counts(op, **counts)
        if group is None:
            _drop_in.fail(op, "group must be a process group or its name", "None")
        config = _drop_in.make_config(op, total_heads, head_dim, max_tokens, dtype, fields, num_lanes=num_slots)
        self._slots = _drop_in.Slots(group, device, config, backend)
        self.workspace = self._slots.workspace
        self.group, self.rank, self.world_size = group, self.workspace.rank, self.workspace.num_ranks
        self.max_tokens, self.total_heads, self.local_heads = max_tokens, total_heads, self.workspace.num_local_heads
        self.head_dim, self.dtype, self.num_slots = head_dim, dtype, num_slots
        self.device = torch.device(self.workspace.device)
        self.combined_output, self.combined_lse = self._slots.output, self._slots.lse

    def run(
        self,
        partial_output: torch.Tensor,
        partial_lse: torch.Tensor,
        *,
        slot: int = 0,
        is_lse_base_on_e: bool = True,
        out: torch.Tensor | None = None,
        lse_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`dcpkernels.a2a_lse_reduce`: (out [T, local_heads, D], lse float32 [T, local_heads]).

        Args:
            partial_output: [T, total_heads, D], unit stride in the last dim.
            partial_lse: [T, total_heads], float32 (also float16, bfloat16).
            slot: in 0 .. num_slots - 1.
            is_lse_base_on_e: of what base partial_lse and the result are: e, or 2.
            out, lse_out: where the result goes, both or neither; None: views of combined_output[slot] and
                combined_lse[slot].

        More than FlashInfer's: T = 0; T above max_tokens, in several rounds, and then into new tensors; any token and
        head strides, of out and lse_out too.

        Raises DcpInvalidArgument for a wrong argument; otherwise as `dcpkernels.a2a_lse_reduce`.
        """
        op = "DCPDirectReduceWorkspace.run"
        base = _drop_in.lse_base(op, is_lse_base_on_e)
        self._slots.require_slot(op, "slot", slot)
        if (out is None) != (lse_out is None):
            given = "lse_out" if out is None else "out"
            _drop_in.fail(op, "out and lse_out must be given both, or neither", f"only {given}")
        _drop_in.require_tensor(op, "partial_output", partial_output, "[T, total_heads, D]")
        return self._slots.merge(partial_output, partial_lse, slot, base, out, lse_out)

    def close(self) -> None:
        """`Workspace.close`: collective."""
        self.workspace.close()
