"""A HIP heap over a fake runtime."""

from dcpkernels.heap import hip_setup
from dcpkernels.heap.hip import HipHeap
from tests.fake_gpu.heap_calls import NBYTES, make_heap

GRANULE = hip_setup.GRANULE


def make(group, fake, nbytes=NBYTES, *, granule=64 << 10, **options):
    """With a granule of its own: a test would spend its time on filling megabytes."""
    hip_setup.GRANULE = granule
    return make_heap(HipHeap, group, fake, nbytes, **options)
