// kv_gather, and the same with all ranks in one grid.
#include "ops/kv_gather.cc"

#include "ranks_entry.h"

namespace dcp::DCP_NS {

Status kv_start_ranks(const KvGatherParams* ranks, const KvGatherParams&, int num_ranks,
                      const Launch& launch) {
  return arch::launch_ranks<StartKernel>(ranks, num_ranks, launch);
}

Status kv_wait_ranks(const KvGatherParams* ranks, const KvGatherParams&, int num_ranks,
                     const Launch& launch) {
  return arch::launch_ranks<WaitKernel>(ranks, num_ranks, launch);
}

}  // namespace dcp::DCP_NS
