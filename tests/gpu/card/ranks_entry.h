// All ranks of a call in one grid: rank = blockIdx.y, channel = blockIdx.x. Blocks of one grid are resident
// together where there is a multiprocessor for each; so this also runs under tools that let one kernel run at
// a time, which kernels that wait for each other do not survive. Included behind an op's source.
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS::arch {

template <class Kernel>
__global__ void __launch_bounds__(kNumThreads, 1) ranks_entry(const typename Kernel::Params* ranks) {
  __shared__ typename Kernel::Shared shared;
  Kernel::run(Cta(int(blockIdx.x), &shared), ranks[blockIdx.y]);
}

// `ranks`: [num_ranks] in device memory.
template <class Kernel>
inline Status launch_ranks(const typename Kernel::Params* ranks, int num_ranks, const Launch& launch) {
  const dim3 grid(unsigned(launch.end_channel), unsigned(num_ranks));
  ranks_entry<Kernel><<<grid, kNumThreads, 0, static_cast<cudaStream_t>(launch.stream)>>>(ranks);
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kLaunchFailed;
}

}  // namespace dcp::DCP_NS::arch
