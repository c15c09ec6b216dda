"""The decode step of Kimi-K3 on the collectives of dcpkernels: a reference to read, to check against, to start from.

    from dcpkernels.kimi_k3 import KimiK3Config, MLALayer

docs/kimi_k3.md has the layer on one page. Nothing here is imported by `import dcpkernels`; names are resolved at
their first use, so that the configuration needs no torch. `triton/` is imported by the attention of tensors on a GPU
alone: it needs the extra dcpkernels[triton]."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcpkernels.kimi_k3.attention import local_attention
    from dcpkernels.kimi_k3.attn_res import AttnResState, AttnResWeights
    from dcpkernels.kimi_k3.cache import DecodeBatch, LatentCache, RequestTable
    from dcpkernels.kimi_k3.config import KimiK3Config
    from dcpkernels.kimi_k3.kda import KDALayer, KDAState, KDAWeights, kda_gate, kda_recurrent_step
    from dcpkernels.kimi_k3.layer import DecoderLayer, LayerWeights
    from dcpkernels.kimi_k3.mla import MLALayer, MLAWeights, workspace_config
    from dcpkernels.kimi_k3.mla_error import output_bound
    from dcpkernels.kimi_k3.model import KimiK3Model
    from dcpkernels.kimi_k3.moe import MLPWeights, MoEWeights, dense_mlp, route, situ
    from dcpkernels.kimi_k3.mxfp4 import MXFP4Tensor
    from dcpkernels.kimi_k3.parallel import TensorParallel

# By module. A function and its module can have one name (attn_res, moe): those are to be had from the module.
_NAMES = {
    "attention": ("local_attention",),
    "attn_res": ("AttnResState", "AttnResWeights"),
    "cache": ("DecodeBatch", "LatentCache", "RequestTable"),
    "config": ("KimiK3Config",),
    "kda": ("KDALayer", "KDAState", "KDAWeights", "kda_gate", "kda_recurrent_step"),
    "layer": ("DecoderLayer", "LayerWeights"),
    "mla": ("MLALayer", "MLAWeights", "workspace_config"),
    "mla_error": ("output_bound",),
    "model": ("KimiK3Model",),
    "moe": ("MLPWeights", "MoEWeights", "dense_mlp", "route", "situ"),
    "mxfp4": ("MXFP4Tensor",),
    "parallel": ("TensorParallel",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dcpkernels.kimi_k3' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dcpkernels.kimi_k3.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
