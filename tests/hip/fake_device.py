"""A HipDevice over a fake runtime, with the kernels of the CPU (tests/fake_gpu/fake_device.py)."""

from dcpkernels._hip_device import HipDevice
from tests.fake_gpu.fake_device import OnCpuTensors, on_fake_gpus
from tests.hip.fake_hip import FakeHip


class FakeHipDevice(OnCpuTensors, HipDevice):
    pass


def gpus(index, **options):
    """A machine of eight, and a workspace's device on one of them."""
    return on_fake_gpus(FakeHip(8, **options), index, FakeHipDevice)


def gpus_without_ipc(index):
    return gpus(index, no_export=1)
