"""Tests that need a GPU are skipped, with the reason, where there is none. Collecting them touches no device."""

import pytest


@pytest.fixture(scope="session")
def one_gpu():
    import os

    from tests.gpu.card.public import missing
    from tests.gpu.one_card import ENVIRONMENT

    os.environ.update(ENVIRONMENT)  # read when the device is first used
    reason = missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def num_gpus(one_gpu) -> int:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs at least 2 GPUs (here: {torch.cuda.device_count()})")
    return torch.cuda.device_count()
