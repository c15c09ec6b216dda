"""Oracles: the same mathematics in packages that nobody here wrote (transformers, flash-linear-attention), and how far
from them a result is.

They are imported inside of tests only: that takes seconds, and rank processes import the modules of their functions."""

from __future__ import annotations

import importlib
import os
import warnings
from types import ModuleType

import pytest
import torch


def oracle(name: str) -> ModuleType:
    """The module `name`. Where it is missing the test is skipped, or fails if DCPKERNELS_REQUIRE_ORACLES=1."""
    # Nothing is to be looked for on a network.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    try:
        with warnings.catch_warnings():
            # fla says that Triton has no GPU here, Triton and torch that something of theirs is deprecated.
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("DCPKERNELS_REQUIRE_ORACLES") == "1":
            pytest.fail(f"the oracle {name} is missing: {error}")
        pytest.skip(f"the oracle {name} is missing: {error}")


def in_torch(module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch | None = None) -> object:
    """The function `name` of a modeling module of transformers as it is written there. Where fla is installed the
    module itself calls fla's Triton kernels instead, which need a GPU; with `monkeypatch` it calls this one too."""
    function = getattr(module, name).__wrapped__
    if monkeypatch is not None:
        monkeypatch.setattr(module, name, function)
    return function


def rel_err(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max |a - e| / max |e|; NaN where one has a NaN, which is below nothing."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).abs().max() / expected.abs().max())


def random(*shape: int, seed: int, std: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Drawn apart from dcpkernels.kimi_k3.weights."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)
