"""The public API on one GPU, whose ranks are threads that share its memory. one_card.py makes the same checks, and
many more of the kernels on their own."""

from __future__ import annotations

import pytest

from tests.gpu.card.public import CHECKS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_public_api(one_gpu: None, check: str, num_ranks: int) -> None:
    CHECKS[check](num_ranks)
