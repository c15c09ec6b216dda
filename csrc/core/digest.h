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

// The low half, so that calls which differ in T alone never have one digest, and a multiple of the high half.
// The factor moves the high halves of any two calls of one epoch stream, but chunks, at least 2^28 apart: so
// these have one digest only where a T is 2^28 or more. (A mix that looks random would not do: there are
// pairs of 32-bit values among 10^5, and it is always the same calls that meet.) The low half of a chunk is
// a digest already.
DCP_FN uint32_t call_digest(uint64_t descriptor) {
  return uint32_t(descriptor) ^ (uint32_t(descriptor >> 32) + kProtocolVersion) * 0x77410fefu;
}

}  // namespace dcp::DCP_NS
