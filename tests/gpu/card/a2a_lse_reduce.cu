// a2a_lse_reduce, and the same with all ranks in one grid: every wire of the target in bf16, push in fp32
// too.
#include "ops/a2a_lse_reduce.cc"

#include "ranks_entry.h"

namespace dcp::DCP_NS {

// `like`: the parameters of one rank, in host memory.
Status a2a_ranks(const A2aLseReduceParams* ranks, const A2aLseReduceParams& like, int num_ranks,
                 const Launch& launch) {
  if (like.dtype == DType::kFloat32 && like.wire == Wire::kPush) {
    return arch::launch_ranks<Kernel<float, Wire::kPush>>(ranks, num_ranks, launch);
  }
  if (like.dtype != DType::kBFloat16) return Status::kLaunchFailed;
  switch (like.wire) {
    case Wire::kPush:
      return arch::launch_ranks<Kernel<BFloat16, Wire::kPush>>(ranks, num_ranks, launch);
    case Wire::kPacket8:
      return arch::launch_ranks<Kernel<BFloat16, Wire::kPacket8>>(ranks, num_ranks, launch);
    case Wire::kPacket16:
      return arch::launch_ranks<Kernel<BFloat16, Wire::kPacket16>>(ranks, num_ranks, launch);
    default:
      return Status::kLaunchFailed;
  }
}

}  // namespace dcp::DCP_NS
