// What a call is, in one word, and the 32 bits of it that travel with every flag.
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS {

// op 8 | lane 8 | dtype 4 | lse_base 4 | unused 8 | num_tokens 32. All that must be equal on all ranks for
// one call; what only one rank knows (strides, masks, addresses) is not in it. Geometry is voted on when the
// workspace is made.
DCP_FN uint64_t call_descriptor(Op op, int lane, DType dtype, LseBase base, int64_t num_tokens) {
  return uint64_t(op) << 56 | uint64_t(lane & 0xff) << 48 | uint64_t(dtype) << 44 | uint64_t(base) << 40 |
         (uint64_t(num_tokens) & 0xffffffffu);
}

// A bijective mix (the finaliser of splitmix64), then the high half: descriptors that differ in one bit
// differ in the digest, but for one in 2^32.
DCP_FN uint32_t call_digest(uint64_t descriptor) {
  uint64_t x = descriptor + (uint64_t(kProtocolVersion) << 32) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return uint32_t((x ^ (x >> 31)) >> 32);
}

}  // namespace dcp::DCP_NS
