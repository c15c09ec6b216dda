// Symmetric memory: the same offset means the same thing in every rank's region.
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS {

template <class T>
DCP_FN T* symm_at(const SymmView& symm, int peer, uint64_t offset) {
  return arch::pointer_to<T>(arch::load_constant(symm.bases + peer) + offset);
}

template <class T>
DCP_FN T* symm_own(const SymmView& symm, uint64_t offset) {
  return symm_at<T>(symm, symm.rank, offset);
}

// The i-th peer to visit (i = 0 is this rank). Each rank starts at another peer, so that W ranks do not all
// write to the same one at the same time.
DCP_FN int peer_order(const SymmView& symm, int i) {
  const int peer = symm.rank + i;
  return peer < symm.num_ranks ? peer : peer - symm.num_ranks;
}
// The same of one channel of several, i > 0: each starts at another peer too. Where every pair of ranks has a
// link of its own, all links of a rank are busy from the start.
DCP_FN int peer_order(const SymmView& symm, int i, int channel_idx) {
  return peer_order(symm, 1 + (i - 1 + channel_idx) % (symm.num_ranks - 1));
}

// True where one store reaches all ranks. On a target that has no such store, always false: no kernel there
// has code for it.
DCP_FN bool has_multicast(const SymmView& symm) { return arch::kHasMulticast && symm.multicast != 0; }

DCP_FN uint64_t rank_bit(int rank) { return uint64_t(1) << rank; }

}  // namespace dcp::DCP_NS
