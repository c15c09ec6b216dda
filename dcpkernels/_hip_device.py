"""What is particular to AMD GPUs: who makes the regions."""

from __future__ import annotations

from typing import Any

from dcpkernels._gpu_device import GpuDevice
from dcpkernels.heap.group import Group
from dcpkernels.heap.hip import HipHeap


class HipDevice(GpuDevice):
    """`driver_api`: hip.hip of hip-python."""

    def make_heap(self, group: Group, nbytes: int, **options: Any) -> HipHeap:
        return HipHeap.create(
            group, nbytes, driver_api=self.driver_api, handles=self._config.hip_handles, **options
        )
