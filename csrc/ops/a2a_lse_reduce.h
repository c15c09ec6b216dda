// a2a_lse_reduce: exchange the partial attention of all heads between num_ranks shards of the KV cache, and
// merge the shards of this rank's heads by their log-sum-exp.
//
// Every rank passes partial_out [T, H, D] and partial_lse [T, H] of its own shard; rank r gets out [T, H / W,
// D] (and out_lse) of heads r * H/W .. (r + 1) * H/W - 1, merged over all shards.
//
// How payload travels is one of three ways, the same on all ranks of a workspace; the results are equal in
// every bit. Staging rows lie at [parity][slot][row], slot = staging_slot(source, owner).
//
//   push     The source stores its rows into the owner's staging. A row is the payload, H/W x D elements in
//            the op's dtype, and at `lse_in_row` H/W fp32 LSEs; -inf: this shard has nothing for (row, head).
//            Payload of an empty row is not written and never read.
//   pull     Only the LSEs go into staging. The payload stays in the source's region, in one of two buffers
//            [max_num_tokens, H, D]; where it begins, and its strides, come with the flag, and the owner
//            reads it there. A caller that wrote its partial_out elsewhere has it copied into a buffer
//            (`acquire`).
//   packet   A staging row is a row of packets (core/packet.h), each with a flag of its own. The owner
//            unpacks them into a plain row of its own region (`receive`).
//
// A source writes nothing else into an owner's region but its own flag line (and a poison word).
//
// Steps of one round, on every channel c (rows c, c + C, c + 2C, ...); the same names in docs/protocol.md and
// tests/protocol:
//   enter    read the epoch e from memory
//   acquire  (pull, an ordinary tensor) all peers have released the buffer; copy the rows into it
//   publish  rows of this channel -> the peer's staging of parity e & 1      } for each peer,
//   signal   flag[parity][c][me] on the peer := {e, digest of the call}      } (rank + i) % W
//   receive  (packet) every packet of my rows bears e; unpack
//   wait     all peers' flags in my region are {e, my digest}. In packet mode it comes after `reduce`:
//            there it finds other calls, and bounds how far a peer can be ahead
//   reduce   merge rows of this channel, in rank order; my own shard is read in place
//   release  (pull) the line of my flag on each owner says: I have read your payload of epoch e
//   confirm  no fault was reported before the last read of staging
//   leave    the last channel stores e
// Where the lane gathers queries, `enter` also requires that T is that of the query that is open, if one is,
// and `leave` closes it: in a whole round every peer has signalled, which it does after its attention.
// T above max_round_rows runs as several rounds of about the same size, each with its own epoch, in one call.
//
// Why staging of two parities is enough: a rank writes parity(e) again in round e + 2, after `wait` of round
// e + 1. There it saw each owner's flag e + 1 on the same channel, which the owner raises after its `reduce`
// of round e. A row belongs to a channel by its staging row alone, so no other channel of the owner can still
// read it. This holds for every T, also 0, because all channels run and signal all peers in every round.
//
// A buffer of pull mode is seen by the caller, who may write it at any time after the call and may not make
// another call in between. So it is guarded by `release`, and not by parity: `Workspace.partial_out` hands it
// out when all peers have released it.
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
  uint64_t* num_nonfinite_lse;  // counts LSEs that are not finite on rows that the lengths do not call empty

  // pull: partial_out lies in buffer `buffer_idx`, or is copied into it.
  int32_t buffer_idx;
  bool copies_to_buffer;
  uint64_t buffer_offset, buffer_bytes;  // [2], of this lane

  // Of the workspace: the same on all ranks.
  Wire wire;
  DType dtype;
  int32_t num_local_heads;
  int32_t head_dim;
  int64_t max_round_rows;  // rows of one round, at most
  StagingLayout staging;   // what peers write, of this lane
  uint64_t lse_in_row;     // offset of the LSEs in a plain row
  StagingLayout unpacked;  // packet: plain rows [1][slot][row] of this lane; else the same as staging
  int32_t stream_idx;
  int32_t query_stream_idx = -1;  // of this lane's query_gather, or -1
  SymmView symm;
  ControlLayout control;
  WaitPolicy wait;

  // pack and merge only: the rows of this exchange.
  int64_t first_row, num_rows;
};

// The collective fallback (dcpkernels/collective.py) moves the rows itself: `pack` publishes rows [first_row,
// first_row + num_rows) into the staging of symm.bases[peer], `merge` reduces them from that of
// symm.bases[rank]; no flag is touched. `discard` fills the output of a call with NaN: one of its channels
// faulted. All three are null where launches are not synchronous.
struct A2aLseReduceFns {
  Status (*run)(const A2aLseReduceParams& params, const Launch& launch);
  Status (*discard)(const A2aLseReduceParams& params, const Launch& launch);
  Status (*pack)(const A2aLseReduceParams& params, const Launch& launch);
  Status (*merge)(const A2aLseReduceParams& params, const Launch& launch);
};

}  // namespace dcp
