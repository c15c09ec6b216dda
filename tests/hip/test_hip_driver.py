"""The layer over the runtime: its texts, and when it asks whom."""

import ctypes
import os
import subprocess
import sys

import pytest

from dcpkernels.errors import DcpDeviceError, DcpUnsupported
from dcpkernels.heap import hip_errors, hip_library
from dcpkernels.heap.gpu_driver import FD, NONE
from dcpkernels.heap.hip_driver import Driver
from dcpkernels.heap.hip_errors import call_error
from tests.fake_gpu.heap_calls import outcome, read
from tests.hip.bindings import real
from tests.hip.fake_hip import FakeHip

# ---- errors


@pytest.mark.parametrize(
    ("call", "number", "cls", "advice"),
    [
        ("hipX", 1, DcpDeviceError, "docs/targets/hip.md"),
        ("hipX", 2, DcpDeviceError, "amd-smi process"),
        ("hipX", 35, DcpUnsupported, "update the driver"),
        ("hipX", 100, DcpUnsupported, "/dev/kfd"),
        ("hipX", 101, DcpUnsupported, "ROCR_VISIBLE_DEVICES"),
        ("hipX", 217, DcpUnsupported, "amd-smi topology"),
        ("hipX", 700, DcpDeviceError, "earlier kernel"),
        ("hipX", 801, DcpUnsupported, "docs/targets/hip.md"),
        ("hipX", 900, DcpDeviceError, "outside of captures"),
        ("hipX", 999, DcpDeviceError, "dmesg"),
        ("hipX", 4711, DcpDeviceError, "dmesg"),
        ("hipIpcGetMemHandle", 1, DcpUnsupported, "HSA_ENABLE_IPC_MODE_LEGACY"),
        ("hipIpcOpenMemHandle", 17, DcpUnsupported, "--ipc=host"),
        ("hipIpcOpenMemHandle", 2, DcpDeviceError, "amd-smi process"),
        ("hipIpcCloseMemHandle", 400, DcpDeviceError, "start method spawn"),
    ],
)
def test_an_error_says_what_failed_where_and_what_to_do(call, number, cls, advice):
    error = call_error(call, "hipErrorY", number, where="device 3, Z", nbytes=4096, more="of 8")
    assert type(error) is cls and advice in str(error)
    assert str(error).startswith(
        f"{call} of 4096 bytes must succeed on device 3, Z (got hipErrorY, error {number}, of 8): "
    )


def test_advice_is_for_errors_that_exist():
    known = {int(result) for result in real.hipError_t}
    assert set(hip_errors._ADVICE) <= known and hip_errors._IPC_NUMBERS <= known and hip_errors._UNSUPPORTED <= known


class _Raises:
    """An api of which every function raises."""

    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        def call(*_):
            raise self.error

        return call


def test_what_hip_python_raises_becomes_ours():
    cls, text, _ = outcome(lambda: Driver(_Raises(RuntimeError("failed to dlopen 'libamdhip64.so'")), 0))
    assert cls is DcpUnsupported and "failed to dlopen" in text and "ROCM_PATH" in text
    cls, text, _ = outcome(lambda: Driver(_Raises(ValueError("12345 is not a valid hipError_t")), 0))
    assert cls is DcpDeviceError and "12345" in text and "newer than hip-python" in text


def test_the_api_is_loaded_late_and_its_absence_explained(monkeypatch):
    code = "import sys, dcpkernels.heap.hip; sys.exit(any(name.partition('.')[0] in ('hip', 'rocm') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setitem(sys.modules, "hip", None)
    cls, text, _ = outcome(hip_library.load_api)
    assert cls is DcpUnsupported and "pip install 'dcpkernels[hip]'" in text


def test_no_runtime_is_told_apart_from_no_package(tmp_path):
    # With a library of that name that is none, the text is the same as where there is none at all.
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libamdhip64.so").write_text("")
    code = "from dcpkernels.heap.hip_library import load_api; load_api()"
    env = os.environ | {"ROCM_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path / "lib")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "DcpUnsupported: the HIP runtime must" in done.stderr and "libamdhip64.so" in done.stderr


# ---- the driver


def test_a_closed_driver_is_not_shared():
    driver = Driver(FakeHip(), 0)
    assert outcome(driver.share)[0] is DcpDeviceError
    driver.open()
    driver.share()
    driver.close()
    driver.share()
    driver.close()
    driver.close()
    assert outcome(driver.share)[0] is DcpDeviceError and set(driver._api.live().values()) == {0}


def test_a_device_is_known_by_its_uuid_and_its_place():
    for fake in (FakeHip(devices=[3, 5]), FakeHip(devices=[3, 5], no_uuids=True)):
        driver = Driver(fake, 1)
        assert driver.uuid.endswith("@0000:05:00.0") and driver.ordinal_of(driver.uuid) == 1
        assert driver.ordinal_of(Driver(fake, 0).uuid) == 0 and driver.ordinal_of("") is None
    driver, other = Driver(FakeHip(), 1), FakeHip()
    other.uuid = lambda ordinal: "0f" * 16  # partitions of a device share its place
    assert Driver(other, 1).pci == driver.pci and Driver(other, 1).uuid != driver.uuid


def test_peer_access_that_somebody_has_enabled_is_no_error():
    fake = FakeHip()
    driver = Driver(fake, 0)
    driver.open()
    with driver.current():
        driver.enable_peer_access(1)
        driver.enable_peer_access(1)
        assert fake.peer_access == {(0, 1)} and fake.last_error() == 0
        text = outcome(lambda: driver.enable_peer_access(0))[1]
    assert "peer device 0" in text and "hipErrorInvalidDevice" in text and fake.last_error() == 0
    driver.close()


def test_an_error_that_hip_python_does_not_know_is_not_left_to_others():
    fake = FakeHip()
    driver = Driver(fake, 0)

    def hipDeviceSynchronize():
        fake.failed(999, 0)
        raise ValueError("12345 is not a valid hipError_t")

    fake.hipDeviceSynchronize = hipDeviceSynchronize
    assert "12345" in outcome(driver.wait_idle)[1] and fake.last_error() == 0


@pytest.mark.parametrize("kind", [NONE, FD])
def test_memory_by_handles_is_uncached_and_leaves_the_process_only_when_it_may(kind):
    fake = FakeHip()
    driver = Driver(fake, 2)
    driver.open()
    with driver.current():
        handle = driver.create_memory(64 << 10, kind)
        if kind == FD:
            os.close(driver.export_fd(handle))
        else:
            assert "hipMemExportToShareableHandle" in outcome(lambda: driver.export_fd(handle))[1]
        driver.release(handle)
    driver.close()
    assert set(fake.live().values()) == {0}


def test_copies_are_done_when_they_return():
    fake = FakeHip()
    driver = Driver(fake, 1)
    driver.open()
    with driver.current():
        address, host = driver.allocate(4096), ctypes.create_string_buffer(b"abcd", 4)
        driver.zero(address, 4096)
        assert read(address, 4096) == bytes(4096)
        driver.copy_to_device(address + 1, ctypes.addressof(host), 4)
        assert read(address, 6) == b"\0abcd\0"
        driver.copy_from_device(ctypes.addressof(host), address, 4)
        assert host.raw == b"\0abc"
        driver.free(address)
    driver.close()
    assert set(fake.live().values()) == {0}


def test_an_ipc_handle_of_another_length_is_not_read():
    assert "64 bytes (got 63)" in outcome(lambda: Driver(FakeHip(), 0).open_ipc(bytes(63), 4096))[1]


def test_a_fork_calls_nothing():
    fake = FakeHip()
    driver = Driver(fake, 0)
    num_calls, driver._pid = len(fake.calls), os.getpid() + 1
    assert "fork" in outcome(driver.open)[1] and len(fake.calls) == num_calls
