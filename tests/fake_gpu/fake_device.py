"""Workspaces whose regions a GPU's heap makes, over a fake driver, while the kernels are those of the CPU: what lies between
`Workspace` and the driver is the code that runs with a GPU, but for the few lines that this file replaces."""

import contextlib
import ctypes

import torch

from dcpkernels import _backend, workspace


class OnCpuTensors:
    """Before a GpuDevice among the bases: tensors are the CPU's, and a kernel has run when its call returns."""

    def __init__(self, config, layout, module, index, fake):
        super().__init__(config, layout, module, index)
        self.driver_api = fake
        self.streams = []  # that calls were enqueued on
        self.graph = None  # a list: calls go there instead, as in a capture

    def own_tensor(self, offset, num_bytes):
        memory = self.heap.own_memory(offset, num_bytes)
        address, _ = memory.__cuda_array_interface__["data"]
        return torch.frombuffer(_Bytes(memory, address, num_bytes).buffer, dtype=torch.uint8)

    buffer_tensor = own_tensor

    def rows(self, rows):
        return rows.ctypes.data, rows

    exchange_device = staticmethod(lambda index: index)
    give_back_device = staticmethod(lambda index: None)

    def current_stream(self):
        self.streams.append(0)
        return 0

    def calls(self, run, run_in_threads, stream_idx):
        call = super().calls(run, run_in_threads, stream_idx)

        def maybe(*args):
            if self.graph is None:
                return call(*args)
            self.graph.append((call, args))
            return 0

        return maybe

    def uses(self, copies):
        pass

    def _new_stream(self):
        return FakeStream()

    def _wait(self):
        pass


class FakeStream:
    cuda_stream = 0

    def synchronize(self):
        pass


class _Bytes:
    def __init__(self, memory, address, num_bytes):
        self.buffer = (ctypes.c_char * num_bytes).from_address(address)
        self.buffer.memory = memory  # kept for as long as the tensor is


@contextlib.contextmanager
def on_fake_gpus(fake, index, device_class, module=None):
    """`Workspace(group, device="cpu", config=...)` of this process gets a GPU of that number. `module`: of the
    kernels, None = those of the CPU."""
    made, load = [], _backend.load
    module = module or load("cpu")

    def prepare(device, config, backend, num_ranks):
        layout = config.region_layout(num_ranks, "cuda")

        def make_device(*_):
            made.append(device_class(config, layout, module, index, fake))
            return made[-1]

        return "cpu", "cpu", "auto", layout, make_device

    before, workspace._prepare_cpu, _backend.load = workspace._prepare_cpu, prepare, lambda target: module
    try:
        yield made
    finally:
        workspace._prepare_cpu, _backend.load = before, load
