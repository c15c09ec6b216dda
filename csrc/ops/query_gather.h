// query_gather: every rank's heads of the query land in every rank's final buffer, where attention reads
// them.
//
// Rank r passes [T, H / W, Dq], whole or in parts that follow each other in the last dim; every rank gets
// [T, H, Dq], with rank r's heads at r * H/W .. (r + 1) * H/W - 1. Bytes are copied as they are, or, where
// a scale is given, divided by it and rounded to float8 e4m3.
//
// There is one buffer a lane and rank (or one for all ranks, on a CPU by default), and every rank writes its
// own heads into all of them. The caller's attention reads it after the call; so the next gather must not
// begin before attention on all ranks has ended. What proves that is the lane's next a2a_lse_reduce: each
// rank signals there after its attention, on every channel and to every peer. Or release_query: a round
// without rows. The word `open_rows` of the lane's stream (1 + T, 0 = nothing is open) holds callers to it.
//
// Steps, on every channel c; an item is one head of one row, item i belongs to channel i % C:
//   enter    read the epoch e from memory; open_rows must be 0
//   publish  my items of this channel -> the buffers of all ranks
//   signal   flag[parity][c][me] on each peer := {e, digest of the call}
//   wait     all peers' flags in my region are {e, my digest}
//   confirm  no fault was reported
//   leave    the last channel stores e, and open_rows := 1 + T
// With `out`, rounds of at most max_round_rows rows follow each other in one call, each with two epochs:
//   publish, signal, wait; then copy my channel's items of all ranks from the buffer to `out`;
//   signal, wait: now all ranks have read, and the buffer is free again. Nothing is open at the end.
// a2a_lse_reduce sets open_rows to 0 at its end, and so does release_query: signal, wait, open_rows := 0.
//
// A rank's flag e + 2, of the same parity, comes after its wait of round e + 1, for which every peer signals
// after its wait of round e: no flag is overwritten before it was seen.
#pragma once

#include "core/types.h"

namespace dcp {

// What this rank passes of every head: [num_tokens, num_local_heads, num_elements], last stride 1.
struct QueryPart {
  const void* data;
  int64_t token_stride, head_stride;  // in bytes
  int64_t num_bytes;                  // of one head
  int64_t offset;                     // in the gathered head, bytes
};

inline constexpr int kMaxQueryParts = 4;

struct QueryGatherParams {
  QueryPart parts[kMaxQueryParts];
  int32_t num_parts;
  bool releases;   // release_query: no rows, and nothing is open after it
  bool quantises;  // parts of type source_dtype become float8 e4m3 (of `dtype`), divided by *scale
  bool has_units;  // every part begins and ends at a multiple of 16 bytes of the gathered head
  DType source_dtype;
  const float* scale;  // one number, read during the call, or null: it is scale_value
  float scale_value;

  DType dtype;  // of the gathered query
  int64_t num_tokens;
  int64_t head_bytes;  // of a gathered head
  void* out;           // [num_tokens, num_heads, head_bytes], or null: the caller reads the buffer
  int64_t out_token_stride, out_head_stride;  // in bytes

  // Of the workspace: the same on all ranks.
  int32_t lane;
  int32_t num_local_heads;
  int64_t max_round_rows;
  uint64_t buffer_offset;  // of this lane, in `buffers`
  int32_t stream_idx;
  SymmView symm;        // flags and control words
  SymmView buffers;     // where the buffers lie
  SymmView publish_to;  // the same; without multicast where that has no unit for this call's parts
  ControlLayout control;
  WaitPolicy wait;
};

struct QueryGatherFns {
  Status (*run)(const QueryGatherParams& params, const Launch& launch);
};

}  // namespace dcp
