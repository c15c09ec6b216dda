"""What the doctor shows can be pasted anywhere: nothing of a machine or a person is in it, whatever the facts hold."""

from __future__ import annotations

import json

import pytest

from dcpkernels.cli.doctor import render, run
from dcpkernels.cli.doctor.check import Facts, results
from dcpkernels.cli.doctor.privacy import Scrubber
from dcpkernels.cli.doctor.targets import states
from tests.doctor_facts import Lost, machine

USER, HOST, IP, IPV6 = "zelda-q", "node17.corp-xyz", "10.77.66.55", "fe80:0:0:1::77ab"
UUID, PCI, MAC = "3f2504e0-4f89-11d3-9a0c-0305e82c3301", "0000:3b:00.0", "02:42:ac:11:00:02"
HOME = f"/srv/people/{USER}"
PRIVATE = (USER, "node17", "corp-xyz", IP, "77ab", UUID, "3b:00", MAC, "/srv/people", "project-omega", "s3cret")
NASTY = (
    f"ImportError: {HOME}/project-omega/lib/torch.so: no GPU-{UUID} at {PCI} of {HOST} ({IP}, {IPV6}, {MAC}), "
    f"'/srv/people/{USER}' $HOME={HOME}/x: cannot open \"{HOME}/project-omega\" for {USER}@node17"
)


def scrubber() -> Scrubber:
    environ = {"HOME": HOME, "USER": USER, "HOSTNAME": HOST, "TOKEN": "s3cret"}
    return Scrubber({USER: "<user>", HOST: "<host>", "node17": "<host>"} | dict.fromkeys([environ["USER"]], "<user>"))


def nasty_machine(root) -> Facts:
    """Every fact that can be a text is one with all that is private in it."""
    environ = {
        name: f"{NASTY} s3cret"
        for name in ("HOME", "USER", "PATH", "TOKEN", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
                     "HSA_ENABLE_IPC_MODE_LEGACY", "KUBERNETES_SERVICE_HOST", "DCPKERNELS_NVCC", "DCPKERNELS_TIMEOUTS")
    } | {name: f"expandable_segments:True,s3cret:{NASTY}" for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")}  # fmt: skip
    lost = Lost(f"{NASTY}): {NASTY}")
    names = (
        "driver",
        "devices",
        "usable",
        "peers",
        "links",
        "multicast",
        "fabric",
        "handles",
        "python",
        "module",
        "ipc",
    )
    broken = {name: lost for name in names}
    gpu = {
        "driver": "13.0", "python": "13.0", "devices": [{"name": f"H100 {UUID} {PCI}", "capability": [9, 0]}] * 2,
        "usable": NASTY, "peers": [[True, False], [True, True]], "links": lost, "handles": [NASTY, ""],
        "fabric": [[1, 0], [3, 0]], "has_fabric": [True, True], "fabric_handle": NASTY, "multicast": lost, "ipc": [NASTY, ""],
        "vmm": NASTY,
    }  # fmt: skip
    files = {
        "/proc/self/cgroup": f"0::/kubepods/{USER}/{UUID}\n", "/proc/self/mountinfo": f"1 2 0:3 / {HOME} rw - cgroup2 c rw\n",
        "/dev/kfd": "", "/dev/nvidia0": "", "/proc/driver/nvidia/version": f"NVRM {NASTY}\n", "/run/.containerenv": NASTY,
        "/proc/sys/kernel/hostname": HOST,
    }  # fmt: skip

    def refuse():
        raise OSError(13, NASTY, f"{HOME}/x")

    return machine(
        root,
        files,
        {
            "cpu": {"module": lost},
            "torch": {"version": lost, "build": {"cuda": f"13.0 {NASTY}", "hip": None}},
            "cuda": gpu if root.name == "working" else broken,
            "hip": gpu if root.name == "working" else broken,
        },
        environ=environ,
        try_shared_memory=refuse,
        scrubber=scrubber(),
    )


@pytest.mark.parametrize("kind", ["working", "broken"])
def test_nothing_private_is_shown(tmp_path, kind):
    facts = nasty_machine(tmp_path / kind)
    found = results(run.ALL_CHECKS, facts)
    peers = {"cuda": [["."]]}
    shown = render.text(run.LABELS, states(facts), found, peers) + json.dumps(
        render.as_object(states(facts), found, peers)
    )
    assert len(found) > 20 and "<path>" in shown and "<user>" in shown and "<uuid>" in shown
    for word in (*PRIVATE, str(tmp_path)):
        assert word not in shown, [line for line in shown.splitlines() if word in line]


@pytest.mark.parametrize("word", [USER, HOST, IP, IPV6, UUID, f"GPU-{UUID}", "GPU-1a2b3c4d5e6f", PCI, "3b:00.0", MAC, f"{HOME}/a b",
                                  "~/project-omega", "fd00::5", "fe80::1", "02-42-ac-11-00-02", "file:///srv/people/x", "./project-omega/x", "../project-omega",
                                  "0123456789abcdef" * 3])  # fmt: skip
def test_what_is_taken_out(word):
    for text in (word, f"({word})", f"'{word}': x", f"a={word}, b", f"at {word}."):
        cleaned = scrubber().clean(text)
        assert word.rstrip("b ") not in cleaned and "<" in cleaned, cleaned


@pytest.mark.parametrize(
    "text",
    [
        "for CUDA 13.0; kernel module 580.65.06",
        "hip-python 10.0.0.0.1.2, and/or 1/2; 0000:zz",
        "see /dev/nvidia-caps-imex-channels/channel0, /proc/self/status, /dev/kfd and /dev/dri/renderD*",
        "docs/errors.md; https://pytorch.org/get-started/locally",
        "libamdhip64.so.7: cannot open; $ROCM_PATH/lib (else /opt/rocm/lib)",
        "build id 980e66dc84ba4339 (std::runtime_error)",
    ],
)
def test_what_stays(text):
    assert Scrubber({USER: "<user>"}, public=["/opt/rocm"]).clean(text) == text


def test_paths_with_spaces(monkeypatch):
    """Between quotes a path ends where they do; elsewhere it is known by where Python and the home are."""
    clean = Scrubber().clean
    assert clean(f"[Errno 2] no such file: '{HOME} jr/project omega/x', \"/a b/c d.so\": x, '~/a b'") == (
        "[Errno 2] no such file: '<path>', '<path>': x, '<path>'"
    )
    monkeypatch.setattr("sys.path", ["/srv/people/zelda q/omega", "", "/usr/lib"])
    made = Scrubber.of_this_machine({"HOME": "/srv/people/zelda q"})
    assert made.clean(
        "failed: /srv/people/zelda q/omega/dcpkernels/_C_cpu.so: file too short; /srv/people/zelda q/x"
    ) == ("failed: <path>/dcpkernels/_C_cpu.so: file too short; <path>/x")


def test_the_end_of_a_path_that_says_something():
    clean = scrubber().clean
    assert clean("/a/b/libtorch_cuda.so.2: undefined symbol") == "<path>/libtorch_cuda.so.2: undefined symbol"
    assert clean("/opt/x/dcpkernels/env.py said") == "<path>/env.py said"
    assert clean("/procfoo/x") == "<path>" and clean("a\n b") == "a b"


def test_this_machine(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: HOST)
    made = Scrubber.of_this_machine({"HOME": HOME, "USER": "root", "LOGNAME": "quux99", "HOSTNAME": "other-name"})
    assert made.clean(f"{USER} quux99 {HOST} node17 other-name") == "<user> <user> <host> <host> <host>"
    # A name that everybody has, or that is a part of a word.
    assert made.clean("root quux999 anode17") == "root quux999 anode17"
