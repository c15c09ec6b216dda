"""What a2a_lse_reduce refuses, and in which words: nothing is sent, nothing is written, the workspace goes on.

What it takes is in test_a2a_layouts.py.
"""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.testing import ThreadGroup, run_ranks, unchanged
from tests.a2a_calls import assemble, make_call

T, W, H, D = 3, 2, 8, 64
HR = H // W
DTYPE = torch.bfloat16
CONFIG = WorkspaceConfig(H, D, 8, dtype=DTYPE, num_lanes=2, timeout_s=2.0, first_call_timeout_s=2.0)

PAYLOAD, LSE, OUT = torch.ones(T, H, D, dtype=DTYPE), torch.zeros(T, H), torch.zeros(T, HR, D, dtype=DTYPE)
LENS, STARTS = torch.ones(T, dtype=torch.int32), torch.arange(T + 1, dtype=torch.int32)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same with stride 2 in the last dim."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def wrong(name: str, texts: str, **changed):
    """Arguments to replace, and what the error has to say: the rule and what was given, parts separated by |."""
    return pytest.param(changed, texts.split("|"), id=name)


WRONG = [
    wrong("payload None", "partial_out must be a torch.Tensor (got NoneType)", partial_out=None),
    wrong("payload numpy", "partial_out must be a torch.Tensor (got ndarray)", partial_out=np.ones((T, H, D))),
    wrong("payload fp32", "partial_out must be bfloat16 (got float32)", partial_out=PAYLOAD.float()),
    wrong("payload int", "partial_out must be bfloat16 (got int16)", partial_out=PAYLOAD.view(torch.int16)),
    wrong("payload flat", "partial_out must have shape|(got [3, 512])", partial_out=PAYLOAD.flatten(1)),
    wrong("payload 4 dims", "partial_out must have shape|(got [1, 3, 8, 64])", partial_out=PAYLOAD[None]),
    wrong("payload own heads", "= [3, 8, 64] (got [3, 4, 64])", partial_out=PAYLOAD[:, :HR]),
    wrong("payload head_dim", "= [3, 8, 64] (got [3, 8, 32])", partial_out=PAYLOAD[..., :32]),
    wrong("payload stride", "partial_out must have stride 1 in its last dim (got 2)", partial_out=strided(PAYLOAD)),
    wrong("payload meta", "partial_out must be on|'cpu' (got 'meta')", partial_out=PAYLOAD.to("meta")),
    wrong("payload sparse", "partial_out must be a strided tensor", partial_out=PAYLOAD.to_sparse()),
    wrong("lse None", "partial_lse must be a torch.Tensor (got NoneType)", partial_lse=None),
    wrong("lse list", "partial_lse must be a torch.Tensor (got list)", partial_lse=LSE.tolist()),
    wrong("lse tokens", "partial_lse must have shape|= [3, 8] (got [4, 8])", partial_lse=torch.zeros(T + 1, H)),
    wrong("lse own heads", "partial_lse must have shape|= [3, 8] (got [3, 4])", partial_lse=LSE[:, :HR]),
    wrong("lse transposed", "partial_lse must have shape|= [3, 8] (got [8, 3])", partial_lse=LSE.T),
    wrong("lse 3 dims", "partial_lse must have shape|(got [3, 8, 1])", partial_lse=LSE[..., None]),
    wrong("lse fp64", "partial_lse must be float32|(got float64)", partial_lse=LSE.double()),
    wrong("lse int", "partial_lse must be float32|(got int32)", partial_lse=LSE.int()),
    wrong("lse meta", "partial_lse must be on|'cpu' (got 'meta')", partial_lse=LSE.to("meta")),
    wrong("base text", 'lse_base must be "e" or "2" (got \'10\')', lse_base="10"),
    wrong("base number", 'lse_base must be "e" or "2" (got 2)', lse_base=2),
    wrong("base None", 'lse_base must be "e" or "2" (got None)', lse_base=None),
    wrong("base list", 'lse_base must be "e" or "2" (got [\'e\'])', lse_base=["e"]),
    wrong("lane high", "lane must be in 0 .. 1|(got 2)", lane=2),
    wrong("lane negative", "lane must be in 0 .. 1|(got -1)", lane=-1),
    wrong("lane text", "lane must be in 0 .. 1|(got '0')", lane="0"),
    wrong("lane float", "lane must be in 0 .. 1|(got 0.0)", lane=0.0),
    wrong("workspace None", "workspace must be|(got NoneType)", workspace=None),
    wrong("workspace other", "workspace must be|(got object)", workspace=object()),
    wrong("lengths alone", "seq_lens and query_start_loc must be given together", seq_lens=LENS),
    wrong("starts alone", "seq_lens and query_start_loc must be given together", query_start_loc=STARTS),
    wrong("lengths int64", "seq_lens must be int32 (got int64)", seq_lens=LENS.long(), query_start_loc=STARTS),
    wrong("starts int64", "query_start_loc must be int32", seq_lens=LENS, query_start_loc=STARTS.long()),
    wrong("lengths of all ranks", "[S]|(got [3, 2])", seq_lens=LENS[:, None].repeat(1, W), query_start_loc=STARTS),
    wrong("lengths too few", "query_start_loc must|= [3] (got [4])", seq_lens=LENS[:2], query_start_loc=STARTS),
    wrong("lengths stride", "seq_lens must be contiguous", seq_lens=strided(LENS), query_start_loc=STARTS),
    wrong("starts stride", "query_start_loc must be contiguous", seq_lens=LENS, query_start_loc=strided(STARTS)),
    wrong("lengths list", "seq_lens must be a torch.Tensor (got list)", seq_lens=[1] * T, query_start_loc=STARTS),
    wrong("lengths meta", "seq_lens must be on|'meta'", seq_lens=LENS.to("meta"), query_start_loc=STARTS),
    wrong("out all heads", "out must have shape|= [3, 4, 64] (got [3, 8, 64])", out=PAYLOAD.clone()),
    wrong("out dtype", "out must be bfloat16 (got float32)", out=OUT.float()),
    wrong("out stride", "out must have stride 1 in its last dim (got 2)", out=strided(OUT)),
    wrong("out expanded", "out must not overlap itself", out=OUT[:1].expand(T, HR, D)),
    wrong("out rows overlap", "out must not overlap itself", out=OUT.as_strided((T, HR, D), (D, D, 1))),
    wrong("out list", "out must be a torch.Tensor (got list)", out=[]),
    wrong("out meta", "out must be on|'cpu' (got 'meta')", out=OUT.to("meta")),
    wrong("lse_out dtype", "lse_out must be float32 (got bfloat16)", lse_out=OUT[..., 0].contiguous()),
    wrong("lse_out shape", "lse_out must have shape|= [3, 4] (got [3, 8])", lse_out=LSE.clone()),
    wrong("lse_out expanded", "lse_out must not overlap itself", lse_out=LSE[:, :1].expand(T, HR)),
]


@pytest.mark.parametrize("changed, texts", WRONG)
def test_wrong_arguments(changed, texts):
    """Typed error in the documented form; no byte of any tensor changes; only the rank at fault sees it, and the next
    call of all ranks is right."""
    call = make_call(W, T, H, D, DTYPE, seed=4)

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            outputs = {"out": torch.full_like(OUT, 7.0), "lse_out": torch.full((T, HR), 7.0)}
            arguments = call.arguments(workspace.rank) | outputs | {"workspace": workspace}
            if workspace.rank == 1:
                watched = [v for v in (arguments | changed).values() if isinstance(v, torch.Tensor)]
                with unchanged(*(t for t in watched if t.device.type == "cpu" and t.layout == torch.strided)):
                    with pytest.raises(DcpInvalidArgument) as raised:
                        a2a_lse_reduce(**arguments | changed)
                text = str(raised.value)
                assert text.startswith("a2a_lse_reduce: ") and all(part in text for part in texts), text
                assert isinstance(raised.value, ValueError) and raised.value.ranks == ()
            workspace.check()
            return [a2a_lse_reduce(**arguments)]

    call.check(*assemble(run_ranks(body, W))[0])


@pytest.fixture
def workspace():
    """A workspace of one rank, for checks that need no peer."""
    (group,) = ThreadGroup.create(1)
    with Workspace(group, config=WorkspaceConfig(HR, D, 8, dtype=DTYPE)) as made:
        yield made


LAYOUTS = {
    "partial_out": ((T, HR, D), DTYPE),
    "partial_lse": ((T, HR), torch.float32),
    "seq_lens": ((T,), torch.int32),
    "query_start_loc": ((T + 1,), torch.int32),
    "out": ((T, HR, D), DTYPE),
    "lse_out": ((T, HR), torch.float32),
}


def neighbours(first: str, second: str, distance: int) -> dict[str, torch.Tensor]:
    """All tensors of a call; `second` starts `distance` bytes after the end of `first`, in the same memory."""
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in LAYOUTS.items()}
    memory, start = torch.zeros(2 * T * HR * D * DTYPE.itemsize, dtype=torch.uint8), 0
    for name in (first, second):
        shape, dtype = LAYOUTS[name]
        end = start + math.prod(shape) * dtype.itemsize
        tensors[name] = memory[start:end].view(dtype).view(shape)
        start = end + distance
    return tensors


@pytest.mark.parametrize("output", ["out", "lse_out"])
@pytest.mark.parametrize("other", [name for name in LAYOUTS if name != "lse_out"])
def test_outputs_must_not_overlap(workspace, output, other):
    """Not with an input, lengths included, and not with each other: 4 bytes in common are refused, at either end, and
    memory side by side is fine."""
    if output == other:
        return
    for first, second in ((output, other), (other, output)):
        tensors = neighbours(first, second, -4)
        with unchanged(*tensors.values()), pytest.raises(DcpInvalidArgument, match="share memory"):
            a2a_lse_reduce(workspace=workspace, lse_base="e", **tensors)
        a2a_lse_reduce(workspace=workspace, lse_base="e", **neighbours(first, second, 0))


def test_lse_base_is_required(workspace):
    """No default, by keyword only: a wrong base is silent, so a caller has to say it."""
    parameters = inspect.signature(a2a_lse_reduce).parameters
    assert parameters["lse_base"].default is inspect.Parameter.empty
    keyword_only = [name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert keyword_only == [name for name in parameters if name not in ("partial_out", "partial_lse")]
    with pytest.raises(TypeError, match="lse_base"):
        a2a_lse_reduce(PAYLOAD[:, :HR], LSE[:, :HR], workspace=workspace)


def test_checks_hold_for_every_call(workspace):
    """Checks are remembered per shape, not skipped: the same tensor object with another dtype, shape, stride or address
    is refused after it has been accepted."""
    partial_out, partial_lse, out = PAYLOAD[:, :HR].clone(), LSE[:, :HR].clone(), torch.empty(T, HR, D, dtype=DTYPE)

    def call():
        return a2a_lse_reduce(partial_out, partial_lse, workspace=workspace, lse_base="e", out=out)

    for tensor in (partial_out, out):
        good = tensor.data
        for bad in (good.float(), good[..., 1:], good[:, 1:], good[None], strided(good)):
            for _ in range(3):
                assert call() is out
            tensor.data = bad
            with pytest.raises(DcpInvalidArgument):
                call()
            tensor.data = good
    call()
    out.data = partial_out.data
    with unchanged(out), pytest.raises(DcpInvalidArgument, match="share memory"):
        call()


def test_a_closed_workspace_is_refused(workspace):
    arguments = {"partial_out": PAYLOAD[:, :HR], "partial_lse": LSE[:, :HR], "workspace": workspace, "lse_base": "e"}
    a2a_lse_reduce(**arguments)
    workspace.close()
    for call in (lambda: a2a_lse_reduce(**arguments), workspace.check, workspace.stats):
        with pytest.raises(DcpError, match="the workspace must be open"):
            call()


@pytest.mark.parametrize("name", ["partial_out", "partial_lse", "out"])
def test_a_lazily_negated_tensor_is_not_misread(workspace, name):
    """Torch can mark a tensor as negative instead of negating its memory. It is refused, or taken for what it is."""
    tensors = {"partial_out": PAYLOAD[:, :HR].clone(), "partial_lse": LSE[:, :HR] + 2, "out": OUT.clone()}
    tensors[name] = torch._neg_view(tensors[name])
    try:
        out, lse = a2a_lse_reduce(workspace=workspace, lse_base="e", return_lse=True, **tensors)
    except DcpInvalidArgument:
        return
    assert torch.equal(out, tensors["partial_out"]) and torch.equal(lse, tensors["partial_lse"])
