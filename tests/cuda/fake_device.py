"""A CudaDevice over a fake driver, with the kernels of the CPU (tests/fake_gpu/fake_device.py)."""

from dcpkernels._cuda_device import CudaDevice
from tests.cuda.fake_driver import FakeDriver
from tests.fake_gpu import fake_device


class FakeCudaDevice(fake_device.OnCpuTensors, CudaDevice):
    pass


def on_fake_gpus(fake, index, module=None, device_class=FakeCudaDevice):
    return fake_device.on_fake_gpus(fake, index, device_class, module)


def fake_machine(num_devices, **options):
    # What a kernel of a CPU stores to an address for multicast does not reach anybody: there is a fault, as for any
    # ordinary store of a GPU.
    return FakeDriver(num_devices, **{"multicast": False} | options)


def gpus(index):
    """A machine of eight, and a workspace's device on one of them."""
    return on_fake_gpus(fake_machine(8), index)
