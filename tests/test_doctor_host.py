"""The doctor's checks of limits and containers, over machines that are made up."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from dcpkernels.cli.doctor.check import FAIL, OK, WARN, ok
from dcpkernels.cli.doctor.targets import states
from tests.doctor_facts import NODE, finding, machine

# -- this machine's limits


def test_shared_memory_that_cannot_be_had(tmp_path):
    def refuse():
        raise PermissionError(1, "Operation not permitted")

    found = finding("shared memory", machine(tmp_path, try_shared_memory=refuse))
    assert found.status == FAIL and "PermissionError" in found.text and "memfd_create" in found.fix


def test_without_shared_memory_no_workspace_is_promised(tmp_path):
    def refuse():
        raise PermissionError(1, "Operation not permitted")

    assert states(machine(tmp_path))["cpu"][0]
    facts = machine(tmp_path, try_shared_memory=refuse)
    assert states(facts)["cpu"] == (False, "built, not usable (see 'shared memory')")
    assert finding("targets", facts).status == FAIL


@pytest.mark.parametrize("what", ["seal", "send", "bytes", "listen"])
def test_shared_memory_is_really_tried(tmp_path, monkeypatch, what):
    from dcpkernels.cli.doctor import check, shared_memory

    facts = machine(tmp_path, try_shared_memory=check._try_shared_memory)
    assert finding("shared memory", facts).status == OK
    before = os.listdir("/proc/self/fd")
    send, create = shared_memory.sockets.send, shared_memory.create_file

    def without_seals(nbytes):
        fd = os.memfd_create("x")
        os.ftruncate(fd, nbytes)
        return fd

    class Listener(shared_memory.sockets.Listener):
        def __init__(self, backlog):
            raise OSError(97, "Address family not supported")

    class Private(shared_memory.Region):
        """Of another file."""

        def __init__(self, fd, nbytes):
            other = create(nbytes)
            super().__init__(other, nbytes)
            os.close(other)

    change = {
        "seal": (shared_memory, "create_file", without_seals),
        "send": (
            shared_memory.sockets,
            "send",
            lambda sock, peer, message, deadline, fd: send(sock, peer, message, deadline),
        ),
        "bytes": (shared_memory, "Region", Private),
        "listen": (shared_memory.sockets, "Listener", Listener),
    }[what]
    monkeypatch.setattr(*change)
    found = finding("shared memory", dataclasses.replace(facts))
    assert found.status == FAIL
    words = {"seal": "sealed", "send": "descriptor must arrive", "bytes": "the same bytes", "listen": "Address family"}
    assert words[what] in found.text
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_memory(tmp_path):
    found = finding("memory", machine(tmp_path))
    assert found == ok("8.0 GiB available, by host memory (MemAvailable)")
    found = finding("memory", machine(tmp_path, {"/proc/meminfo": "MemAvailable: 200000 kB\n"}))
    assert found.status == WARN and "195.3 MiB" in found.text


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_cgroup(tmp_path, version):
    """As containers have it: the path of the group is not shown."""
    mount, group = tmp_path / "mount", "/kubepods/pod-of-alice"
    folder = Path(f"{mount}{group}")
    folder.mkdir(parents=True)
    (folder / "memory.stat").write_text("inactive_file 0\ntotal_inactive_file 0\n")
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{100 << 20}\n")
    (folder / names[1]).write_text(f"{40 << 20}\n")
    mounted, own = {
        1: (f"1 2 0:3 / {mount} rw - cgroup cgroup rw,memory\n", f"4:memory:{group}\n"),
        2: (f"1 2 0:3 / {mount} rw - cgroup2 cgroup rw\n", f"0::{group}\n"),
    }[version]
    facts = machine(tmp_path / "root", {"/proc/self/mountinfo": mounted, "/proc/self/cgroup": own})
    found = finding("memory", facts)
    assert found.status == WARN and found.text == f"60.0 MiB available, by the cgroup's {names[0]}"


def test_shm(tmp_path):
    assert finding("shm", machine(tmp_path)).status == OK
    found = finding("shm", machine(tmp_path, shm_bytes=lambda path: 64 << 20))
    assert found.status == WARN and found.text.startswith("64.0 MiB; dcpkernels does not use it")

    def none(path):
        raise FileNotFoundError(path)

    assert finding("shm", machine(tmp_path, shm_bytes=none)).status == OK


@pytest.mark.parametrize(
    ("name", "limit", "bare", "with_device"),
    [
        ("open files", "20000", OK, OK), ("open files", "128", WARN, WARN), ("open files", "unlimited", OK, OK),
        ("locked memory", "65536", OK, WARN), ("locked memory", "unlimited", OK, OK),
        ("locked memory", str(1 << 30), OK, OK),
    ],
)  # fmt: skip
def test_limits(tmp_path, name, limit, bare, with_device):
    files = {"/proc/self/limits": f"Limit  Soft Limit\nMax {name}   {limit}   unlimited   units\n"}
    assert finding(name, machine(tmp_path / "bare", files)).status == bare
    assert finding(name, machine(tmp_path / "gpu", files | NODE)).status == with_device


@pytest.mark.parametrize(
    ("types", "bare", "with_device"),
    [
        ([], OK, OK), (["identity", "identity"], OK, OK), (["DMA", "identity"], OK, WARN), (["DMA-FQ"], OK, WARN),
        ([None], OK, OK),
    ],
)  # fmt: skip
def test_iommu(tmp_path, types, bare, with_device):
    files = {f"/sys/kernel/iommu_groups/{i}/type": kind for i, kind in enumerate(types)}
    found = finding("iommu", machine(tmp_path / "bare", files))
    assert found.status == bare and ("off" in found.text) == (not types)
    assert ("passed through" in found.text) == (types == ["identity"] * 2)
    found = finding("iommu", machine(tmp_path / "gpu", files | NODE))
    assert found.status == with_device and ("iommu=pt" in found.fix) == (with_device == WARN)


# -- containers


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({}, {}, ""),
        ({"/.dockerenv": ""}, {}, "docker"),
        ({"/run/.containerenv": 'name="alice"'}, {}, "podman"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.1.2.3"}, "kubernetes"),
        ({"/proc/self/cgroup": "0::/kubepods.slice/pod-of-alice\n"}, {}, "kubepods"),
    ],
)
def test_containers(tmp_path, files, environ, kind):
    found = finding("container", machine(tmp_path, files, environ=environ))
    assert found.status == OK and found.text.startswith(f"{kind}; " if kind else "none")
    assert "alice" not in found.text and "10.1.2.3" not in found.text


@pytest.mark.parametrize(("mode", "bare", "with_device"), [("0", OK, OK), ("2", OK, WARN)])
def test_seccomp(tmp_path, mode, bare, with_device):
    files = {"/proc/self/status": f"CapEff:\t0\nSeccomp:\t{mode}\n"}
    assert finding("seccomp", machine(tmp_path / "bare", files)).status == bare
    found = finding("seccomp", machine(tmp_path / "gpu", files | NODE))
    assert found.status == with_device and ("mode 2" in found.text) == (mode == "2")


@pytest.mark.parametrize("scope", [None, "0", "1", "2", "3"])
@pytest.mark.parametrize("has_cap", [False, True])
def test_ptrace(tmp_path, scope, has_cap):
    files = {"/proc/self/status": f"CapEff:\t{(1 << 19) * has_cap:016x}\n", "/proc/sys/kernel/yama/ptrace_scope": scope}
    assert finding("ptrace", machine(tmp_path / "bare", files)).status == OK
    found = finding("ptrace", machine(tmp_path / "gpu", files | NODE))
    is_refused = scope == "3" or (scope in ("1", "2") and not has_cap)
    assert found.status == (WARN if is_refused else OK)
    assert f"ptrace_scope {scope or 0}" in found.text and ("without CAP_SYS_PTRACE" in found.text) != has_cap


@pytest.mark.parametrize(
    ("namespace", "with_device"), [("pid:[4026531836]", OK), ("pid:[4026532123]", WARN), (None, OK)]
)
def test_pid_namespace(tmp_path, namespace, with_device):
    links = {"/proc/self/ns/pid": namespace} if namespace else {}
    assert finding("pid namespace", machine(tmp_path / "bare", links=links)).status == OK
    assert finding("pid namespace", machine(tmp_path / "gpu", NODE, links=links)).status == with_device
