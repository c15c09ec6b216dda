"""What is particular to AMD GPUs: who makes the regions."""

from __future__ import annotations

from typing import Any

from dcpkernels._gpu_device import GpuDevice
from dcpkernels.heap.group import Group
from dcpkernels.heap.hip import HipHeap


class HipDevice(GpuDevice):
    """`driver_api`: hip.hip of hip-python."""

    link_advice = (
        "kernels of one process wait for each other if they share a hardware queue of their device: ranks that are threads "
        "need one each on a device that they share (GPU_MAX_HW_QUEUES, 4 unless it is set before the process starts)"
    )

    def make_heap(self, group: Group, nbytes: int, **options: Any) -> HipHeap:
        heap = HipHeap.create(group, nbytes, driver_api=self.driver_api, handles=self._config.hip_handles, **options)
        self.reach = f"{GpuDevice.reach} (handles: {heap.handles}, {heap.handles_reason})"
        return heap
