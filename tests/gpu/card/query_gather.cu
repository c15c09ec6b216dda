// query_gather and release_query, and the same with all ranks in one grid: of bytes, and of bf16 to fp8.
#include "ops/query_gather.cc"

#include "ranks_entry.h"

namespace dcp::DCP_NS {

// `like`: the parameters of one rank, in host memory.
Status query_ranks(const QueryGatherParams* ranks, const QueryGatherParams& like, int num_ranks,
                   const Launch& launch) {
  if (!like.quantises) return arch::launch_ranks<Kernel<CopyBytes>>(ranks, num_ranks, launch);
  if (like.source_dtype != DType::kBFloat16) return Status::kLaunchFailed;
  return arch::launch_ranks<Kernel<Quantise<BFloat16>>>(ranks, num_ranks, launch);
}

}  // namespace dcp::DCP_NS
