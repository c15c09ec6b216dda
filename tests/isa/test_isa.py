"""What only compilers can say about the GPU targets, without a GPU: the ops compile for all six architectures from the
same files; no register is spilled and no local memory used; the lines of csrc that order memory became the instructions
that order it. Nothing here has run on a device."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from tests.isa import amd, nvidia, write_table
from tests.isa.compiled import CSRC, Instruction, Kernel, ToolMissing, run_tool
from tests.isa.sites import SITES, faults

OPS = sorted((CSRC / "ops").glob("*.cc"))
PROBE = Path(__file__).with_name("probe.cc")
A2A, KV_GATHER, QUERY_GATHER = "ops/a2a_lse_reduce.cc", "ops/kv_gather.cc", "ops/query_gather.cc"
VENDORS: dict[str, ModuleType] = {**dict.fromkeys(nvidia.ARCHS, nvidia), **dict.fromkeys(amd.ARCHS, amd)}


def need_tools(vendor: ModuleType) -> None:
    try:
        vendor.tools()
    except ToolMissing as missing:
        if os.environ.get("DCPKERNELS_REQUIRE_ISA") == "1":
            raise
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def compiles(tmp_path_factory: pytest.TempPathFactory):
    """Compilations of all ops for the architecture of that name; two at a time, all started with the first use."""
    folder = tmp_path_factory.mktemp("isa")

    def compile_ops(arch: str) -> list[Kernel]:
        return [kernel for op in OPS for kernel in VENDORS[arch].compile_kernels(arch, op, folder)]

    with ThreadPoolExecutor(max_workers=2) as pool:
        pending: dict[str, Future[list[Kernel]]] = {}

        def get(arch: str) -> list[Kernel]:
            for name, vendor in VENDORS.items() if not pending else ():
                try:
                    vendor.tools()
                except ToolMissing:
                    continue
                pending[name] = pool.submit(compile_ops, name)
            return pending[arch].result()

        yield get


@pytest.mark.parametrize("arch", VENDORS)
def test_ops_compile_as_meant(arch: str, compiles: Callable[[str], list[Kernel]], all_kernels: list[Kernel]) -> None:
    need_tools(VENDORS[arch])
    kernels = compiles(arch)
    all_kernels += kernels
    dtypes = {name for kernel in kernels for name in ("float", "Half", "BFloat16") if f"<{name}, " in kernel.name}
    assert dtypes == {"float", "Half", "BFloat16"}
    sites = [site for site in SITES if re.match(site.archs, arch)]
    unused = [site.step for site in sites if not any(site.holds_for(kernel) for kernel in kernels)]
    assert unused == []
    assert faults(kernels) == []


@pytest.mark.parametrize("name", write_table.PAGES)
def test_the_table_in_the_docs_is_of_this_code(name: str, compiles: Callable[[str], list[Kernel]]) -> None:
    page = write_table.PAGES[name]
    need_tools(page.vendor)
    compiler = page.compiler()
    if not page.committed().startswith(f"By {compiler}."):
        pytest.skip(f"the table is by another compiler than {compiler}")
    expected = page.written({arch: compiles(arch) for arch in page.vendor.ARCHS}, compiler)
    assert page.committed() == expected, f"run: python -m tests.isa.write_table {name}"


# -- the gate can fail: one broken line each


def broken_copy(folder: Path, path: str, old: str, new: str) -> Path:
    """A copy of csrc in which `old` of the file `path` is `new`."""
    copy = folder / "csrc"
    shutil.copytree(CSRC, copy)
    text = (copy / path).read_text()
    assert text.count(old) == 1, f"{path} has {text.count(old)} times: {old}"
    (copy / path).write_text(text.replace(old, new))
    return copy


@pytest.mark.parametrize("arch", ["sm_90a", "gfx942"])
def test_the_probe_is_as_meant(arch: str, tmp_path: Path) -> None:
    """What the broken copies below are compared with."""
    need_tools(VENDORS[arch])
    kernels = VENDORS[arch].compile_kernels(arch, PROBE, tmp_path)
    assert [kernel.name for kernel in kernels] == ["Probe<BFloat16>"]
    assert faults(kernels) == []


ARRAY = """uint64_t bases[kMaxRanks];
  for (int i = 0; i < symm.num_ranks; ++i) bases[i] = symm.bases[i];
  return reinterpret_cast<T*>(bases[peer] + offset);"""
PART_ARRAY = """QueryPart parts[kMaxQueryParts];
      for (int k = 0; k < kMaxQueryParts; ++k) parts[k] = p.parts[k];
      const QueryPart& part = parts[i];"""
ASM_STORE = """const Words4 v = {words.word[0], words.word[1], words.word[2], words.word[3]};
  asm volatile("global_store_dwordx4 %0, %1, off" ::"v"(to), "v"(v) : "memory");
  """
ASSIGNMENT = """*static_cast<uint4*>(to) = make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
  """
TWO_LOADS = """const uint2* halves = static_cast<const uint2*>(from);
  asm volatile("" ::: "memory");
  const uint2 low = halves[0];
  asm volatile("" ::: "memory");
  const uint2 high = halves[1];
  const uint4 v = make_uint4(low.x, low.y, high.x, high.y);"""
RELEASE_HALF_WAITED = """__builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  if (__builtin_amdgcn_workitem_id_x() < 3) drain_stores();"""
PUBLISH_IN_A_LOOP = """drain_stores();
  for (int i = 0; i < int(__builtin_amdgcn_workgroup_id_x()); ++i) {
    cta.sync();
    static __attribute__((address_space(1))) int* volatile somewhere;
    *somewhere = i;
  }"""
BREAKS = {
    # arch, file, what is there, what is put in its place, part of a finding
    "cuda: the release store is a relaxed one":
        ("sm_90a", "arch/cuda.h", '"st.release.sys.global"', '"st.relaxed.sys.global"', "before the flag: no release store"),
    "cuda: the acquire load is a relaxed one":
        ("sm_90a", "arch/cuda.h", '"ld.acquire.sys.global"', '"ld.relaxed.sys.global"', "wait: what the flag"),
    "cuda: a release of the device only":
        ("sm_90a", "arch/cuda.h", '"st.release.sys.global"', '"st.release.gpu.global"', "before the flag: no release store"),
    "cuda: no barrier before the flag":
        ("sm_90a", "arch/cuda.h", "publish_done(const Cta& cta) { cta.sync(); }", "publish_done(const Cta&) {}",
         "no publish barrier"),
    "cuda: poison is read without a fence":
        ("sm_90a", "arch/cuda.h", 'asm volatile("fence.acq_rel.sys;" ::: "memory");', "", "no load after reads"),
    "cuda: a load past coherence":
        ("sm_90a", "arch/cuda.h", "const uint4 v = *static_cast<const uint4*>(from);",
         "const uint4 v = __ldg(static_cast<const uint4*>(from));", "a load past coherence"),
    "cuda: an array that is indexed at run time":
        ("sm_90a", "core/symm.h", "return arch::pointer_to<T>(arch::load_constant(symm.bases + peer) + offset);", ARRAY, "bytes of local memory"),
    "cuda: too few registers":
        ("sm_90a", "arch/cuda.h", "__launch_bounds__(kNumThreads, 1)", "__launch_bounds__(kNumThreads, 4)", " spilled, "),
    "hip: the release store is a relaxed one":
        ("gfx942", "arch/hip.h", "release_fence_sys();\n  store_relaxed_sys(word, value);", "store_relaxed_sys(word, value);",
         "before the flag: no release store"),
    "hip: nothing waits for the write-back":
        ("gfx942", "arch/hip.h", '__builtin_amdgcn_fence(__ATOMIC_RELEASE, "");\n  drain_stores();',
         '__builtin_amdgcn_fence(__ATOMIC_RELEASE, "");', "hazard 1"),
    "hip: a store that the compiler does not see":
        ("gfx942", "arch/hip.h", "*global(static_cast<Words4*>(to)) = {",
         ASM_STORE + "if (false) *global(static_cast<Words4*>(to)) = {", "hazard 2"),
    "hip: no drain before the barrier":
        ("gfx942", "arch/hip.h", "drain_stores();\n  cta.sync();", "cta.sync();", "hazard 3"),
    "hip: poison is read without a wait":
        ("gfx942", "arch/hip.h", "drain_stores();\n  return load_relaxed_sys(word);", "return load_relaxed_sys(word);",
         "no load after reads"),
    "hip: nothing waits for what comes before a store":
        ("gfx942", "arch/hip.h", "drain_stores();\n  store_relaxed_sys(word, value);", "store_relaxed_sys(word, value);",
         "reads of the peer's buffer are over: no store behind"),
    "hip: a wait on one way only":
        ("gfx942", "arch/hip.h", "drain_stores();\n  cta.sync();", "if (cta.thread_rank() < 256) drain_stores();\n  cta.sync();",
         "hazard 3"),
    "hip: a write-back that one way only waits for":
        ("gfx942", "arch/hip.h", '__builtin_amdgcn_fence(__ATOMIC_RELEASE, "");\n  drain_stores();', RELEASE_HALF_WAITED,
         "hazard 1"),
    "hip: stores of the next turn, with the wait before the loop":
        ("gfx942", "arch/hip.h", "drain_stores();\n  cta.sync();", PUBLISH_IN_A_LOOP, "hazard 3"),
    "hip: a flag that was found orders nothing":
        ("gfx942", "arch/hip.h", 'if (is(value)) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");', "(void)is;",
         "wait: what the flag announces is read after the flag: no acquire load"),
    "hip: an acquire of the device only":
        ("gfx942", "arch/hip.h", 'if (is(value)) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");',
         'if (is(value)) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");',
         "wait: what the flag announces is read after the flag: no acquire load"),
    "hip: a flag that is stored for this device only":
        ("gfx942", "arch/hip.h", "__hip_atomic_store(global(word), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)",
         "__hip_atomic_store(global(word), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)", "that others may not see"),
    "hip: a flag that goes past order":
        ("gfx942", "arch/hip.h", "__hip_atomic_store(global(word), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)",
         "__builtin_nontemporal_store(value, global(word))", "that others may not see"),
    "hip: a flag that is looked at in a cache":
        ("gfx942", "arch/hip.h", "return __hip_atomic_load(global(word), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);",
         "return *global(word);", "that others may not see"),
    "hip: generic addresses":
        ("gfx942", "arch/hip.h", "return (T*)(Global<T>*)address;", "return (T*)address;", "flat memory"),
    "hip: a write-back at each row":
        ("gfx942", "core/tile.h", "kStream ? sum[v].stream(to) : sum[v].store(to);",
         "kStream ? sum[v].stream(to) : sum[v].store(to); arch::store_release_sys(reinterpret_cast<uint32_t*>(to), 0u);",
         "a write-back of the L2 that no list names, at core/tile.h"),
    "hip: an invalidation at each look":
        ("gfx942", "core/wait.h", "if (awaited.leads()) {", "arch::load_acquire_sys(&state_->call); if (awaited.leads()) {",
         "an invalidation of the L2 that no list names, at core/wait.h"),
    "hip: rows that are loaded one after the other":
        ("gfx942", "arch/hip.h", '#define DCP_UNROLL_LOADS _Pragma("unroll 4")', '#define DCP_UNROLL_LOADS _Pragma("unroll 1")',
         "reduce: rows of four shards at once: 1 load of 16 bytes and not 4"),
    "hip: an array that is indexed at run time":
        ("gfx942", "core/symm.h", "return arch::pointer_to<T>(arch::load_constant(symm.bases + peer) + offset);", ARRAY, "bytes of local memory"),
    "hip: too few registers":
        ("gfx942", "arch/hip.h", "__attribute__((global)) ", "__attribute__((global)) __attribute__((amdgpu_num_vgpr(16))) ",
         " spilled, "),
    "core: the flag is stored without order":
        ("gfx942", "core/channel.h", "arch::signal_flag(flag_at(peer, symm_.rank), expected_flag(),",
         "arch::store_relaxed_sys(&flag_at(peer, symm_.rank)->value, expected_flag()); (void)(",
         "where is the release store"),
    "cuda: 16 bytes in two loads":
        ("sm_90a", "arch/cuda.h", "const uint4 v = *static_cast<const uint4*>(from);", TWO_LOADS,
         "no load of 16 bytes at core/tile.h"),
    "cuda: an acquire that nobody asked for":
        ("sm_90a", "core/channel.h", "const bool faulted = cta_.thread_rank() == 0 && is_poisoned(symm_, control_);",
         "arch::load_acquire_sys(&state_->call); const bool faulted = is_poisoned(symm_, control_);",
         "a flush of the L1 that no list names, at core/channel.h"),
    "cuda: a flag of the host is stored with order":
        ("sm_90a", "core/channel.h", "arch::store_relaxed_sys(&state_->call, call_);", "arch::store_release_sys(&state_->call, call_);",
         "has no line with `arch::store_relaxed_sys(&state_->call, call_);`"),
    "cuda: an access of the system that no list names":
        ("sm_90a", "core/tile.h", "kStream ? sum[v].stream(to) : sum[v].store(to);",
         "kStream ? sum[v].stream(to) : sum[v].store(to); arch::store_relaxed_sys(reinterpret_cast<uint32_t*>(to), 0u);",
         "a store that no list names, at core/tile.h"),
    "core: the epoch is stored without order":
        ("sm_90a", "core/channel.h", "arch::store_release_sys(last_epoch(), epoch_);",
         "arch::store_relaxed_sys(last_epoch(), epoch_);", "where is the release store"),
}  # fmt: skip

# The same in an op itself.
OP_BREAKS = {
    # op, arch, file, what is there, what is put in its place, part of a finding
    "cuda: rows are stored to one rank":
        (KV_GATHER, "sm_90a", "arch/cuda.h", '"multimem.st.relaxed.sys.global.v4.f32', '"st.relaxed.sys.global.v4.f32',
         "publish to all: a row, by one store: no multicast store"),
    "cuda: the flags of all ranks are relaxed ones":
        (KV_GATHER, "sm_90a", "arch/cuda.h", '"multimem.st.release.sys', '"multimem.st.relaxed.sys', "before the flags, by one"),
    "cuda: the flag is stored to one rank":
        (KV_GATHER, "sm_90a", "arch/cuda.h", '"multimem.st.release.sys', '"st.release.sys', "before the flags, by one"),
    "cuda: no fence between aliases before the flags":
        (KV_GATHER, "sm_90a", "arch/cuda.h", "if (uses_multicast) fence_aliases();\n  publish_done(cta);", "publish_done(cta);",
         "than the one that was stored to ...: no fence between aliases"),
    "cuda: no fence between aliases after the flags":
        (KV_GATHER, "sm_90a", KV_GATHER, "arch::broadcast_arrived(has_multicast(p.buffers));", "",
         "has no line with `arch::broadcast_arrived(`"),
    "cuda: a weaker fence between aliases":
        (KV_GATHER, "sm_90a", "arch/cuda.h", '"fence.proxy.alias;"', '"fence.acq_rel.sys;"',
         "wait for all of the chunk: it was stored to another address than the one that is read: no fence"),
    "cuda: no barrier before the flags":
        (KV_GATHER, "sm_90a", "arch/cuda.h", "if (uses_multicast) fence_aliases();\n  publish_done(cta);",
         "if (uses_multicast) fence_aliases();", "memory ...: no publish barrier"),
    "cuda: a load past coherence of what peers have stored":
        (KV_GATHER, "sm_90a", "arch/cuda.h", "return *from;", "return __ldg(from);", "a load past coherence"),
    "cuda: parts that are indexed at run time in a copy":
        (QUERY_GATHER, "sm_90a", QUERY_GATHER, "const QueryPart& part = p.parts[i];", PART_ARRAY, "bytes of local memory"),
    "hip: parts that are indexed at run time in a copy":
        (QUERY_GATHER, "gfx942", QUERY_GATHER, "const QueryPart& part = p.parts[i];", PART_ARRAY, "bytes of local memory"),
    "hip: no drain before the barrier, after stores to all":
        (KV_GATHER, "gfx942", "arch/hip.h", "broadcast_done(const Cta& cta, bool) { publish_done(cta); }",
         "broadcast_done(const Cta& cta, bool) { cta.sync(); }", "memory ...: no publish barrier"),
    "cuda: 16 bytes as the compiler likes":
        (A2A, "sm_90a", "arch/cuda.h", 'asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::', ASSIGNMENT + 'asm volatile("" ::',
         "no store of 16 bytes at core/tile.h"),
    "hip: code for multicast":
        (KV_GATHER, "gfx942", "arch/hip.h", "kHasMulticast = false", "kHasMulticast = true", "code for multicast"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BREAKS, *OP_BREAKS])
def test_a_broken_line_is_found(case: str, tmp_path: Path) -> None:
    op, arch, path, old, new, finding = OP_BREAKS.get(case) or ("", *BREAKS[case])
    need_tools(VENDORS[arch])
    csrc = broken_copy(tmp_path, path, old, new)
    kernels = VENDORS[arch].compile_kernels(arch, csrc / op if op else PROBE, tmp_path, csrc)
    try:
        found = faults(kernels, csrc)
    except AssertionError as lost:  # the line itself is gone
        found = [str(lost)]
    assert any(finding in text for text in found), found


# -- the reader, on text: what the compiler here does not happen to emit


def test_parts_of_two_calls_are_no_release() -> None:
    """A fence that another line asked for does not count."""
    fence, store = (Instruction(text, (line,)) for text, line in (
        ("MEMBAR.ALL.SYS", "core/channel.h:2"), ("STG.E.64.STRONG.SYS desc[UR4][R2.64], R4", "core/channel.h:1")))  # fmt: skip
    assert nvidia.ordered_events([fence, store]) == []


# -- what both vendors share, run on the host


HOST = Path(__file__).with_name("host")  # a target that is played by threads


def build_on_the_host(name: str, folder: Path, csrc: Path = CSRC) -> Path:
    command = ["g++", "-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-pthread"]
    command += [f"-I{HOST}", f"-I{csrc}", str(Path(__file__).with_name(f"{name}.cpp")), "-o", str(folder / name)]
    run_tool(command, folder)
    return folder / name


@pytest.mark.parametrize(
    ("name", "output"),
    [("numbers_gpu", "log2: at most"), ("bytes_gpu", "bytes: all as meant"), ("lines_gpu", "lines: all as meant")],
)
def test_on_the_host(name: str, output: str, tmp_path: Path) -> None:
    assert run_tool([str(build_on_the_host(name, tmp_path))], tmp_path)[0].startswith(output)


LINE_BREAKS = {
    # file, what is there, what is put in its place, part of what is printed
    "the flag in another lane":
        ("arch/cuda_line.h", "if (part_of(lanes) == kNumParts - 1) words[turn]", "if (part_of(lanes) == kNumParts - 2) words[turn]",
         "flag: "),
    "half of the flag":
        ("arch/cuda_line.h", "words[turn].word[2] = words[turn].word[3] = flag;", "words[turn].word[3] = flag;", "flag: "),
    "every lane decides for itself":
        ("arch/cuda_line.h", "if (!all_lanes(are_there)) return false;", "if (!are_there) return false;", "all lanes agree: "),
    "a look at the first lines only":
        ("arch/cuda_line.h", "if (k < num) are_there &= flag_of", "if (k < 4) are_there &= flag_of", "all lanes agree: "),
    "lines that are loaded before the flags are there":
        ("arch/cuda_line.h", "if (!all_lanes(are_there)) return false;", "const bool has_come = all_lanes(are_there);", "unpacked: "),
    "lines behind the row are stored":
        ("arch/cuda_line.h", "if (line_of(lanes, turn) < num) {\n        store_relaxed_16(",
         "if (true) {\n        store_relaxed_16(", "stored behind the row: "),
    "one lane alone looks at one line":
        ("arch/cuda_line.h", "if (flag_of(packets, k) != twice(flag)) return false;",
         "if (k == 0 && flag_of(packets, k) != twice(flag)) return false;", "one lane alone: "),
    "odd lines begin in the middle of 16 bytes":
        ("core/packet.h", "128 * is_second + 16 * j : 112 + 8 * is_second", "120 * is_second + 16 * j : 112 + 120 * is_second",
         "misaligned: "),
    "odd lines repeat 8 bytes of the even ones":
        ("core/packet.h", ": 112 + 8 * is_second", ": 112", "payload on the wire: "),
    "the LSE of another head":
        ("core/packet.h", "arch::bit_cast<uint32_t>(lse(first + i))", "arch::bit_cast<uint32_t>(lse(i))", "LSE read once: "),
    "16 bytes across the end of a head":
        ("core/packet.h", "num_words * 4 / int(sizeof(T)) <= run)", "num_words * 4 / int(sizeof(T)) <= num_elements)",
         "payload on the wire: "),
    "16 bytes at any address":
        ("arch/gpu_bytes.h", "return reinterpret_cast<uint64_t>(address) % (4 * kNum) == 0;",
         "return reinterpret_cast<uint64_t>(address) % 2 == 0;", "misaligned: "),
    "always one element at a time":
        ("arch/gpu_bytes.h", "return reinterpret_cast<uint64_t>(address) % (4 * kNum) == 0;", "return address == nullptr;",
         "loads of 16 and 8 bytes: "),
    "what lies behind the last LSE is unpacked too":
        ("core/packet.h", "if (at >= end) return;", "", "unpacked: "),
    "a new row begins with the first group":
        ("core/packet.h", "call -= num_calls();\n  }", "call = lanes.group();\n  }", "turns: "),
}  # fmt: skip


@pytest.mark.parametrize("case", LINE_BREAKS)
def test_a_broken_line_of_128_bytes_is_found(case: str, tmp_path: Path) -> None:
    path, old, new, printed = LINE_BREAKS[case]
    csrc = broken_copy(tmp_path, path, old, new)
    program = build_on_the_host("lines_gpu", tmp_path, csrc)
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and any(line.startswith(printed) for line in done.stdout.splitlines()), done.stdout
