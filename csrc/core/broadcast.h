// Stores that reach the buffers of all ranks, this rank's own included: by one store where a target has an
// address for that (multicast), else by a store to each of them.
#pragma once

#include "arch/target.h"
#include "core/symm.h"

namespace dcp::DCP_NS {

// Offsets are those of the buffers' region. A multicast store has units of 16 bytes, so whoever sets
// `buffers.multicast` on a GPU knows that every offset and every size of the call is a multiple of that.
class Broadcast {
 public:
  DCP_FN Broadcast(const SymmView& buffers, const arch::PeerStores& stores)
      : buffers_(buffers), stores_(stores) {}

  // With the threads of `threads`: a CTA, or a group of lanes.
  template <class Threads>
  DCP_FN void copy(const Threads& threads, uint64_t offset, const void* from, int64_t num_bytes) const {
    if (has_multicast(buffers_)) {
      stores_.copy_multicast(threads, reinterpret_cast<void*>(buffers_.multicast + offset), from, num_bytes);
    } else {
      stores_.copy_to_all(threads, buffers_.bases, buffers_.rank, buffers_.num_ranks, offset, from,
                          num_bytes);
    }
  }

  // By this thread alone.
  DCP_FN void store(uint64_t offset, const arch::Words16& words) const {
    if (has_multicast(buffers_)) {
      arch::store_multicast(reinterpret_cast<void*>(buffers_.multicast + offset), words);
      return;
    }
    DCP_NO_UNROLL
    for (int i = 0; i < buffers_.num_ranks; ++i) {
      arch::store_16(symm_at<void>(buffers_, peer_order(buffers_, i), offset), words);
    }
  }
  // The same for what has no 16 bytes, where there is no multicast on a GPU.
  DCP_FN void store(uint64_t offset, uint8_t byte) const {
    const int num_copies = has_multicast(buffers_) ? 1 : buffers_.num_ranks;
    DCP_NO_UNROLL
    for (int i = 0; i < num_copies; ++i) {
      arch::store_1(symm_at<void>(buffers_, peer_order(buffers_, i), offset), byte);
    }
  }

 private:
  const SymmView& buffers_;
  const arch::PeerStores& stores_;
};

}  // namespace dcp::DCP_NS
