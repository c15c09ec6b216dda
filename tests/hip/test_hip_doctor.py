"""The doctor's checks of AMD GPUs, over the fake runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcpkernels.cli.doctor import hip, hip_facts, run
from dcpkernels.cli.doctor.check import OK, WARN, Section, ok, results
from dcpkernels.cli.doctor.gpu import cells
from dcpkernels.cli.doctor.targets import states
from dcpkernels.heap.hip_errors import advice, call_error
from tests.doctor_facts import BARE, Lost, finding, machine
from tests.fake_gpu.core import call
from tests.hip.fake_hip import FakeHip

NODE = {"/dev/kfd": ""}


class Runtime(FakeHip):
    """With what only the doctor asks."""

    @call(results=2)
    def hipExtGetLinkTypeAndHopCount(self, device, peer):
        return {(0, 1): 2}.get((self.ordinal(device), self.ordinal(peer)), 4), 1


def section(runtime, usable=lambda device: "") -> Section:
    module = {name: {"value": fact} for name, fact in BARE["hip"].items()}
    found = module | hip_facts.of_runtime(lambda: runtime, usable)
    assert not any(runtime.live().values())
    return Section(found | {"python": {"value": "10.0.0"}})


def gpus(root: Path, runtime, files=NODE, usable=lambda device: "", **more):
    torch = {"build": {"cuda": None, "hip": "7.1"}}
    sections = {"hip": section(runtime, usable), "torch": torch, "torch device": {"count": len(runtime.devices)}}
    return machine(root, files, sections, **more)


def test_a_sound_machine(tmp_path):
    facts = gpus(tmp_path, Runtime(2))
    found = {result.name: result for result in results(run.ALL_CHECKS, facts)}
    assert {result.status for result in found.values()} == {OK}, found
    lines = {name.removeprefix("hip "): result.text for name, result in found.items() if name.startswith("hip ")}
    del lines["module"]
    assert lines == {
        "python": "10.0.0",
        "runtime": "HIP 7.15.60940",
        "devices": "1 x Fake MI300X 0, 1 x Fake MI300X 1",
        "peers": "2 devices, each reaches each other's memory (PCIe, xGMI)",
        "handles": "IPC handles can be made; by descriptors as well: yes",
        "environment": "all devices may be seen",
    }
    assert states(facts)["hip"] == (True, "ready (2 devices)")
    assert cells(facts, "hip") == [[".", "PCIe"], ["xGMI", "."]]


def test_hip_python_and_the_runtime(tmp_path):
    lost = {
        "python": Lost("none"),
        "driver": Lost("hip-python must be installed (pip install 'dcpkernels[hip]') (got x)"),
    }
    bare, gpu = (machine(tmp_path / name, files, {"hip": lost}) for name, files in (("bare", {}), ("gpu", NODE)))
    assert finding("hip python", bare).status == finding("hip runtime", bare).status == OK
    assert finding("hip python", gpu) == (WARN, "hip-python is not installed", "pip install 'dcpkernels[hip]'")
    assert finding("hip runtime", gpu).status == WARN
    for version, status in (("10.0.0.0.1.2", OK), ("7.1.0", WARN), ("11.0", WARN)):
        assert (
            finding("hip python", machine(tmp_path / version, sections={"hip": {"python": version}})).status == status
        )
    root = Path(__file__).parents[2]
    assert f"hip-python>={hip.BINDINGS[0]},<{hip.BINDINGS[1]}" in (root / "pyproject.toml").read_text()
    old = finding("hip runtime", gpus(tmp_path, Runtime(1, version=6_01_00000)))
    assert old.status == WARN and "must be of version 6.2 or later (got 6.1)" in old.text


def test_no_device_is_visible(tmp_path):
    facts = gpus(tmp_path, Runtime(0))
    assert finding("hip devices", facts) == (WARN, "none is visible", advice(100))
    assert states(facts)["hip"] == (False, "built, no device to be seen (see 'hip devices')")
    assert finding("hip devices", gpus(tmp_path / "bare", Runtime(0), files={})) is None


def test_a_device_without_code(tmp_path):
    facts = gpus(tmp_path, Runtime(2), usable=lambda device: "target hip: no code" * device)
    assert finding("hip devices", facts).status == WARN and not states(facts)["hip"][0]


def test_peers(tmp_path):
    facts = gpus(tmp_path, Runtime(3, cut=[(2, 1)]))
    assert finding("hip peers", facts) == (WARN, "devices cannot reach others' memory: 2 to 1", advice(217))
    assert cells(facts, "hip")[2] == ["xGMI", "--", "."]
    # A runtime that does not know the call.
    assert finding("hip peers", gpus(tmp_path, FakeHip(2))).text.endswith("(links not known)")
    assert cells(gpus(tmp_path, FakeHip(2)), "hip") == [[".", "yes"], ["yes", "."]]


@pytest.mark.parametrize(
    ("has_vmm", "text"), [(True, "by descriptors instead: yes"), (False, "no virtual memory management")]
)
def test_ipc_that_does_not_work(tmp_path, has_vmm, text):
    found = finding("hip handles", gpus(tmp_path, Runtime(2, no_export=1, has_vmm=has_vmm)))
    assert found.status == WARN and text in found.text and found.fix == advice(1, ipc=True)
    assert "hipIpcGetMemHandle" in found.text and "seccomp=unconfined" in found.fix


def test_environment(tmp_path):
    given = {"HSA_ENABLE_IPC_MODE_LEGACY": "1"}
    found = finding("hip environment", machine(tmp_path / "a", NODE, environ=given))
    assert found == (WARN, "HSA_ENABLE_IPC_MODE_LEGACY is set", advice(1, ipc=True))
    assert finding("hip environment", machine(tmp_path / "b", environ=given)) is None  # no such device
    assert (
        finding("hip environment", machine(tmp_path / "c", NODE, environ={"HSA_ENABLE_IPC_MODE_LEGACY": "0"})).status
        == OK
    )
    given = {"HIP_VISIBLE_DEVICES": "0,1"}
    assert finding("hip environment", machine(tmp_path / "d", NODE, environ=given)) == ok(
        "HIP_VISIBLE_DEVICES choose devices"
    )
    found = finding(
        "hip environment", machine(tmp_path / "e", NODE, environ=given | {"ROCR_VISIBLE_DEVICES": "GPU-1122"})
    )
    assert found.status == WARN and "GPU-1122" not in found.text


def test_the_doctor_says_what_the_errors_say():
    for call_name, number in (("hipX", 100), ("hipX", 217), ("hipIpcOpenMemHandle", 1), ("hipX", 12345)):
        text = str(call_error(call_name, "NAME", number, where="device 0"))
        assert text.endswith(f": {advice(number, ipc=call_name.startswith('hipIpc'))}")
