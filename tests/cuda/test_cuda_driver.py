"""The layer over the driver: its texts; and that cuda-python itself takes what it is given, over a library that only
writes down what it is called with."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dcpkernels.errors import DcpDeviceError, DcpUnsupported
from dcpkernels.heap import cuda_driver, cuda_errors
from dcpkernels.heap.cuda_driver import FABRIC, FD, Driver
from dcpkernels.heap.cuda_errors import call_error
from tests.cuda.bindings import real
from tests.cuda.fake_driver import FakeDriver
from tests.fake_gpu.heap_calls import outcome

FUNCTIONS = set(re.findall(r'"(cu[A-Z]\w+)"', Path(cuda_driver.__file__).read_text())) | {"cuMemGetInfo"}

# ---- errors


@pytest.mark.parametrize(
    ("number", "fabric", "cls", "advice"),
    [
        (2, False, DcpDeviceError, "expandable segments"),
        (34, False, DcpUnsupported, "stubs out of LD_LIBRARY_PATH"),
        (35, False, DcpUnsupported, "update the driver"),
        (100, False, DcpUnsupported, "nvidia-smi -L"),
        (101, False, DcpUnsupported, "CUDA_VISIBLE_DEVICES"),
        (217, False, DcpUnsupported, "MIG devices never can"),
        (401, False, DcpDeviceError, "systemctl status nvidia-fabricmanager"),
        (800, False, DcpDeviceError, "seccomp"),
        (800, True, DcpUnsupported, "/dev/nvidia-caps-imex-channels"),
        (801, False, DcpUnsupported, "MIG, vGPU and confidential computing"),
        (801, True, DcpUnsupported, "/dev/nvidia-caps-imex-channels"),
        (802, False, DcpDeviceError, "systemctl status nvidia-fabricmanager"),
        (803, False, DcpDeviceError, "reboot"),
        (999, False, DcpDeviceError, "dmesg"),
    ],
)
def test_an_error_says_what_failed_where_and_what_to_do(number, fabric, cls, advice):
    error = call_error("cuX", "CUDA_ERROR_Y", number, where="device 3, Z", nbytes=4096, fabric=fabric, more="of 8")
    assert type(error) is cls and advice in str(error)
    assert str(error).startswith(
        f"cuX of 4096 bytes must succeed on device 3, Z (got CUDA_ERROR_Y, error {number}, of 8): "
    )


def test_advice_is_for_errors_that_exist():
    known = {int(result) for result in real.CUresult}
    assert set(cuda_errors._ADVICE) - known == {35}  # the runtime's number for a driver that is too old


class _Raises:
    """An api of which every function raises."""

    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        def call(*_):
            raise self.error

        return call


def test_what_cuda_python_raises_becomes_ours():
    cls, text, _ = outcome(lambda: Driver(_Raises(RuntimeError('Function "cuMulticastCreate" not found')), 0))
    assert cls is DcpUnsupported and '"cuMulticastCreate" not found' in text and "12.3" in text
    cls, text, _ = outcome(lambda: Driver(_Raises(ValueError("12345 is not a valid CUresult")), 0))
    assert cls is DcpDeviceError and "12345" in text and "newer than cuda-python" in text


def test_the_api_is_loaded_late_and_its_absence_explained(monkeypatch):
    code = "import sys, dcpkernels.heap.cuda; sys.exit(any(name.partition('.')[0] == 'cuda' for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cls, text, _ = outcome(cuda_driver.load_api)
    assert cls is DcpUnsupported and "pip install 'dcpkernels[cuda]'" in text


def test_no_driver_is_told_apart_from_no_package(tmp_path):
    # With a library of that name that is none, the text is the same as where there is none at all.
    (tmp_path / "libcuda.so.1").write_text("")
    code = "from dcpkernels.heap.cuda_driver import load_api; load_api()"
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "DcpUnsupported: the NVIDIA driver must" in done.stderr and "libcuda.so.1" in done.stderr


def test_a_closed_driver_is_not_shared():
    driver = Driver(FakeDriver(), 0)
    assert outcome(driver.share)[0] is DcpDeviceError
    driver.open()
    driver.share()
    driver.close()
    driver.share()
    driver.close()
    driver.close()
    assert outcome(driver.share)[0] is DcpDeviceError and set(driver._api.live().values()) == {0}


# ---- the fake driver keeps the rules


def _rules(driver, fake):
    """Calls that break one rule each; what they raise."""
    handle = driver.create_memory(128 << 10, FD)
    address = driver.reserve(128 << 10, 0)
    stray = fake.CUmemGenericAllocationHandle(5)
    yield lambda: driver.create_memory(1000, FD)
    yield lambda: driver.map(address + 4096, 64 << 10, handle)
    yield lambda: driver.map(1 << 40, 64 << 10, handle)
    yield lambda: driver.map(address, 256 << 10, handle)
    yield lambda: driver.set_access(address, 128 << 10, [0])  # not mapped
    yield lambda: driver.unmap(address, 128 << 10)
    yield lambda: driver.free_address(address, 64 << 10)
    yield lambda: driver.release(stray)
    driver.map(address, 128 << 10, handle)
    yield lambda: driver.map(address, 128 << 10, handle)  # again
    yield lambda: driver.zero(address, 1)  # no access yet
    yield lambda: driver.free_address(address, 128 << 10)  # still mapped
    team = driver.multicast_create(2, 128 << 10, FD)
    driver.multicast_add_device(team)
    yield lambda: driver.multicast_add_device(team)  # twice
    yield lambda: driver.multicast_bind(team, handle, 128 << 10)  # before all are there
    yield lambda: driver.multicast_unbind(team, 128 << 10)
    yield lambda: driver.host_free(4096)
    driver.release(team)
    driver.unmap(address, 128 << 10)
    driver.free_address(address, 128 << 10)
    driver.release(handle)
    yield lambda: driver.release(handle)  # twice


def test_the_fake_driver_refuses_what_breaks_a_rule():
    fake = FakeDriver()
    assert fake.cuDeviceGetCount()[0] == 3  # before cuInit
    driver = Driver(fake, 0)
    driver.open()
    assert fake.cuMemHostAlloc(1, 3)[0] == 201  # without a context
    with driver.current():
        for number, step in enumerate(_rules(driver, fake)):
            assert issubclass(outcome(step)[0], DcpDeviceError), number
        assert number == 15
    driver.close()
    assert set(fake.live().values()) == {0}


# ---- cuda-python itself

_ALL = """
import ctypes, sys
from dcpkernels.heap.cuda_driver import FABRIC, FD, NONE, Driver, load_api
driver = Driver(load_api(), 1)
assert (str(driver), driver.pci, driver.uuid, driver.version) == ("device 1, Stub 1", "0000:01:00.0", "11" * 16, 13000)
assert driver.ordinal_of("10" * 16) == 0 and driver.ordinal_of("") is None and driver.can_access_peer(0)
assert driver.attribute("MULTICAST_SUPPORTED") == 1
driver.open()
with driver.current():
    assert driver.granularity(FD) == 2 << 20
    handle = driver.create_memory(4 << 20, FD)
    assert driver.export_fd(handle) == 42 and driver.export_fabric(handle) == b"F" * 64
    assert int(driver.import_fd(7)) == 0x22 and int(driver.import_fabric(b"G" * 64)) == 0x22
    address = driver.reserve(4 << 20, 2 << 20)
    driver.map(address, 4 << 20, handle)
    driver.set_access(address, 4 << 20, [0, 1])
    assert driver.multicast_granularity(8, 4 << 20, FABRIC) == 2 << 20
    team = driver.multicast_create(8, 4 << 20, FD)
    driver.multicast_add_device(team)
    driver.multicast_bind(team, handle, 4 << 20)
    driver.multicast_unbind(team, 4 << 20)
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
driver.close()
"""

# Numbers of cuda.h: 1 a descriptor, 8 fabric; location 1 a device; access 3 read and write; 132 multicast supported.
_LINES = """
cuDeviceCanAccessPeer 1 0
cuDeviceGetAttribute 132 1
cuDevicePrimaryCtxRetain 1
cuThreadExchangeStreamCaptureMode 2
cuCtxPushCurrent 0x77
cuStreamCreate 1
cuCtxPopCurrent
cuThreadExchangeStreamCaptureMode 0
cuMemGetAllocationGranularity 0 type=1 handles=1 location=1:1 0
cuMemCreate 4194304 type=1 handles=1 location=1:1 0
cuMemExportToShareableHandle 0x11 1 0
cuMemExportToShareableHandle 0x11 8 0
cuMemImportFromShareableHandle fd=7 1
cuMemImportFromShareableHandle GGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGG 8
cuMemAddressReserve 4194304 2097152 0 0
cuMemMap 0x700000000 4194304 0 0x11 0
cuMemSetAccess 0x700000000 4194304 1:0=3 1:1=3
cuMulticastGetGranularity devices=8 4194304 handles=8 flags=0 0
cuMulticastCreate devices=8 4194304 handles=1 flags=0 0
cuMulticastAddDevice 0x33 1
cuMulticastBindMem 0x33 0 0x11 0 4194304 0
cuMulticastUnbind 0x33 1 0 4194304
cuMemHostAlloc 1000 3
cuMemHostGetDevicePointer 0x5000 0
cuMemsetD8Async 0x700000000 0 4194304 0x88
cuStreamSynchronize 0x88
cuMemcpyHtoDAsync 0x700000000 0x5000 10 0x88
cuMemcpyDtoHAsync 0x5000 0x700000000 20 0x88
cuCtxSynchronize
cuMemUnmap 0x700000000 4194304
cuMemAddressFree 0x700000000 4194304
cuMemRelease 0x11
cuMemFreeHost 0x5000
cuStreamDestroy 0x88
cuDevicePrimaryCtxRelease 1
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """Runs code in a process in which cuda-python finds the stub library; returns (standard error, the calls)."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("stub")
    source = Path(__file__).with_name("stub_cuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source, "-ldl"], check=True)

    def run(code, fail=""):
        log = folder / "log"
        log.write_text("")
        env = {"LD_LIBRARY_PATH": str(folder), "STUB_CUDA_LOG": str(log), "STUB_CUDA_FAIL": fail}
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=False
        )
        return done.stderr, log.read_text().splitlines()

    return run


def test_cuda_python_hands_over_what_is_meant(stub):
    stderr, calls = stub(_ALL)
    assert stderr == ""
    assert [line for line in _LINES.strip().splitlines() if line not in calls] == []
    assert {line.split()[0] for line in calls} == FUNCTIONS - {"cuMemGetInfo"}


@pytest.mark.parametrize(
    ("fail", "parts"),
    [
        (
            "cuMemCreate=2",
            ["DcpDeviceError: cuMemCreate of 4194304 bytes must", "error 2", "(1000 of 2000 bytes are free)"],
        ),
        ("cuMulticastBindMem=802", ["DcpDeviceError: cuMulticastBindMem", "CUDA_ERROR_SYSTEM_NOT_READY, error 802"]),
        ("cuInit=100", ["DcpUnsupported: cuInit must succeed on device 1 (got CUDA_ERROR_NO_DEVICE, error 100)"]),
        ("cuInit=34", ["DcpUnsupported: cuInit", "CUDA_ERROR_STUB_LIBRARY"]),
        ("cuMemMap=12345", ["DcpDeviceError: cuMemMap", "12345", "newer than cuda-python"]),
    ],
)
def test_errors_of_the_library_come_through_cuda_python(stub, fail, parts):
    stderr, _ = stub(_ALL, fail)
    assert all(part in stderr for part in parts), stderr


def test_kinds_of_handles_are_those_of_the_driver():
    kinds = real.CUmemAllocationHandleType
    driver = Driver(FakeDriver(), 0)
    assert driver._handle_type(FD) == kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert driver._handle_type(FABRIC) == kinds.CU_MEM_HANDLE_TYPE_FABRIC
    assert driver._memory(FABRIC).requestedHandleTypes == kinds.CU_MEM_HANDLE_TYPE_FABRIC
