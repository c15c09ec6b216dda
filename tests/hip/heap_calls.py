"""A HIP heap over a fake runtime."""

from dcpkernels.heap.hip import HipHeap
from tests.fake_gpu.heap_calls import NBYTES, make_heap


def make(group, fake, nbytes=NBYTES, **options):
    return make_heap(HipHeap, group, fake, nbytes, **options)
