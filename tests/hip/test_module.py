"""dcpkernels._C_hip on a machine without a GPU: it imports, and says what is missing whatever is asked of it."""

import os
import re
import struct
import subprocess
import sys

import pytest
import torch

from dcpkernels import DcpUnsupported, Workspace, WorkspaceConfig
from dcpkernels.testing import run_ranks
from tests.cuda.test_module import CALLS, COMPUTES, found_by_calls
from tests.hip import built

CALLS_OF_HIP = CALLS.replace("_C_cuda", "_C_hip").replace('isa="cuda"', 'isa="hip"')


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """The folder of a ROCm runtime."""
    built.module_file()
    return built.stub_library(tmp_path_factory.mktemp("stub")).parent


def test_every_call_says_that_there_is_no_runtime():
    built.module_file()
    found = found_by_calls(CALLS_OF_HIP)
    assert set(found["rest"]) == COMPUTES
    text = "DcpUnsupported: target hip: a ROCm runtime must be installed (no ROCm runtime: libamdhip64.so.7: cannot open shared object file: No such file or directory)"
    assert found["raised"] and set(found["raised"].values()) == {text}, found


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (
            {"STUB_HIP_DEVICES": "0"},
            "must find a device (no device: hipErrorNoDevice, error 100: no ROCm-capable device is detected",
        ),
        (
            {"STUB_HIP_LOAD": "209"},
            "device 0 must run this module's code (Stub 0: hipErrorNoBinaryForGpu, error 209: an error",
        ),
    ],
)
def test_a_runtime_of_no_use(env, text, stub):
    found = found_by_calls(CALLS_OF_HIP, LD_LIBRARY_PATH=str(stub), **env)
    assert all(raised.startswith("DcpUnsupported: target hip: ") for raised in found["raised"].values()), found
    assert all(text in raised for raised in found["raised"].values()), found


def test_a_runtime_that_lacks_a_function(tmp_path):
    built.module_file()
    source = tmp_path / "old.c"
    source.write_text("int hipGetDeviceCount(int* n) { *n = 1; return 0; }\n")
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{built.SONAME}"]
    subprocess.run(["gcc", str(source), *flags, "-o", str(tmp_path / built.SONAME)], check=True)
    found = found_by_calls(CALLS_OF_HIP, LD_LIBRARY_PATH=str(tmp_path))
    assert set(found["raised"].values()) == {
        "DcpUnsupported: target hip: a ROCm runtime must be installed (no ROCm runtime: it has no hipGetDevice)"
    }


def test_a_runtime_that_lacks_a_library_of_its_own(tmp_path):
    """It is there, which says more than that libamdhip64.so is not."""
    built.module_file()
    (tmp_path / "own.c").write_text("int own(void) { return 0; }\n")
    (tmp_path / "hip.c").write_text("int own(void); int hipGetDevice(void) { return own(); }\n")
    for name, more in (("libown_of_hip.so", ["own.c"]), (built.SONAME, ["hip.c", "-L.", "-lown_of_hip"])):
        subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", *more, "-o", name], check=True, cwd=tmp_path)
    (tmp_path / "libown_of_hip.so").unlink()
    found = found_by_calls(CALLS_OF_HIP, LD_LIBRARY_PATH=str(tmp_path))
    assert all("(no ROCm runtime: libown_of_hip.so: cannot open" in raised for raised in found["raised"].values()), (
        found
    )


def test_a_fork_is_told(stub):
    code = (
        "import os\nfrom dcpkernels import _C_hip as m\nm.require_device()\n"
        "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nelse:\n"
        "  try: m.require_device()\n  except Exception as error: print(type(error).__name__, error, flush=True)\n  os._exit(0)"
    )
    env = os.environ | {"LD_LIBRARY_PATH": str(stub)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.startswith("DcpUnsupported target hip: a process that was forked after the ROCm runtime")


TWO_DEVICES = """
from dcpkernels import _C_hip as m
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
words = (ctypes.c_uint64 * 6)()

def launch(device):
    return m.link_check(
        rank=0, bases=[4096], bases_table=8192, multicast=0, multicast_view=0, offset=0, nonce=1, timeout_ns=1, num_spins=1,
        num_yields=0, result=ctypes.addressof(words), isa="auto", stream=0, device=device)

for device in (2, 5, 2):
    assert m.load_kernels(wire=0, dtype=2, device=device), m.launch_fault()
    assert launch(device) == 0 and launch(device) == 0 and library.shim_device() == device, m.launch_fault()
library.shim_fail_next()
assert launch(2) == m.STATUS_LAUNCH_FAILED
print(m.launch_fault())
"""


def test_kernels_are_loaded_for_each_device(stub):
    command = [sys.executable, "-c", TWO_DEVICES, str(stub / built.SONAME)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "hipModuleLaunchKernel: hipErrorLaunchOutOfResources, error 701: an error\n", done.stderr


def test_a_device_that_is_not_there(stub):
    code = "from dcpkernels import _C_hip as m; m.require_device(device=8)"
    env = os.environ | {"LD_LIBRARY_PATH": str(stub)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert "DcpUnsupported: target hip: device must be below the number of devices, 8 (got 8)" in done.stderr


def test_the_runtime_that_is_loaded_is_the_one_that_is_used(stub, tmp_path):
    """PyTorch brings its own, under a name that no search path has: there must not be a second one."""
    library = tmp_path / "libamdhip64.so.6.4.60401"
    library.write_bytes((stub / built.SONAME).read_bytes())
    code = (
        f"import ctypes; ctypes.CDLL({str(library)!r}); from dcpkernels import _C_hip as m; m.require_device()\n"
        "maps = open('/proc/self/maps').read(); print({row.split()[-1] for row in maps.splitlines() if 'libamdhip64' in row})"
    )
    env = os.environ | {"LD_LIBRARY_PATH": str(stub)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.stdout == f"{{{str(library)!r}}}\n", done.stderr


def test_import_loads_no_runtime(stub):
    code = "import dcpkernels, dcpkernels._C_hip; print('libamdhip64' in open('/proc/self/maps').read())"
    env = os.environ | {"LD_LIBRARY_PATH": str(stub)}
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
        == "False\n"
    )


def _on_rocm(group):
    torch.version.hip = "7.1.25424"
    with pytest.raises(DcpUnsupported, match="target hip: a ROCm runtime must be installed") as raised:
        Workspace(group, device="cuda", config=WorkspaceConfig(8, 64, 4))
    with pytest.raises(DcpUnsupported, match="cuda_heap must be 'driver' on AMD GPUs"):
        Workspace(group, device="cuda", config=WorkspaceConfig(8, 64, 4, cuda_heap="torch"))
    with pytest.raises(DcpUnsupported, match=r"packet_bytes must be 8 or 16 on AMD GPUs \(got 128\)"):
        Workspace(group, device="cuda", config=WorkspaceConfig(8, 64, 4, wire="packet", packet_bytes=128))
    return str(raised.value)


def test_a_workspace_on_a_rocm_build_of_torch_takes_this_target():
    built.module_file()
    assert len(set(run_ranks(_on_rocm, 3, mode="process"))) == 1


def test_both_modules_have_the_same_functions():
    built.module_file()
    from dcpkernels import _C_cpu, _C_hip

    assert set(dir(_C_cpu)) == set(dir(_C_hip))
    assert _C_hip.built_variants == ["hip"]


def test_nothing_of_rocm_is_linked():
    shown = subprocess.run(
        ["readelf", "-d", str(built.module_file())], capture_output=True, text=True, check=True
    ).stdout
    libraries = re.findall(r"NEEDED.*\[(.*)\]", shown)
    assert libraries and not [name for name in libraries if re.search("hip|hsa|rocm|comgr", name)]


def test_fat_binaries_hold_every_code_object():
    """What clang-offload-bundler writes: a code object of each architecture, at the start of a page."""
    data, count = built.module_file().read_bytes(), 0
    archs = built.code_objects()
    sources = {path.name.partition(".")[0] for path in archs["gfx942"]}
    for magic in re.finditer(b"__CLANG_OFFLOAD_BUNDLE__", data):
        at, count = magic.start(), count + 1
        (num_entries,) = struct.unpack_from("<Q", data, at + 24)
        entry, found = at + 32, {}
        for _ in range(num_entries):
            offset, size, length = struct.unpack_from("<QQQ", data, entry)
            triple = data[entry + 24 : entry + 24 + length].decode()
            entry += 24 + length
            found[triple] = data[at + offset : at + offset + size]
            assert at % 4096 == 0 and offset % 4096 == 0
        assert found.pop("host-x86_64-unknown-linux-gnu-") == b""
        for triple, code in found.items():
            assert code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == 224  # EM_AMDGPU
            assert code[7:9] == b"\x40\x03"  # for HSA, code object version 5: ROCm 6.2 loads no later one
            assert code in [path.read_bytes() for path in archs[triple.removeprefix("hipv4-amdgcn-amd-amdhsa--")]]
        assert {triple.removeprefix("hipv4-amdgcn-amd-amdhsa--") for triple in found} == set(archs)
    assert count == len(sources) or (count == len(sources) - 1 and "device" in sources)  # device.cc has no kernel
    assert set(archs) == {"gfx942", "gfx950"} or os.environ.get("DCPKERNELS_REQUIRE_ISA") != "1"
