"""A CUDA heap over a fake driver."""

from dcpkernels.heap.cuda import CudaHeap
from tests.fake_gpu.heap_calls import NBYTES, make_heap


def make(group, fake, nbytes=NBYTES, **options):
    return make_heap(CudaHeap, group, fake, nbytes, **options)
