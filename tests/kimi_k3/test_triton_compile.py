"""The Triton kernels compiled for five GPUs that are not here, as launches in the shapes of Kimi-K3: no register is
spilled, shared memory is enough, attention is on matrix units. And nothing but the kernels needs triton."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kimi_k3.interpreted import child, need

SPLIT = ("mla_decode.split H96 bf16", "mla_decode.split H12 bf16", "mla_decode.split H96 fp32")
KERNELS = (*SPLIT, "mla_decode.combine bf16", "kda_step H12 bf16")
ARCHS = ("sm_90", "sm_100", "sm_103", "gfx942", "gfx950")
# bf16. wgmma and tcgen05 take 64 rows and more, and a tile has 16 or 32 heads.
MATRIX_UNITS = {"sm_90": {"mma.sync"}, "sm_100": {"mma.sync"}, "sm_103": {"mma.sync"},
                "gfx942": {"v_mfma_f32_16x16x16_bf16", "v_mfma_f32_32x32x8_bf16"},
                "gfx950": {"v_mfma_f32_16x16x16_bf16", "v_mfma_f32_16x16x32_bf16",
                           "v_mfma_f32_32x32x16_bf16"}}  # fmt: skip

COMPILE = """
import json
from dcpkernels.kimi_k3.triton import compile as c
print(json.dumps({arch: {name: {**c.resources(launch, arch)._asdict(), "limit": c.SHARED_LIMITS[arch]}
                         for name, launch in c.launches(target.backend).items()}
                  for arch, target in c.TARGETS.items()}))
"""

# Two that cannot fit: 128 heads in the registers of four warps, and tiles of 128 keys in the LDS of a gfx942.
TOO_LARGE = """
import json
from dcpkernels.kimi_k3.triton import compile as c, mla_decode as m
def split(tile, arch):
    m.choose_tile = lambda *_: m.Tile(*tile)
    return c.resources(c.launches(c.TARGETS[arch].backend)["mla_decode.split H96 bf16"], arch)._asdict()
print(json.dumps([split((64, 32, 4, 1), "sm_90"), split((64, 32, 4, 1), "gfx942"), split((16, 128, 4, 1), "gfx942")]))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    need("triton")
    # A cache of its own, so that what is read here was compiled here.
    return json.loads(child("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_resources(kernel: str, arch: str, compiled: dict[str, dict[str, dict[str, Any]]]) -> None:
    found = compiled[arch][kernel]
    assert found["spills"] == 0 and found["local_bytes"] == 0
    # More would not launch: a multiprocessor has 65,536 registers; a SIMD, one of four, 512 a lane for its waves.
    is_amd = arch.startswith("gfx")
    assert 0 < found["registers"] <= (512 * 4 // found["num_warps"] if is_amd else min(255, 2048 // found["num_warps"]))
    assert found["shared_bytes"] <= found["limit"]


def test_all_kernels_are_here(compiled: dict[str, dict[str, dict[str, Any]]]) -> None:
    assert set(compiled) == set(ARCHS) and all(set(found) == set(KERNELS) for found in compiled.values())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", SPLIT[:2])
def test_attention_is_on_matrix_units(kernel: str, arch: str, compiled: dict[str, dict[str, dict[str, Any]]]) -> None:
    units = set(compiled[arch][kernel]["matrix_units"])
    assert units and units <= MATRIX_UNITS[arch]


def test_what_does_not_fit_is_found(tmp_path: Any) -> None:
    need("triton")
    nvidia, amd, lds = json.loads(child("-c", TOO_LARGE, TRITON_CACHE_DIR=str(tmp_path)))
    assert nvidia["spills"] > 0 and amd["spills"] > 0 and amd["local_bytes"] > 0
    assert lds["shared_bytes"] > 64 << 10


def test_only_the_kernels_need_triton() -> None:
    """The packages import where triton is, and do not load it; and where it is not."""
    imports = "import sys, dcpkernels, dcpkernels.kimi_k3, dcpkernels.kimi_k3.config, dcpkernels.kimi_k3.cache\n"
    imports += "import dcpkernels.kimi_k3.triton, dcpkernels.kimi_k3.triton.launch\n"
    imports += "for name in dcpkernels.__all__ + list(getattr(dcpkernels.kimi_k3, '__all__', ())):\n"
    imports += "    getattr(dcpkernels if hasattr(dcpkernels, name) else dcpkernels.kimi_k3, name)\n"
    assert child("-c", imports + "print('triton' in sys.modules)").split() == ["False"]
    blocked = "import sys; sys.modules['triton'] = None\n"
    assert child("-c", blocked + imports + "print(sys.modules['triton'])").split() == ["None"]
    with pytest.raises(AssertionError, match="import of triton halted"):
        child("-c", blocked + "import dcpkernels.kimi_k3.triton.mla_decode")
