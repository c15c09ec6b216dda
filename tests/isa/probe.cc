// A small kernel with every step that orders something, and a copy: the tests of the gate break one line of
// csrc, and compile this instead of a whole op.
#include "arch/target.h"
#include "core/channel.h"
#include "core/tile.h"

namespace dcp::DCP_NS {

struct ProbeParams {
  SymmView symm;
  ControlLayout control;
  WaitPolicy wait;
  const void* from;
  void* out;
  uint64_t staging_offset;
  int64_t num_elements;
};

template <class T>
struct Probe {
  using Params = ProbeParams;
  struct Shared {
    const T* source[kMaxRanks];
    float weight[kMaxRanks];
  };

  static DCP_FN Status run(const arch::Cta& cta, const ProbeParams& p) {
    Shared& shared = cta.shared<Shared>();
    Channel channel(cta, p.symm, p.control, p.wait, 0, 0);
    Status status = channel.enter();
    const arch::PeerStores stores(channel.store_hint(), p.num_elements);
    for (int i = 1; i < p.symm.num_ranks && status == Status::kOk; ++i) {
      const int peer = peer_order(p.symm, i);
      stores.copy(cta, symm_at<T>(p.symm, peer, p.staging_offset), p.from,
                  p.num_elements * int64_t(sizeof(T)));
      channel.signal(peer);
    }
    if (status == Status::kOk) status = channel.wait();
    if (status == Status::kOk) {
      for (int s = cta.thread_rank(); s < p.symm.num_ranks; s += cta.size()) {
        shared.source[s] = symm_own<T>(p.symm, p.staging_offset);
        shared.weight[s] = arch::exp2(-float(s)) + arch::log2(1.0f + float(s));
      }
      cta.sync();
      weighted_sum_row(arch::Lanes<32>(cta), static_cast<T*>(p.out), shared.source, shared.weight,
                       p.symm.num_ranks, p.num_elements, 0, false);
      channel.release();
      status = channel.confirm_reads();
    }
    channel.leave(status);
    return status;
  }
};

Status probe(const ProbeParams& p, const Launch& launch) { return arch::launch<Probe<BFloat16>>(p, launch); }

}  // namespace dcp::DCP_NS
