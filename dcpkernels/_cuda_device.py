"""What is particular to NVIDIA GPUs: who makes the regions."""

from __future__ import annotations

from typing import Any

from dcpkernels._gpu_device import GpuDevice
from dcpkernels.heap.cuda import CudaHeap
from dcpkernels.heap.group import Group
from dcpkernels.heap.torch_symmetric import TorchSymmetricHeap


class CudaDevice(GpuDevice):
    """`driver_api`: cuda.bindings.driver, or torch.distributed._symmetric_memory."""

    def make_heap(self, group: Group, nbytes: int, **options: Any) -> CudaHeap | TorchSymmetricHeap:
        if self._config.cuda_heap == "torch":
            return TorchSymmetricHeap.create(group, nbytes, symm_mem=self.driver_api, **options)
        return CudaHeap.create(group, nbytes, driver_api=self.driver_api, **options)
