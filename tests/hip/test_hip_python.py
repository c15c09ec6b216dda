"""That hip-python itself takes what it is given, over a library that only writes down what it is called with."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tests.hip.bindings  # noqa: F401  skips this file, or fails, where there is no hip-python
from dcpkernels.errors import DcpUnsupported
from dcpkernels.heap import hip_driver, hip_library
from tests.cuda.built import ROOT, need

FUNCTIONS = set(re.findall(r'_(?:call|result)\("(hip\w+)"', Path(hip_driver.__file__).read_text()))

_ALL = """
from dcpkernels.heap.gpu_driver import FD, NONE
from dcpkernels.heap.hip_driver import Driver, load_api
driver = Driver(load_api(), 1)
assert (str(driver), driver.pci) == ("device 1, Stub 1", "0000:01:00.0")
assert driver.uuid == "62" * 16 + "@0000:01:00.0" and driver.place == "device 1, Stub 1, 0000:01:00.0, GPU-" + "b" * 16
assert driver.ordinal_of("61" * 16 + "@0000:00:00.0") == 0 and driver.ordinal_of("") is None and driver.can_access_peer(0)
assert driver.vmm_refusal() == ""
driver.open()
with driver.current():
    memory = driver.allocate(2 << 20)
    assert memory == 0x600000000 and driver.export_ipc(memory, 2 << 20) == b"HHH\\0" + b"H" * 60
    opened = driver.open_ipc(b"G" * 64, 2 << 20)
    assert opened == 0x610000000
    driver.enable_peer_access(0)
    assert driver.granularity(FD) == 4096
    handle = driver.create_memory(4 << 20, FD)
    assert driver.export_fd(handle) == 42 and int(driver.import_fd(7)) == 0x22
    address = driver.reserve(4 << 20, 2 << 20)
    driver.map(address, 4 << 20, handle)
    driver.set_access(address, 4 << 20, [0, 1])
    host = driver.host_alloc(1000)
    assert driver.host_device_address(host) == host == 0x5000
    driver.zero(address, 4 << 20)
    driver.copy_to_device(address, host, 10)
    driver.copy_from_device(host, address, 20)
    driver.wait_idle()
    driver.unmap(address, 4 << 20)
    driver.free_address(address, 4 << 20)
    driver.release(handle)
    driver.host_free(host)
    driver.close_ipc(opened)
    driver.free(memory)
driver.close()
"""

# Numbers of hip_runtime_api.h: 89 the attribute, 2 relaxed, 3 uncached, 1 a descriptor and 1 a device, 0x40000000 uncached
# memory by handles; access 3 read and write; host memory portable, mapped and coherent.
_LINES = """
hipDeviceCanAccessPeer 1 0
hipDeviceGetAttribute 89 1
hipThreadExchangeStreamCaptureMode 2
hipSetDevice 1
hipStreamCreateWithFlags 1
hipSetDevice 0
hipThreadExchangeStreamCaptureMode 0
hipExtMallocWithFlags 2097152 3
hipIpcGetMemHandle 0x600000000
hipIpcOpenMemHandle GGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGG 1
hipDeviceEnablePeerAccess 0 0
hipMemGetAllocationGranularity type=1073741824 handles=1 location=1:1 0
hipMemCreate 4194304 type=1073741824 handles=1 location=1:1 0
hipMemExportToShareableHandle 0x11 1 0
hipMemImportFromShareableHandle fd=7 1
hipMemAddressReserve 4194304 2097152 0 0
hipMemMap 0x700000000 4194304 0 0x11 0
hipMemSetAccess 0x700000000 4194304 2 1:0=3 1:1=3
hipHostMalloc 1000 0x40000003
hipHostGetDevicePointer 0x5000 0
hipMemsetD8Async 0x700000000 0 4194304 0x88
hipStreamSynchronize 0x88
hipMemcpyHtoDAsync 0x700000000 0x5000 10 0x88
hipMemcpyDtoHAsync 0x5000 0x700000000 20 0x88
hipDeviceSynchronize
hipMemUnmap 0x700000000 4194304
hipMemAddressFree 0x700000000 4194304
hipMemRelease 0x11
hipHostFree 0x5000
hipIpcCloseMemHandle 0x610000000
hipFree 0x600000000
hipStreamDestroy 0x88
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """Runs code in a process in which hip-python finds the stub library; returns (standard error, the calls)."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    need(compiler, "needs a C compiler")
    folder = tmp_path_factory.mktemp("stub")
    (folder / "lib").mkdir()
    source = Path(__file__).with_name("stub_hip.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "lib/libamdhip64.so", source], check=True)

    def run(code, fail="", version=71560940):
        log = folder / "log"
        log.write_text("")
        env = {
            "ROCM_PATH": str(folder),
            "STUB_HIP_LOG": str(log),
            "STUB_HIP_FAIL": fail,
            "STUB_HIP_VERSION": str(version),
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=False
        )
        return done.stderr, [line.rstrip() for line in log.read_text().splitlines()]

    return run


def test_hip_python_hands_over_what_is_meant(stub):
    stderr, calls = stub(_ALL)
    assert stderr == ""
    assert [line for line in _LINES.strip().splitlines() if line not in calls] == []
    assert {line.split()[0] for line in calls} == FUNCTIONS


def test_descriptor_0_is_not_a_null_pointer(stub):
    code = _ALL.replace("import_fd(7)", "import_fd(0)")
    stderr, calls = stub(code)
    (line,) = [line for line in calls if line.startswith("hipMemImport")]
    assert stderr == "" and int(re.search(r"fd=(\d+)", line)[1]) > 0


@pytest.mark.parametrize(
    ("fail", "parts"),
    [
        (
            "hipExtMallocWithFlags=2",
            ["DcpDeviceError: hipExtMallocWithFlags of 2097152 bytes must", "error 2", "(1000 of 2000 bytes are free)"],
        ),
        ("hipIpcGetMemHandle=1", ["DcpUnsupported: hipIpcGetMemHandle of 2097152 bytes", "HSA_ENABLE_IPC_MODE_LEGACY"]),
        (
            "hipDeviceEnablePeerAccess=217",
            ["DcpUnsupported: hipDeviceEnablePeerAccess", "peer device 0", "amd-smi topology"],
        ),
        ("hipGetDeviceCount=100", ["DcpUnsupported: hipGetDeviceCount must succeed on device 1 (got hipErrorNoDevice"]),
        ("hipMemMap=12345", ["DcpDeviceError: hipMemMap", "12345", "newer than hip-python"]),
    ],
)
def test_errors_of_the_library_come_through_hip_python(stub, fail, parts):
    stderr, calls = stub(_ALL, fail)
    assert all(part in stderr for part in parts), stderr
    assert "hipGetLastError" in calls or "12345" in fail  # PyTorch is not to find it


def test_peer_access_that_is_there_is_no_error(stub):
    stderr, calls = stub(_ALL, "hipDeviceEnablePeerAccess=704")
    assert stderr == "" and "hipGetLastError" in calls


def test_an_old_runtime_is_refused(stub):
    stderr, _ = stub(_ALL, version=60141134)
    assert "DcpUnsupported: the HIP runtime must be of version 6.2 or later (got 6.1.41134)" in stderr


@pytest.mark.parametrize(("required", "outcome"), [("1", "ModuleNotFoundError"), ("0", "Skipped")])
def test_without_hip_python_these_tests_fail_where_nothing_may_be_skipped(required, outcome):
    code = "import sys; sys.modules['hip'] = None; import tests.hip.test_hip_python"
    env = os.environ | {"DCPKERNELS_REQUIRE_ISA": required}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(outcome)


# ---- one runtime in a process

_LINE = "7f0{} r-xp 00000000 08:02 {}                    {}\n"


def test_two_runtimes_are_refused():
    mine, torchs = (
        "/opt/rocm/lib/libamdhip64.so.7.1.25424",
        "/venv/lib/python3.12/site-packages/torch/lib/libamdhip64.so",
    )
    other = _LINE.format(9, 5, "/opt/rocm/lib/libhsa-runtime64.so.1")
    assert hip_library.require_one(other) == ""
    twice = other + _LINE.format(1, 17, mine) + _LINE.format(2, 17, mine) + "7f09 rw-p 00000000 00:00 0\n"
    assert hip_library.require_one(twice) == mine
    with pytest.raises(DcpUnsupported) as raised:
        hip_library.require_one(twice + _LINE.format(3, 18, torchs))
    text = str(raised.value)
    assert mine in text and torchs in text and "ROCM_PATH=/venv/lib/python3.12/site-packages/torch," in text


_ANOTHER = """
import ctypes, os, shutil
from pathlib import Path
another = {!r} + "/libamdhip64.so.7"
shutil.copy(os.environ["ROCM_PATH"] + "/lib/libamdhip64.so", another)
ctypes.CDLL(another)
from dcpkernels.heap import hip_library
"""


def test_hip_python_takes_the_runtime_that_the_process_has(stub, tmp_path):
    code = """
from dcpkernels.heap.hip_driver import Driver
from rocm.bindings.util import paths
looks = paths.get_library_path
driver = Driver(hip_library.load_api(), 0)
driver.open()
driver.close()
assert paths.get_library_path is looks and looks("amdhip64").decode() != another
assert hip_library.require_one(Path("/proc/self/maps").read_text()) == another
"""
    stderr, calls = stub(_ANOTHER.format(str(tmp_path)) + code)
    assert stderr == "" and "hipStreamDestroy 0x88" in calls


def test_a_runtime_whose_file_is_gone_is_refused_without_loading_another(stub, tmp_path):
    code = """
os.unlink(another)
try:
    hip_library.load_api()
finally:
    assert Path("/proc/self/maps").read_text().count(os.environ["ROCM_PATH"]) == 0
"""
    stderr, calls = stub(_ANOTHER.format(str(tmp_path)) + code)
    assert f"must be where it was loaded from (got {tmp_path}/libamdhip64.so.7 (deleted))" in stderr and calls == []


def test_two_runtimes_that_are_there_before_are_refused_without_a_call(stub, tmp_path):
    code = """
ctypes.CDLL(os.environ["ROCM_PATH"] + "/lib/libamdhip64.so")
hip_library.load_api()
"""
    stderr, calls = stub(_ANOTHER.format(str(tmp_path)) + code)
    assert "DcpUnsupported: a process must have one HIP runtime" in stderr and calls == []


def test_the_second_runtime_of_an_older_hip_python_is_found(stub, tmp_path):
    code = """
import sys, types
library = os.environ["ROCM_PATH"] + "/lib/libamdhip64.so"
old = types.SimpleNamespace(hipRuntimeGetVersion=lambda: ctypes.CDLL(library))
sys.modules["hip"], sys.modules["rocm"] = types.SimpleNamespace(hip=old), None
hip_library.load_api()
"""
    stderr, _ = stub(_ANOTHER.format(str(tmp_path)) + code)
    assert "DcpUnsupported: a process must have one HIP runtime" in stderr and f"{tmp_path}/libamdhip64.so.7" in stderr
