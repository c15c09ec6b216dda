"""How many kernels an op comes to, whatever T is: one; and one for each half of a chunk. The objects are those of the
modules; only their runtimes are not there (launch_shim.cpp, tests/hip/stub_hip.cpp)."""

import ctypes
import dataclasses
import re

import pytest
import torch

from dcpkernels import (
    DcpDeviceError,
    DcpTimeout,
    KVGatherPlan,
    Workspace,
    WorkspaceConfig,
    a2a_lse_reduce,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
    release_query,
)
from dcpkernels._faults import TIMEOUT
from dcpkernels.testing import RankFailure, run_ranks
from tests.a2a_calls import attempt
from tests.cuda import built
from tests.cuda.fake_device import FakeCudaDevice, fake_machine, on_fake_gpus
from tests.hip import built as hip_built

HEADS, DIM, CAPACITY, NUM_RANKS = 16, 64, 128, 2
CONFIG = WorkspaceConfig(
    HEADS, DIM, CAPACITY, torch.bfloat16, query_head_dim=96, kv_chunk_rows=64, kv_dim=96, kv_dtype=torch.float16
)
NUM_TOKENS = (0, 1, 2, 7, 127, 128)
OVER_CAPACITY = (129, 1000)
STREAM, MULTICAST = 0x5EA, 0x7700 << 32


COUNTING = {"cuda": built.counting_build, "hip": hip_built.counting_module}


@pytest.fixture(scope="module", params=COUNTING)
def target(request):
    return request.param


@pytest.fixture(scope="module")
def counted(target, tmp_path_factory):
    """run(body, **fields): body(workspace, launches) with a workspace on fake GPUs, kernels counted and not run. One rank
    makes calls: none of them waits."""
    module, shim = COUNTING[target](tmp_path_factory.mktemp("counting"))
    shim.shim_stream.restype = shim.shim_seen.restype = ctypes.c_size_t

    class Device(FakeCudaDevice):
        def _check_links(self, *args):  # would wait for what a kernel writes
            pass

        def current_stream(self):
            return STREAM

        def endpoint_fields(self):
            return super().endpoint_fields() | {"multicast": MULTICAST}

    def run(body, **fields):
        fake, config = fake_machine(1), dataclasses.replace(CONFIG, **fields)

        def rank(group):
            with Workspace(group, config=config, backend="direct") as workspace:
                if group.rank == 0:
                    body(workspace, Launches(shim))
                group.all_gather_object(None)

        with on_fake_gpus(fake, 0, module, Device):
            run_ranks(rank, NUM_RANKS)

    return run


class Launches:
    def __init__(self, shim):
        self.shim = shim

    def of(self, call):
        """How many launches `call` comes to; each by all channels, on the caller's stream, and not a cooperative one."""
        self.shim.shim_reset()
        call()
        num = self.shim.shim_num_launches()
        if num:
            assert self.shim.shim_stream() == STREAM and not self.shim.shim_is_cooperative()
            assert self.shim.shim_num_threads() == 512
        # A kernel that is loaded while another one of the process waits for a peer might wait for that one.
        assert self.shim.shim_num_not_loaded() == 0
        return num

    @property
    def num_blocks(self):
        return self.shim.shim_num_blocks()


def tensors(num_tokens, dtype=torch.bfloat16):
    return torch.zeros(num_tokens, HEADS, DIM, dtype=dtype), torch.zeros(num_tokens, HEADS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "wire",
    [{}, *({"wire": "packet", "packet_bytes": size} for size in (8, 16, 128))],
    ids=["bulk", "packets of 8", "packets of 16", "packets of 128"],
)
def test_a2a_lse_reduce_is_one_launch(counted, target, dtype, wire):
    def body(workspace, launches):
        for num_tokens in NUM_TOKENS + OVER_CAPACITY:
            partial_out, partial_lse = tensors(num_tokens, dtype)

            def call():
                a2a_lse_reduce(partial_out, partial_lse, workspace=workspace, lse_base="e", return_lse=True)  # noqa: B023

            assert launches.of(call) == 1, num_tokens
            assert launches.num_blocks == 24  # a block a channel: fewer than an H100 runs at once

    if target == "hip" and wire.get("packet_bytes") == 128:  # no such kernel; Workspace says so before it comes to this
        with pytest.raises(RankFailure, match="device cuda:0 must load the kernels"):
            counted(body, dtype=dtype, **wire)
    else:
        counted(body, dtype=dtype, **wire)


@pytest.mark.parametrize("scale", [None, 0.5, torch.tensor([0.5])], ids=["bytes", "number", "tensor"])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_query_gather_is_one_launch(counted, scale, num_parts):
    def body(workspace, launches):
        for num_tokens in NUM_TOKENS + OVER_CAPACITY:
            dtype = torch.bfloat16 if scale is None else torch.float8_e4m3fn
            query = torch.zeros(num_tokens, HEADS // NUM_RANKS, 96, dtype=torch.bfloat16)
            parts = query if num_parts == 1 else query.split([64, 32], dim=2)
            out = torch.zeros(num_tokens, HEADS, 96, dtype=dtype) if num_tokens > CAPACITY else None
            assert launches.of(lambda: query_gather(parts, workspace=workspace, scale=scale, out=out)) == 1  # noqa: B023
            assert launches.num_blocks == 24
            assert launches.of(lambda: release_query(workspace=workspace)) == 1

    counted(body)


def test_kv_gather_is_one_launch_and_one_for_each_half(counted):
    def body(workspace, launches):
        cache = torch.zeros(9, 16, 96, dtype=torch.float16)
        lengths, tables = [100, 0, 150], [[0, 1, 2, 3], [4], [4, 5, 6, 7, 8]]
        plan = KVGatherPlan(lengths, tables, block_size=16, num_ranks=NUM_RANKS, rank=0, chunk_size=64)
        assert plan.num_chunks == 4
        for i in range(plan.num_chunks):
            assert launches.of(lambda: kv_gather_start(cache, plan, i, workspace=workspace)) == 1  # noqa: B023
            assert launches.num_blocks == 24
            assert launches.of(lambda: kv_gather_wait(plan, i, workspace=workspace)) == 1  # noqa: B023
        for i in range(plan.num_chunks):
            assert launches.of(lambda: kv_gather(cache, plan, i, workspace=workspace)) == 1  # noqa: B023
            assert launches.num_blocks == 24
        # What dequantises has to be a kernel behind the one that stores this rank's rows.
        cache = torch.zeros(9, 16, 192, dtype=torch.float8_e4m3fn)
        for i in range(plan.num_chunks):
            assert launches.of(lambda: kv_gather(cache, plan, i, scale=0.5, workspace=workspace)) == 2  # noqa: B023

    counted(body)


def test_channels_are_blocks(counted):
    def body(workspace, launches):
        def call():
            a2a_lse_reduce(*tensors(3), workspace=workspace, lse_base="e", lane=1)

        assert launches.of(call) == 1 and launches.num_blocks == 5

    counted(body, num_channels=5, num_lanes=2)


def test_a_launch_that_the_device_refuses(counted):
    def body(workspace, launches):
        launches.shim.shim_fail_next()

        def call():
            a2a_lse_reduce(*tensors(3), workspace=workspace, lse_base="e")

        raised = attempt(call)
        assert type(raised.error) is DcpDeviceError and "refused the launch" in str(raised.error)
        assert launches.of(call) == 1  # nothing was lost

    counted(body)


@pytest.mark.parametrize(("widths", "by_multicast"), [([96], True), ([64, 32], True), ([60, 36], False)])
def test_parts_without_units_go_to_each_rank(counted, widths, by_multicast):
    """A multicast store is of 16 bytes at a multiple of 16: a head of 96 elements in parts of 60 and 36 does not fit that."""

    def body(workspace, launches):
        parts = torch.zeros(3, HEADS // NUM_RANKS, 96, dtype=torch.bfloat16).split(widths, dim=2)
        launches.shim.shim_look_at_queries()
        query_gather(parts, workspace=workspace)
        assert launches.shim.shim_seen() == (MULTICAST if by_multicast else 0)

    counted(body)


def test_a_fault_that_a_kernel_left_is_raised_by_the_next_call(counted):
    def body(workspace, launches):
        device = workspace._impl._device
        record = (ctypes.c_uint64 * 8).from_address(device.heap.host_control)  # FaultRecord; it comes first
        epoch, ranks, waited_ns = 7, 0b10, 3 * 10**9
        call = workspace._module.call_descriptor(op=1, lane=0, dtype=2, lse_base=0, num_tokens=3)
        record[1:8] = [1, ranks, 0, epoch, call, 0, waited_ns]
        record[0] = TIMEOUT << 56 | 0 << 48 | 1 << 40 | 1 << 32 | epoch

        def merge():
            a2a_lse_reduce(*tensors(3), workspace=workspace, lse_base="e")

        for call in (merge, lambda: release_query(workspace=workspace), workspace.check):
            raised = []
            assert launches.of(lambda: raised.append(attempt(call))) == 0  # noqa: B023
            assert type(raised[0].error) is DcpTimeout and raised[0].error.ranks == (1,)
            assert "num_tokens=3" in str(raised[0].error) and "after 3.0 s" in str(raised[0].error)

    counted(body)


def test_ops_use_of_the_runtime_what_a_capture_allows():
    """No allocation, copy, memset, synchronisation or event: nothing that a graph would record, or refuse."""
    allowed = {
        "cudaDriverGetVersion", "cudaGetDeviceCount", "cudaGetDeviceProperties", "cudaGetErrorName", "cudaGetErrorString",
        "cudaFuncGetAttributes", "cudaGetDevice", "cudaGetLastError", "cudaLaunchKernelExC", "cudaSetDevice",
    }  # fmt: skip
    used = set().union(*(built.undefined_symbols(path) for path in built.objects()))
    registration = r"__cuda(Register|Unregister|PopCallConfiguration|GetKernel|LaunchKernel)"
    assert {name for name in used if "cuda" in name.lower() and not re.match(registration, name)} <= allowed
