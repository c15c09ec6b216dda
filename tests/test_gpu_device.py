"""What a GpuDevice does with torch, where torch has no GPU."""

import contextlib

import pytest
import torch

from dcpkernels._gpu_device import GpuDevice
from dcpkernels.errors import DcpDeviceError
from dcpkernels.heap.gpu_region import DeviceMemory


class Heap:
    """A region that is memory of the CPU."""

    def __init__(self, region):
        self.region = region

    def own_memory(self, offset, nbytes):
        return DeviceMemory(self.region.data_ptr() + offset, nbytes)


@pytest.fixture
def device():
    device = GpuDevice(None, None, None, 3)
    device.heap = Heap(torch.zeros(100, dtype=torch.uint8))
    return device


@contextlib.contextmanager
def as_tensor(monkeypatch, make):
    """torch.as_tensor as it is meant to be, of memory on cuda:3."""
    with monkeypatch.context() as patch:

        def given(memory, *, device):
            assert device == "cuda:3" and not torch.is_inference_mode_enabled()
            return make(memory)

        patch.setattr(torch, "as_tensor", given)
        yield


def test_a_tensor_of_the_region_is_the_regions_memory(device, monkeypatch):
    region = device.heap.region
    with as_tensor(monkeypatch, lambda memory: region[10:30]), torch.inference_mode():
        assert device.own_tensor(10, 20).data_ptr() == region.data_ptr() + 10
    with as_tensor(monkeypatch, lambda memory: torch.zeros(0)):
        assert device.own_tensor(10, 0).numel() == 0  # without an address


def test_a_tensor_that_is_a_copy_is_refused(device, monkeypatch):
    copy = device.heap.region.clone()
    with as_tensor(monkeypatch, lambda memory: copy), pytest.raises(DcpDeviceError) as raised:
        device.own_tensor(0, 100)
    text = str(raised.value)
    assert f"{device.heap.region.data_ptr():#x}" in text and f"{copy.data_ptr():#x}" in text and "cuda:3" in text
