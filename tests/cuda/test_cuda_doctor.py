"""The doctor's checks of NVIDIA GPUs, over the fake driver: no GPU, and no NVML but the one here."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from dcpkernels.cli.doctor import cuda, cuda_facts, render, run
from dcpkernels.cli.doctor.check import OK, WARN, Section, ok, results
from dcpkernels.cli.doctor.gpu import cells
from dcpkernels.cli.doctor.targets import states
from dcpkernels.errors import DcpUnsupported
from dcpkernels.heap.cuda_errors import advice, call_error
from tests.cuda.bindings import real
from tests.cuda.fake_driver import FakeDriver
from tests.doctor_facts import BARE, Lost, finding, machine
from tests.fake_gpu.core import call

ATTRIBUTE = real.CUdevice_attribute
NODE = {"/dev/nvidia0": "", "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"}  # fmt: skip


class Driver(FakeDriver):
    """With what only the doctor asks."""

    def __init__(self, *args, capability=(9, 0), has_fabric=False, no_atomics=(), **options):
        super().__init__(*args, **options)
        self.capability, self.has_fabric, self.no_atomics = capability, has_fabric, no_atomics

    @call()
    def cuDeviceGetAttribute(self, attribute, device):
        self.ordinal(device)
        return {
            ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: int(self.multicast),
            ATTRIBUTE.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: int(self.has_fabric),
            ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.capability[0],
            ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.capability[1],
        }[attribute]

    @call()
    def cuDeviceGetP2PAttribute(self, attribute, device, peer):
        assert attribute == real.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return int((self.ordinal(device), self.ordinal(peer)) not in self.no_atomics)


class Nvml:
    """The functions of cuda.bindings.nvml that are used. Handles are places on the PCI bus."""

    GpuP2PCapsIndex = SimpleNamespace(P2P_CAPS_INDEX_NVLINK=2)

    def __init__(self, state=0, status=0, no_nvlink=()):
        self.state, self.status, self.no_nvlink = state, status, no_nvlink

    def device_get_handle_by_pci_bus_id_v2(self, pci):
        assert re.fullmatch(r"0000:[0-9A-F]{2}:00\.0", pci)
        return int(pci.split(":")[1], 16)

    def device_get_p2p_status(self, a, b, index):
        assert index == 2 and a != b
        return 5 if (a, b) in self.no_nvlink else 0

    def device_get_gpu_fabric_info_v(self, handle):
        return SimpleNamespace(state=self.state, status=self.status, cluster_uuid=b"private")


def section(driver: Driver, nvml=None, usable=lambda device: "") -> Section:
    def load_nvml():
        if nvml is None:
            raise RuntimeError("no NVML")
        return nvml

    module = {name: {"value": fact} for name, fact in BARE["cuda"].items()}
    files = len(os.listdir("/proc/self/fd"))
    found = module | cuda_facts.of_driver(lambda: driver, load_nvml, usable)
    assert not any(driver.live().values()) and len(os.listdir("/proc/self/fd")) == files
    return Section(found | {"python": {"value": "13.0.3"}})


def gpus(root: Path, driver: Driver, nvml=None, files=NODE, usable=lambda device: "", **more):
    torch = {"build": {"cuda": "13.0", "hip": None}}
    sections = {"cuda": section(driver, nvml, usable), "torch": torch, "torch device": {"count": len(driver.devices)}}
    return machine(root, files, sections, **more)


def test_a_sound_machine(tmp_path):
    facts = gpus(tmp_path, Driver(4, has_fabric=True, fabric=tmp_path), Nvml(state=3))
    found = {result.name: result for result in results(run.ALL_CHECKS, facts)}
    assert {result.status for result in found.values()} == {OK}, found
    lines = {name.removeprefix("cuda "): result.text for name, result in found.items() if name.startswith("cuda ")}
    del lines["module"]
    assert lines == {
        "python": "13.0.3",
        "driver": "for CUDA 13.0; kernel module 580.65.06",
        "devices": "1 x Fake H100 0 (sm_90), 1 x Fake H100 1 (sm_90), 1 x Fake H100 2 (sm_90), 1 x Fake H100 3 (sm_90)",
        "mig": "off",
        "peers": "4 devices, each reaches each other's memory (NVLink)",
        "handles": "memory of each device can be handed over by a descriptor",
        "multicast": "on all devices",
        "fabric": "completed",
        "imex": "a handle for other hosts can be made, without channel nodes",
    }
    assert states(facts)["cuda"] == (True, "ready (4 devices)")
    assert cells(facts, "cuda")[1] == ["NVLink", ".", "NVLink", "NVLink"]


def test_nothing_is_left_on_the_device_when_a_call_fails(tmp_path):
    for name in ("cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemCreate"):
        driver = Driver(2)
        driver.fail(name, 2, number=304)
        found = finding("cuda handles", gpus(tmp_path / name, driver))  # `section` looks for what is left
        assert found.status == WARN and name in found.text and found.fix == advice(304)


# -- no driver, an old one, none that shows a device


def test_no_driver(tmp_path):
    lost = {"python": "13.0.3", "driver": Lost("the NVIDIA driver must be there (got no libcuda): install it")}
    assert finding("cuda driver", machine(tmp_path / "bare", sections={"cuda": lost})) == ok("none here")
    found = finding("cuda driver", machine(tmp_path / "gpu", NODE, {"cuda": lost}))
    assert found.status == WARN and found.fix == "install it" and "kernel module 580.65.06" in found.text
    assert states(machine(tmp_path / "x", NODE, {"cuda": lost}))["cuda"][1] == "built, not usable (see 'cuda driver')"
    hung = machine(tmp_path / "hung", NODE, {"cuda": Section({}, lost="no answer within 60 s")})
    found = {result.name: result for result in results(run.ALL_CHECKS, hung)}
    assert "no answer within 60 s" in found["cuda driver"].text and found["cuda driver"].status == WARN


def test_cuda_python(tmp_path):
    missing = {"python": Lost("PackageNotFoundError"), "driver": Lost("x")}
    assert finding("cuda python", machine(tmp_path / "bare", sections={"cuda": missing})).status == OK
    found = finding("cuda python", machine(tmp_path / "gpu", NODE, {"cuda": missing}))
    assert found.status == WARN and found.fix == "pip install 'dcpkernels[cuda]'"
    for version, status in (("13.0.3", OK), ("13.9", OK), ("12.9.1", WARN), ("14.0", WARN)):
        facts = machine(tmp_path / version, sections={"cuda": {"python": version}})
        assert finding("cuda python", facts).status == status
    root = Path(__file__).parents[2]
    assert f"cuda-python>={cuda.BINDINGS[0]}.0,<{cuda.BINDINGS[1]}" in (root / "pyproject.toml").read_text()


def test_an_old_driver(tmp_path):
    facts = gpus(tmp_path, Driver(2, version=12020))
    found = finding("cuda driver", facts)
    assert found.status == WARN and "must be of version 12.3 or later (got 12.2)" in found.text and found.fix


@pytest.mark.parametrize(("files", "status"), [(NODE, WARN), ({}, None)])
def test_no_device_is_visible(tmp_path, files, status):
    facts = gpus(tmp_path, Driver(0), files=files, environ={"CUDA_VISIBLE_DEVICES": ""})
    found = finding("cuda devices", facts)
    assert (found and found.status) == status and finding("cuda driver", facts).status == OK
    if status:
        assert found.text == "none is visible; CUDA_VISIBLE_DEVICES names none" and found.fix == advice(100)
        assert states(facts)["cuda"] == (False, "built, no device to be seen (see 'cuda devices')")
    else:
        assert states(facts)["cuda"] == (False, "built, no driver here")


def test_devices_are_counted_and_not_named(tmp_path):
    facts = gpus(tmp_path, Driver(2, name="H200"), environ={"CUDA_VISIBLE_DEVICES": "GPU-11112222,GPU-33334444"})
    found = finding("cuda devices", facts)
    assert found == ok("1 x H200 0 (sm_90), 1 x H200 1 (sm_90); CUDA_VISIBLE_DEVICES names 2")


def test_a_device_without_code(tmp_path):
    found = finding("cuda devices", gpus(tmp_path / "old", Driver(1, capability=(8, 6))))
    assert found.status == WARN and "(sm_86)" in found.text and "9.0" in found.fix
    facts = gpus(tmp_path / "no", Driver(2), usable=lambda device: "target cuda: no code" * device)
    assert finding("cuda devices", facts).text.endswith("target cuda: no code")
    assert states(facts)["cuda"] == (False, "built, not usable (see 'cuda devices')")


def test_torch_of_another_kind(tmp_path):
    facts = machine(tmp_path, NODE, {"cuda": section(Driver(1))})
    assert states(facts)["cuda"] == (False, "built, but torch is not built for it (see 'torch build')")


# -- between devices


def test_peers(tmp_path):
    facts = gpus(tmp_path, Driver(3, cut=[(0, 2)]), Nvml(no_nvlink=[(1, 2), (2, 1), (0, 2), (2, 0)]))
    found = finding("cuda peers", facts)
    assert found == (WARN, "devices cannot reach others' memory: 0 to 2", advice(217))
    assert cells(facts, "cuda") == [[".", "NVLink", "--"], ["NVLink", ".", "PCIe"], ["PCIe", "PCIe", "."]]
    text = render.text(run.LABELS, states(facts), [], {"cuda": cells(facts, "cuda")})
    assert "CUDA devices, from row to column" in text
    assert finding("cuda peers", gpus(tmp_path, Driver(1))) is None
    assert finding("cuda peers", gpus(tmp_path, Driver(2))).text.endswith("(links not known)")
    many = finding("cuda peers", gpus(tmp_path, Driver(5, cut=[(i, j) for i in range(5) for j in range(5)])))
    assert many.text.endswith("1 to 4 and 12 more") and many.text.count(" to ") == 8


def test_links_without_atomics(tmp_path):
    """A fault reaches a peer by a compare-exchange in its memory (docs/targets/cuda.md)."""
    found = finding("cuda peers", gpus(tmp_path, Driver(2, no_atomics=[(1, 0)]), Nvml()))
    assert found.status == WARN and found.text.endswith("(NVLink), some without atomics") and "deadlines" in found.fix


def test_a_call_that_fails_is_a_warning(tmp_path):
    driver = Driver(2)
    driver.fail("cuDeviceCanAccessPeer", 1, number=999)
    (found,) = [result for result in results(run.ALL_CHECKS, gpus(tmp_path, driver)) if result.name == "cuda peers"]
    assert found.status == WARN and "could not be made (cuDeviceCanAccessPeer must succeed on device 0" in found.text


def test_multicast(tmp_path):
    found = finding("cuda multicast", gpus(tmp_path, Driver(2, multicast=False)))
    assert found.status == OK and found.text.startswith("on 0 of 2 devices (no NVLink switch")
    assert finding("cuda multicast", gpus(tmp_path, Driver(1))) is None


def test_mig(tmp_path):
    found = finding("cuda mig", gpus(tmp_path, Driver(1, name="H100 MIG 3g.40gb")))
    assert found.status == WARN and "cannot reach each other" in found.text


@pytest.mark.parametrize(
    ("state", "status", "expected", "text"),
    [
        (0, 0, OK, "there is none"), (3, 0, OK, "completed"), (1, 0, WARN, "(device 0: not started, status 0)"),
        (2, 0, WARN, "2 of 2 devices are not set up (device 0: in progress"), (3, 999, WARN, "completed, status 999"),
    ],
)  # fmt: skip
def test_fabric(tmp_path, state, status, expected, text):
    found = finding("cuda fabric", gpus(tmp_path, Driver(2), Nvml(state=state, status=status)))
    assert found.status == expected and text in found.text and ("fabricmanager" in found.fix) == (expected == WARN)
    assert finding("cuda fabric", gpus(tmp_path, Driver(2))) == ok("not known (RuntimeError: no NVML)")


@pytest.mark.parametrize("node", [False, True])
@pytest.mark.parametrize(("number", "text"), [(800, "error 800"), (801, "error 801")])
def test_imex(tmp_path, node, number, text):
    """The attribute says yes, the call says no."""
    files = NODE | ({"/dev/nvidia-caps-imex-channels/channel0": ""} if node else {})
    found = finding("cuda imex", gpus(tmp_path, Driver(2, has_fabric=True, no_fabric=number), files=files))
    assert found.status == WARN and text in found.text and found.fix == advice(800, fabric=True)
    assert ("with channel nodes" in found.text) == node and "one host needs none" in found.text and "IMEX" in found.fix
    assert finding("cuda imex", gpus(tmp_path, Driver(2))) == ok("these devices have no handles for other hosts")


def test_the_doctor_says_what_the_errors_say():
    for number, fabric in ((100, False), (217, False), (401, False), (802, False), (800, True), (12345, False)):
        text = str(call_error("cuX", "NAME", number, where="device 0", fabric=fabric))
        assert text.endswith(f": {advice(number, fabric=fabric)}")


def test_the_bare_driver_of_cuda_python_is_asked(monkeypatch):
    """Without a GPU: the very functions of the child."""

    def load():
        raise DcpUnsupported("no driver")

    monkeypatch.setattr(cuda_facts, "load_api", load)
    facts = Section(cuda_facts.facts())
    assert facts.error("driver") == "no driver" and facts.known("devices") is None and facts.get("python")
