"""The rules of csrc/README.md and docs, as tests. Each rule is a function over the text of files, so that the last test
of a rule can feed it a text that breaks it."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "dcpkernels"

# What each folder of csrc may include, besides itself and the standard library.
CSRC_LAYERS = {
    "arch": {"arch", "core/types.h"},
    "core": {"arch", "core"},
    "ops": {"arch", "core", "ops"},
    "host": {"arch", "core", "ops", "host"},
    "bindings": {"arch", "core", "ops", "host", "bindings"},
}

# What each module of the package may import at run time, by prefix below `dcpkernels.`. Longest match wins.
LEAVES: set[str] = {"errors"}
PACKAGE_LAYERS = {
    "errors": set(),
    "env": LEAVES,
    "layout": LEAVES,
    "region_layout": LEAVES,
    "kv_gather_plan": LEAVES,
    "planner": LEAVES | {"region_layout", "planner"},
    "reference": LEAVES,
    "_check": LEAVES,
    "_backend": LEAVES | {"region_layout"},
    "heap": LEAVES | {"heap"},
    "_faults": LEAVES | {"heap.verdict"},
    "_link_check": LEAVES | {"heap.group", "heap.verdict"},
    "config": LEAVES | {"env", "_check", "region_layout"},
    "_channels": LEAVES,
    "_gathers": LEAVES | {"config", "_check", "region_layout"},
    # What a device is to _direct; only workspace knows which there are.
    "_cpu_device": LEAVES | {"config", "heap", "_backend", "_channels", "region_layout"},
    "_gpu_device": LEAVES | {"config", "heap", "_check", "_link_check", "region_layout"},
    "_cuda_device": LEAVES | {"heap", "_gpu_device"},
    "_hip_device": LEAVES | {"heap", "_gpu_device"},
    "_direct": LEAVES | {"config", "heap", "_check", "_faults", "_gathers", "region_layout"},
    "_streams": LEAVES | {"heap.group", "_faults", "region_layout"},
    "_collective_gathers": LEAVES | {"config", "_check", "_faults", "_gathers", "_streams", "region_layout"},
    "collective": LEAVES
    | {"config", "heap.group", "_check", "_collective_gathers", "_faults", "_streams", "region_layout"},
    # _self_check uses ops on a workspace; only its method imports it, when it is called.
    "workspace": LEAVES
    | {"env", "config", "heap", "_check", "_backend", "_channels", "_cpu_device", "_gpu_device", "_direct"}
    | {"_cuda_device", "_hip_device", "collective", "region_layout", "_self_check"},
    "_self_check": LEAVES | {"kv_gather_plan", "ops", "reference"},
    "ops": LEAVES | {"_check", "kv_gather_plan"},
    "testing": LEAVES | {"", "heap", "layout", "reference", "testing"},
    # The reference layer knows of the rest only what any engine may: what `import dcpkernels` has, and layout.
    "kimi_k3": LEAVES | {"", "layout", "kimi_k3"},
    "integrations": LEAVES | {"", "env", "integrations"},
    "cli": LEAVES | {"", "env", "layout", "reference", "testing", "cli", "kimi_k3", "planner", "_backend", "heap.memory"},
    # It looks at what heaps stand on, too.
    "cli.doctor": LEAVES
    | {"", "env", "testing", "cli.doctor", "cli.output", "cli.parsing", "cli.table", "heap", "_backend"}
    | {"integrations.vllm_versions"},
    "__main__": {"cli"},
    "": LEAVES,
}


def csrc_files() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cc", ".cpp"))


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


# -- csrc: arrows point down


def bad_includes(folder: str, text: str) -> list[str]:
    included = re.findall(r'#include "([^"]+)"', text)
    return [name for name in included if not {name, name.split("/")[0]} & CSRC_LAYERS[folder]]


@pytest.mark.parametrize("path", csrc_files(), ids=relative)
def test_includes_point_down(path: Path) -> None:
    assert bad_includes(path.parent.name, path.read_text()) == []


def test_an_upward_include_is_found() -> None:
    assert bad_includes("core", '#include "ops/a2a_lse_reduce.h"') == ["ops/a2a_lse_reduce.h"]
    assert bad_includes("arch", '#include "core/channel.h"') == ["core/channel.h"]


# -- csrc: only arch/ knows the hardware; csrc owns nothing; waits and order have one home

CSRC_RULES = {
    # rule -> (pattern, path prefixes where it is allowed)
    "preprocessor conditionals": (r"^\s*#\s*(if|ifdef|ifndef|elif)\b", ("arch/",)),
    "intrinsics and asm": (r"\b_mm\d*_\w+|__builtin_ia32\w+|\basm\b|__asm__|immintrin|arm_neon", ("arch/",)),
    "atomics": (r"__atomic_|std::atomic|\bvolatile\b", ("arch/",)),
    "fences": (r"atomic_thread_fence|__sync_synchronize|__threadfence", ()),
    "torch": (r"torch/|ATen|c10", ()),
    "allocation": (r"\b(malloc|calloc|mmap|new\s+\w+\[|std::make_unique|std::make_shared)\b", ()),
    # A HIP module is loaded once, by whichever thread comes first.
    "threads": (r"std::(thread|mutex|async)|pthread_", ("arch/hip_runtime.cpp",)),
    "environment": (r"\bgetenv\b", ()),
    "printing": (r"\b(printf|fprintf|std::cout|std::cerr|puts)\b", ()),
    "ending the process": (r"\b(abort|exit|terminate|trap)\s*\(|__builtin_trap|\bassert\s*\(", ()),
    "pybind11": (r"pybind11", ("bindings/",)),
    "read-only loads of symmetric memory": (r"__ldg|ld\.global\.nc|__restrict__\s+const", ()),
}


def rule_breaks(rule: str, where: str, text: str) -> list[str]:
    pattern, allowed = CSRC_RULES[rule]
    if where.startswith(allowed) if allowed else False:
        return []
    lines = without_comments(text).splitlines()
    return [line.strip() for line in lines if re.search(pattern, line)]


@pytest.mark.parametrize("rule", CSRC_RULES)
def test_csrc_rule(rule: str) -> None:
    breaks = {relative(p): rule_breaks(rule, p.relative_to(CSRC).as_posix(), p.read_text()) for p in csrc_files()}
    assert {path: lines for path, lines in breaks.items() if lines} == {}


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("preprocessor conditionals", "#if defined(__x86_64__)"),
        ("intrinsics and asm", "_mm512_add_ps(a, b);"),
        ("atomics", "__atomic_load_n(p, 0);"),
        ("fences", "__threadfence_system();"),
        ("torch", "#include <torch/extension.h>"),
        ("allocation", "void* p = malloc(8);"),
        ("threads", "std::thread t;"),
        ("environment", 'getenv("X");'),
        ("printing", 'printf("x");'),
        ("ending the process", "abort();"),
        ("pybind11", "#include <pybind11/stl.h>"),
        ("read-only loads of symmetric memory", "__ldg(p);"),
    ],
)
def test_a_broken_csrc_rule_is_found(rule: str, line: str) -> None:
    assert rule_breaks(rule, "ops/x.cc", line) == [line]


# No variant compiles a function of these: they hold data or macros, or are the host's.
HOST_FILES = {"core/types.h", *(f"arch/{name}" for name in ("target.h", "test_build.h", "runs_here.h"))}
HOST_FILES |= {"arch/hip_runtime.h", "arch/hip_runtime.cpp"}


def test_every_variant_function_has_its_own_namespace() -> None:
    """Functions of core/ and arch/ live in dcp::DCP_NS; core/types.h, which all variants share, holds none."""
    for path in csrc_files():
        where = path.relative_to(CSRC).as_posix()
        if where.startswith(("core/", "arch/")) and where not in HOST_FILES:
            assert "namespace dcp::DCP_NS" in path.read_text(), where
    assert not re.search(
        r"\binline\b(?! constexpr)|DCP_FN|\bstatic\b", without_comments((CSRC / "core/types.h").read_text())
    )


def test_contract_names_all_that_kernels_use() -> None:
    contract = (CSRC / "arch/contract.h").read_text()
    used: set[str] = set()
    for path in csrc_files():
        if path.parent.name in ("core", "ops"):
            used |= set(re.findall(r"\barch::(\w+)", without_comments(path.read_text())))
    assert used and {name for name in used if not re.search(rf"\b{name}\b", contract)} == set()


# -- a target is named in the places of docs/adding-a-target.md, and nowhere else

# Of those that a target stands for. `cuda` alone is also what torch calls any GPU.
VENDOR_WORDS = r"(?<![a-z])(hip|rocm|amd|gfx\d+|nvidia|nvcc|sm_\d+\w?|nvlink|xgmi|cudaheap|cuda_driver|_c_cuda|_c_hip|ptx)(?![a-z])"


def places_of_targets() -> list[str]:
    text = (ROOT / "docs/adding-a-target.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    beside = re.findall(r"`(dcpkernels/[^`]*\*)`", text.partition("Outside of the product")[2].partition("##")[0])
    return [place.replace("<target>", "*") for row in rows for place in re.findall(r"`([^`]+)`", row)] + beside


def named_vendors(text: str) -> list[str]:
    return sorted(set(re.findall(VENDOR_WORDS, text.lower())))


@pytest.mark.parametrize("path", [*csrc_files(), *package_files(), ROOT / "setup.py"], ids=relative)
def test_vendors_are_named_in_the_places_of_a_target(path: Path) -> None:
    where = relative(path)
    if any(Path(where).match(place) or fnmatch.fnmatch(where, place) for place in places_of_targets()):
        return
    assert named_vendors(path.read_text()) == [], where


def test_a_named_vendor_is_found() -> None:
    assert named_vendors("if (is_hip) { use(gfx942); }  // not NVIDIA") == ["gfx942", "hip", "nvidia"]
    assert named_vendors("ship the amdahl chips") == []


# -- one stem per op, in six places


# Kernels that nobody calls: a workspace runs them on its own memory, from dcpkernels/_x.py.
SELF_TESTS = {"link_check"}


def test_one_stem_per_op() -> None:
    kernels = {path.stem for path in (CSRC / "ops").glob("*.cc")}
    for kernel in SELF_TESTS:
        for path in (
            f"csrc/ops/{kernel}.h",
            f"csrc/bindings/{kernel}.cpp",
            f"dcpkernels/_{kernel}.py",
            f"tests/test_{kernel}.py",
        ):
            assert kernel in kernels and (ROOT / path).exists(), path
    ops = sorted(kernels - SELF_TESTS)
    assert ops
    for op in ops:
        for path in (
            CSRC / "ops" / f"{op}.h",
            CSRC / "bindings" / f"{op}.cpp",
            PACKAGE / "ops" / f"{op}.py",
            ROOT / "tests" / f"test_{op}.py",
            ROOT / "tests/protocol" / f"{op}.py",
        ):
            assert path.exists(), relative(path)
        assert f"def {op}(" in (PACKAGE / "reference.py").read_text()
        assert op in (ROOT / "docs/protocol.md").read_text()


def test_steps_have_the_same_names_everywhere() -> None:
    steps = ("enter", "acquire", "publish", "signal", "wait", "receive", "reduce", "release", "confirm", "leave")
    for path in ("csrc/ops/a2a_lse_reduce.h", "docs/protocol.md", "tests/protocol/a2a_lse_reduce.py"):
        text = (ROOT / path).read_text()
        assert [step for step in steps if not re.search(rf"\b{step}\b", text)] == [], path


# -- the package


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def runtime_imports(tree: ast.AST) -> Iterator[str]:
    """Names below dcpkernels that the module imports outside `if TYPE_CHECKING`. "" is the package itself."""
    hidden = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition("dcpkernels")[2].lstrip(".") for alias in node.names
                        if alias.name.split(".")[0] == "dcpkernels")  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dcpkernels":
            base = node.module.partition("dcpkernels")[2].lstrip(".")
            for alias in node.names:
                child = PACKAGE.joinpath(*base.split("."), alias.name) if base else PACKAGE / alias.name
                is_module = child.is_dir() or child.with_suffix(".py").exists()
                yield ".".join(filter(None, [base, alias.name if is_module else ""]))


def bad_imports(module: str, source: str) -> list[str]:
    layer = max((name for name in PACKAGE_LAYERS if name == "" or f"{module}.".startswith(f"{name}.")), key=len)
    allowed = PACKAGE_LAYERS[layer]
    return [
        name for name in runtime_imports(ast.parse(source))
        if not any(name == a or (a and name.startswith(f"{a}.")) for a in allowed)
    ]  # fmt: skip


@pytest.mark.parametrize("path", package_files(), ids=relative)
def test_imports_point_down(path: Path) -> None:
    assert bad_imports(module_name(path), path.read_text()) == []


def test_an_upward_import_is_found() -> None:
    assert bad_imports("heap.cpu", "from dcpkernels.workspace import Workspace") == ["workspace"]
    assert bad_imports("ops.x", "def f():\n    import dcpkernels.cli") == ["cli"]


def package_breaks(where: str, source: str) -> list[str]:
    breaks = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            breaks.append("print")
        # Reading our own variables is env.py's job; the testing package sets up other libraries' variables.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"DCPKERNELS_\w+$", node.value):
            breaks.append(node.value)
    allowed = {"env.py": ("DCPKERNELS_",), "cli": ("print",)}.get(where.split("/")[0], ())
    return [found for found in breaks if not found.startswith(allowed or ("\0",))]


@pytest.mark.parametrize("path", package_files(), ids=relative)
def test_no_print_and_one_reader_of_the_environment(path: Path) -> None:
    assert package_breaks(path.relative_to(PACKAGE).as_posix(), path.read_text()) == []


def test_a_print_is_found() -> None:
    assert package_breaks("heap/cpu.py", "print(1)") == ["print"]
    assert package_breaks("heap/cpu.py", "os.environ['DCPKERNELS_X']") == ["DCPKERNELS_X"]
    assert package_breaks("cli/demo.py", "print(1)") == []


def private_uses(source: str) -> list[str]:
    """Attributes with a leading underscore of anything but the object itself."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_)", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


@pytest.mark.parametrize("path", sorted((PACKAGE / "kimi_k3").rglob("*.py")), ids=relative)
def test_the_reference_layer_uses_what_is_public(path: Path) -> None:
    assert private_uses(path.read_text()) == []


def test_a_private_use_is_found() -> None:
    assert private_uses("workspace._impl.call(self._x)") == ["workspace._impl"]
    assert bad_imports("kimi_k3.mla", "from dcpkernels import _check\nimport dcpkernels.heap.cpu") == [
        "_check",
        "heap.cpu",
    ]


# -- size


def test_files_are_small() -> None:
    files = [
        *csrc_files(),
        *package_files(),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "bench").rglob("*.py"),
    ]
    long = {relative(path): n for path in files if (n := len(path.read_text().splitlines())) > 500}
    assert long == {}
