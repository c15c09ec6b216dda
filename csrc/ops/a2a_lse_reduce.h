// a2a_lse_reduce: exchange the partial attention of all heads between num_ranks shards of the KV cache, and
// merge the shards of this rank's heads by their log-sum-exp.
//
// Every rank passes partial_out [T, H, D] and partial_lse [T, H] of its own shard; rank r gets out [T, H / W,
// D] (and out_lse) of heads r * H/W .. (r + 1) * H/W - 1, merged over all shards.
//
// Who writes which bytes. For each other rank, a rank writes its rows into that peer's region:
//   payload [parity][slot][row]: H/W x D elements of the op's dtype, rows `row_bytes` apart
//   lse     [parity][slot][row]: H/W fp32, rows `lse_row_bytes` apart; -inf: this shard has nothing for (row,
//   head)
// where slot = staging_slot(source, owner). It writes nothing else there but its own flag (and a poison
// word). Payload of an empty row is not written and never read.
//
// Steps of one round, on every channel c (rows c, c + C, c + 2C, ...); the same names in docs/protocol.md and
// tests/protocol:
//   enter    read the epoch e from memory
//   publish  rows of this channel -> the peer's staging of parity e & 1      } for each peer,
//   signal   flag[parity][c][me] on the peer := {e, digest of the call}      } (rank + i) % W
//   wait     all peers' flags in my region are {e, my digest}
//   reduce   merge rows of this channel, in rank order; my own shard is read in place
//   confirm  no fault was reported before the last read of staging
//   leave    the last channel stores e
// T above max_round_rows runs as several rounds of about the same size, each with its own epoch, in one call.
//
// Why staging of two parities is enough: a rank writes parity(e) again in round e + 2, after `wait` of round
// e + 1. There it saw each owner's flag e + 1 on the same channel, which the owner raises after its `reduce`
// of round e. A row belongs to a channel by its staging row alone, so no other channel of the owner can still
// read it. This holds for every T, also 0, because all channels run and signal all peers in every round.
#pragma once

#include "core/types.h"

namespace dcp {

struct A2aLseReduceParams {
  // This rank's tensors. Strides in elements; the last dim of partial_out and out has stride 1.
  const void* partial_out;         // [num_tokens, num_heads, head_dim], dtype
  const void* partial_lse;         // [num_tokens, num_heads], lse_dtype
  void* out;                       // [num_tokens, num_local_heads, head_dim], dtype
  float* out_lse;                  // [num_tokens, num_local_heads], or null
  const int32_t* seq_lens;         // [num_seqs] local KV lengths; read when query_start_loc is given
  const int32_t* query_start_loc;  // [num_seqs + 1], or null
  int64_t partial_out_token_stride, partial_out_head_stride;
  int64_t partial_lse_token_stride, partial_lse_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t out_lse_token_stride, out_lse_head_stride;
  int64_t num_tokens;
  int32_t num_seqs;
  DType lse_dtype;
  LseBase lse_base;
  int32_t lane;

  // Of the workspace: the same on all ranks.
  DType dtype;
  int32_t num_local_heads;
  int32_t head_dim;
  int64_t max_round_rows;   // rows of one round, at most
  uint64_t payload_offset;  // [2][num_ranks - 1][max_round_rows] rows of row_bytes, of this lane
  uint64_t row_bytes;
  uint64_t lse_offset;  // [2][num_ranks - 1][max_round_rows] rows of lse_row_bytes, of this lane
  uint64_t lse_row_bytes;
  int32_t stream_idx;
  SymmView symm;
  ControlLayout control;
  WaitPolicy wait;
};

using A2aLseReduceFn = Status (*)(const A2aLseReduceParams& params);

}  // namespace dcp
