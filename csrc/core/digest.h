// What a call is, in one word, and the 32 bits of it that travel with every flag.
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS {

// op 8 | lane 8 | kind 4 | detail 12 | low 32. All that must be equal on all ranks for one call; what only
// one rank knows (strides, masks, addresses) is not in it. Geometry is voted on when the workspace is made.
DCP_FN uint64_t pack_call(Op op, int lane, uint32_t kind, uint32_t detail, uint64_t low) {
  return uint64_t(op) << 56 | uint64_t(lane & 0xff) << 48 | uint64_t(kind & 0xf) << 44 |
         uint64_t(detail & 0xfff) << 32 | (low & 0xffffffffu);
}
// a2a_lse_reduce: the dtype, lse_base, T.
DCP_FN uint64_t call_descriptor(Op op, int lane, DType dtype, LseBase base, int64_t num_tokens) {
  return pack_call(op, lane, uint32_t(dtype), uint32_t(base) << 8, uint64_t(num_tokens));
}
// query_gather: the dtype that is gathered, whether it ends in `out`, which takes more rounds, and T.
DCP_FN uint64_t query_descriptor(int lane, DType dtype, bool has_out, int64_t num_tokens) {
  return pack_call(Op::kQueryGather, lane, uint32_t(dtype), uint32_t(has_out), uint64_t(num_tokens));
}
DCP_FN uint64_t release_descriptor(int lane) { return pack_call(Op::kReleaseQuery, lane, 0, 0, 0); }
// kv_gather: the dtype of the cache and the buffer, the chunk, and a digest of the plan and the width of a
// row.
DCP_FN uint64_t chunk_descriptor(int lane, DType dtype, int buffer_idx, int64_t chunk_idx,
                                 uint32_t plan_digest) {
  const uint32_t kind = uint32_t(dtype) << 1 | uint32_t(buffer_idx);
  return pack_call(Op::kKvGather, lane, kind, uint32_t(chunk_idx), plan_digest);
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
