"""dcpkernels._C_cuda on a machine without a GPU: it imports, and says what is missing whatever is asked of it."""

import json
import os
import re
import subprocess
import sys

import pytest

from dcpkernels import DcpUnsupported, Workspace, WorkspaceConfig
from dcpkernels.testing import run_ranks
from tests.cuda import built

# Every way into the module that leads to a device. Plans, and lanes of kv_gather, take an Endpoint.
CALLS = """
import json, sys
from dcpkernels import _C_cuda as m
control = m.ControlLayout(fault_offset=0, streams_offset=64, stream_bytes=192, flags_offset=256, flags_bytes=128,
                          num_streams=1, num_channels=1)
staging = m.StagingLayout(offset=0, row_bytes=64, num_rows=1)
geometry = m.A2aLseReduceGeometry(
    wire=0, dtype=0, lane=0, stream_idx=0, num_ranks=1, num_local_heads=1, head_dim=8, max_round_rows=1, staging=staging,
    lse_in_row=32, unpacked=staging, buffer_offset=0, buffer_bytes=0, all_buffers_offset=0, all_buffers_bytes=0,
    query_stream_idx=-1)
calls = {
    "Endpoint": lambda: m.Endpoint(
        rank=0, bases=[4096], gather_bases=[4096], multicast=0, bases_table=8192, host_control=12288, device=0, reserved=[],
        socket_fds=[-1], control=control, timeout_ns=1, first_timeout_ns=1, num_spins=1, num_yields=0, isa="auto"),
    "A2aLseReduceExchange": lambda: m.A2aLseReduceExchange(
        isa="cuda", rank=0, geometry=geometry, lse_dtype=0, lse_base=0, num_tokens=1, num_seqs=-1, strides=[8] * 8),
    "link_check": lambda: m.link_check(
        rank=0, bases=[4096], bases_table=8192, multicast=0, multicast_view=0, offset=0, nonce=1, timeout_ns=1, num_spins=1,
        num_yields=0, result=4096, isa="auto"),
    "load_kernels": lambda: m.load_kernels(wire=0, dtype=0, device=0),
    "require_device": lambda: m.require_device(0),
}
raised = {}
for name, call in calls.items():
    try:
        call()
        raised[name] = "nothing"
    except Exception as error:
        raised[name] = f"{type(error).__name__}: {error}"
# What is left only computes: offsets, descriptors, and the words of a region in memory of the host.
rest = {name for name in dir(m) if callable(getattr(m, name)) and name not in calls}
print(json.dumps({"raised": raised, "rest": sorted(rest)}))
"""
COMPUTES = {
    "A2aLseReduceGeometry", "A2aLseReducePlan", "ControlLayout", "KvGatherLane", "KvGatherSource", "QueryGatherPlan",
    "StagingLayout", "call_descriptor", "call_digest", "chunk_descriptor", "init_region", "launch_fault",
    "query_descriptor", "release_descriptor",
}  # fmt: skip

# A driver that answers just what the runtime asks first.
DRIVER = """
#include <dlfcn.h>
#include <stddef.h>
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int* count) { *count = 0; return 0; }
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long flags, int* found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (found != NULL) *found = *function != NULL ? 0 : 1;
  return *function != NULL ? 0 : 500;
}
int cuGetProcAddress(const char* name, void** function, int version, unsigned long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
"""


def found_by_calls(calls=CALLS, **env):
    done = subprocess.run([sys.executable, "-c", calls], capture_output=True, text=True, check=False, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_call_says_that_there_is_no_driver():
    built.module_file()
    found = found_by_calls()
    assert set(found["rest"]) == COMPUTES
    text = "DcpUnsupported: target cuda: an NVIDIA driver must be installed (there is no libcuda.so.1, or it has no version)"
    assert found["raised"] and set(found["raised"].values()) == {text}, found


@pytest.mark.parametrize(
    ("version", "init", "text"),
    [
        (12040, 0, "must support CUDA 13.0, which this module was built with (it supports 12.4: update it)"),
        (13000, 100, "must find a device (cudaErrorNoDevice: no CUDA-capable device is detected)"),
        (13000, 999, "must find a device (cudaErrorUnknown: unknown error)"),
        (0, 0, "an NVIDIA driver must be installed"),
    ],
)
def test_a_driver_of_no_use(version, init, text, tmp_path):
    built.module_file()
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    flags = [f"-DVERSION={version}", f"-DINIT={init}", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-ldl"]
    subprocess.run(["gcc", str(source), *flags, "-o", str(tmp_path / "libcuda.so.1")], check=True)
    found = found_by_calls(LD_LIBRARY_PATH=str(tmp_path))
    assert all(raised.startswith("DcpUnsupported: target cuda: ") for raised in found["raised"].values()), found
    assert all(text in raised for raised in found["raised"].values()), found


def test_import_loads_no_driver():
    built.module_file()
    code = "import dcpkernels, dcpkernels._C_cuda; print('libcuda.so' in open('/proc/self/maps').read())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_workspace_says_the_same_on_all_ranks():
    built.module_file()

    def body(group):
        with pytest.raises(DcpUnsupported, match="target cuda: an NVIDIA driver must be installed") as raised:
            Workspace(group, device="cuda", config=WorkspaceConfig(8, 64, 4))
        return str(raised.value)

    assert len(set(run_ranks(body, 3))) == 1


def test_both_modules_have_the_same_functions():
    built.module_file()
    from dcpkernels import _C_cpu, _C_cuda

    assert set(dir(_C_cpu)) == set(dir(_C_cuda))
    kinds = {name: type(getattr(_C_cpu, name)) for name in dir(_C_cpu)}
    assert kinds == {name: type(getattr(_C_cuda, name)) for name in dir(_C_cuda)}
    assert _C_cuda.built_variants == ["cuda"]


def test_code_for_every_architecture():
    """What cuobjdump would list, by the file's own headers: no tool is needed."""
    data = built.module_file().read_bytes()
    # ELF images of CUDA: e_machine 190, the architecture in the second byte of e_flags (ABI of CUDA 13).
    archs = set()
    for at in (match.start() for match in re.finditer(rb"\x7fELF\x02\x01", data)):
        if int.from_bytes(data[at + 18 : at + 20], "little") == 190:
            archs.add(int.from_bytes(data[at + 48 : at + 52], "little") >> 8 & 0xFF)
    command = json.loads(built.objects()[0].with_name("kv_gather.cc.o.json").read_text())["key"]
    codes = {int(code) for code in re.findall(r"code=sm_(\d+)", " ".join(command))}
    assert archs == codes, archs
    # DCPKERNELS_CUDA_ARCHS makes quick builds with fewer.
    assert codes == {90, 100, 103, 120} or os.environ.get("DCPKERNELS_REQUIRE_ISA") != "1"
