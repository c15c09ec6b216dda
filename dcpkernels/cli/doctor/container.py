"""What a container keeps from its processes. The heaps of dcpkernels pass descriptors over sockets, and need neither ptrace
nor a common PID namespace; what else is in the process may."""

from __future__ import annotations

import re

from dcpkernels.cli.doctor.check import Check, Facts, Finding, ok, warn
from dcpkernels.cli.doctor.targets import any_device

_PID_NS_OF_THE_HOST = "pid:[4026531836]"  # PROC_PID_INIT_INO, the same on every Linux
_CAP_SYS_PTRACE = 19
_OTHERS = "PyTorch's symmetric memory (cuda_heap='torch') and some IPC handles"


def _kind(facts: Facts) -> str:
    if facts.exists("/.dockerenv"):
        return "docker"
    if facts.exists("/run/.containerenv"):
        return "podman"
    if "KUBERNETES_SERVICE_HOST" in facts.environ:
        return "kubernetes"
    found = re.search(r"docker|kubepods|libpod|containerd|lxc", facts.read("/proc/self/cgroup") or "")
    return found.group() if found else ""


def check_container(facts: Facts) -> Finding:
    kind = _kind(facts)
    if not kind:
        return ok("none that shows")
    return ok(
        f"{kind}; ranks of several containers of one host must share a network namespace (--network=host, or one pod): "
        "the sockets have abstract names"
    )


def _status(facts: Facts, name: str) -> str:
    found = re.search(rf"^{name}:\s*(.+)$", facts.read("/proc/self/status") or "", re.MULTILINE)
    return found.group(1).strip() if found else ""


def check_seccomp(facts: Facts) -> Finding:
    mode = _status(facts, "Seccomp")
    if mode in ("", "0"):
        return ok("no filter" if mode else "not known")
    text = "a filter is active (mode 2); what CPUs need of it was tried, see 'shared memory'"
    if any_device(facts):
        text = f"{text}; pidfd_getfd and ptrace may be refused: {_OTHERS} need them"
        return warn(text, "where those fail: --security-opt seccomp=unconfined, or a profile that allows them")
    return ok(text)


def check_ptrace(facts: Facts) -> Finding:
    scope = (facts.read("/proc/sys/kernel/yama/ptrace_scope") or "").strip()
    has_cap = bool(int(_status(facts, "CapEff") or "0", 16) >> _CAP_SYS_PTRACE & 1)
    text = f"ptrace_scope {scope or '0 (no Yama)'}, {'with' if has_cap else 'without'} CAP_SYS_PTRACE; dcpkernels does not need it"
    is_refused = scope == "3" or (scope in ("1", "2") and not has_cap)
    if is_refused and any_device(facts):
        return warn(
            f"{text}, but {_OTHERS} may", "where those fail: kernel.yama.ptrace_scope=0, or --cap-add=SYS_PTRACE"
        )
    return ok(text)


def check_pid_namespace(facts: Facts) -> Finding:
    namespace = facts.link("/proc/self/ns/pid")
    if not namespace:
        return ok("not known")
    if namespace == _PID_NS_OF_THE_HOST:
        return ok("that of the host")
    text = "one of its own; dcpkernels does not need a common one"
    if any_device(facts):
        return warn(
            f"{text}, but {_OTHERS} may",
            "with ranks in several containers, where those fail: --pid=host, or one container",
        )
    return ok(text)


CHECKS = [
    Check("container", check_container),
    Check("seccomp", check_seccomp),
    Check("ptrace", check_ptrace),
    Check("pid namespace", check_pid_namespace),
]
