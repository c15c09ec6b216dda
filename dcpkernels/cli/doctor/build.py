"""What is built and what of it runs: the compiled modules, the CPU kernel variant, torch, versions."""

from __future__ import annotations

import difflib
import importlib.util
import os
import platform
import re
from functools import partial
from typing import Any

from dcpkernels import __version__, _backend, env
from dcpkernels.cli.doctor.check import Check, Facts, Finding, Section, fail, ok, warn
from dcpkernels.cli.doctor.probe import gather
from dcpkernels.errors import DcpError, DcpInvalidArgument

MIN_TORCH = (2, 9)  # as in pyproject.toml
REBUILD = "build: `make build`, or install dcpkernels again"


def module_facts(target: str, *more: Any) -> dict[str, dict[str, Any]]:
    """For the child. `built`: whether there is a file of the module; `module`: that it loads, and belongs to this code."""
    name = f"dcpkernels._C_{target}"

    def module() -> dict[str, Any]:
        found = _backend.load(target)
        return {
            "build_id": found.BUILD_ID,
            "protocol": found.PROTOCOL_VERSION,
            "built": list(found.built_variants),
            "sanitizers": found.SANITIZERS,
            "runnable": list(found.runnable_variants),
        }

    return gather(built=lambda: importlib.util.find_spec(name) is not None, module=module)


def check_module(target: str, facts: Facts) -> Finding:
    section = facts.section(target)
    if section.known("built") is False:
        return ok("not built")
    if why := section.error("module"):
        return fail(f"must load and belong to this code ({why})", REBUILD)
    sanitizers = section.get("module").get("sanitizers")
    if sanitizers:
        return warn(f"{_described(section)}, under the sanitizers {sanitizers}: for tests, and slow", REBUILD)
    return ok(_described(section))


def _described(section: Section) -> str:
    module = section.get("module")
    return f"built ({', '.join(module['built'])}; build id {module['build_id']}, protocol {module['protocol']})"


def check_versions(facts: Facts) -> Finding:
    libc = " ".join(filter(None, platform.libc_ver()))
    kernel = re.match(r"\d+\.\d+", os.uname().release)  # what comes behind may be of one's own making
    text = f"dcpkernels {__version__}, Python {platform.python_version()}, {platform.system()} "
    return ok(f"{text}{kernel.group() if kernel else '?'} {platform.machine()}, {libc or 'unknown C library'}")


def isa_of(facts: Facts) -> tuple[str, str]:
    """The CPU kernel variant that a workspace gets, and "" or why none."""
    module = facts.section("cpu").known("module")
    if module is None:
        return "", "a module for CPUs must be built (see 'cpu module')"
    runnable = module["runnable"]
    try:
        wanted = env.cpu_isa()
    except DcpInvalidArgument as error:
        return "", str(error)
    if wanted not in ("auto", *runnable):
        return "", f"cpu_isa must be one that this build and processor have: {', '.join(runnable)} (got {wanted!r})"
    if not runnable:
        return "", f"this processor runs none of the variants that are built ({', '.join(module['built'])})"
    return runnable[0] if wanted == "auto" else wanted, ""


def check_cpu(facts: Facts) -> Finding:
    isa, why = isa_of(facts)
    if why:
        return fail(why, f"unset {env.VARIABLES[0].name}" if env.VARIABLES[0].name in facts.environ else REBUILD)
    model = re.search(r"^model name\s*:\s*(.+)$", facts.read("/proc/cpuinfo") or "", re.MULTILINE)
    name = model.group(1).strip() if model else platform.machine()
    runnable = facts.section("cpu").get("module")["runnable"]
    return ok(f"{name}, {num_cpus_text(facts)}; kernel variant {isa} of {', '.join(runnable)}")


def check_torch(facts: Facts) -> Finding:
    section = facts.section("torch")
    if why := section.error("version"):
        return fail(f"must be importable ({why})", "install torch 2.9 or later: pip install torch")
    version = section.get("version")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < MIN_TORCH:
        least = ".".join(map(str, MIN_TORCH))
        return fail(f"must be of version {least} or later (got {version})", f"pip install 'torch>={least}'")
    return ok(version)


def num_cpus_text(facts: Facts) -> str:
    return f"{facts.num_cpus} CPU{'s' if facts.num_cpus != 1 else ''}"


_PREFIX = "DCPKERNELS_"


def check_variables(facts: Facts) -> Finding:
    known = [variable.name for variable in env.VARIABLES]
    try:
        for read in (env.cpu_isa, env.timeout_s, env.first_call_timeout_s, env.read_only_views, env.vllm_backend):
            read()
    except DcpError as error:
        return fail(str(error), "unset it, or give it such a value")
    others = sorted(name for name in facts.environ if name.startswith(_PREFIX) and name not in known)
    for name in others:
        # Of what is behind the prefix, which all have.
        close = difflib.get_close_matches(
            name[len(_PREFIX) :], [other[len(_PREFIX) :] for other in known], n=1, cutoff=0.8
        )
        if close:
            return warn(f"nobody reads {name}", f"set {_PREFIX}{close[0]}, if that was meant")
    shown = [f"{name}={value}" for name in known if (value := facts.environ.get(name, "").strip())]
    shown += [f"{name} is set, which only builds and tests read" for name in others]
    return ok(", ".join(shown) or "none of dcpkernels' own is set")


def checks(targets: tuple[str, ...]) -> list[Check]:
    return [
        Check("versions", check_versions),
        *(Check(f"{target} module", partial(check_module, target)) for target in targets),
        Check("cpu", check_cpu),
        Check("variables", check_variables),
        Check("torch", check_torch),
    ]
