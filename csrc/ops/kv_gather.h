// kv_gather: a chunk of the context, read from every rank's paged cache, lands in sequence order in every
// rank's buffer.
//
// A plan (dcpkernels/kv_gather_plan.py) says which rows of its cache this rank owns in the chunk, and where
// in the chunk each goes; ranks with none take part all the same. Every row of the chunk is written by one
// rank, and no other byte of the buffer is. Bytes are copied as they are.
//
// A call is split in two. `start` publishes; `wait` returns when the chunk is whole, and the caller reads it
// until the next `wait`. There are two buffers a lane and rank (or for all ranks, on a CPU by default), which
// take turns: while chunk n is read, chunk n + 1 arrives in the other one. The host says which one it is, it
// is part of the digest, and a credit guards it.
//
// Steps of `start`, on every channel c; row i of this rank's list belongs to channel i % C:
//   enter    read the epoch e, of the round started last, from memory; that round must have been waited for,
//            and not have used this buffer
//   acquire  all peers have released the chunk that was in this buffer before
//   publish  my rows of this channel -> the buffers of all ranks
//   signal   flag[parity][c][me] on each peer := {e, digest of plan, chunk and buffer}
//   leave    the last channel stores e
// Steps of `wait`:
//   enter    read the epoch e, of the round waited for last, from memory; one more must have been started
//   release  the line of my flag of round e - 1 on each peer says: the caller has read that chunk
//   wait     all peers' flags in my region are {e, my digest}
//   dequantise  (a scale was given) the chunk, from float8 e4m3 times the scale to bf16, into the caller's
//   `out`;
//            its rows come from all channels of the peers, so `wait` was for all of them
//   confirm  no fault was reported before the last read
//   leave    the last channel stores e
//
// `whole` is both in one kernel: enter, with what `start` requires, acquire, publish, signal, release, wait,
// confirm, leave. Its channels must be able to run side by side, as those of a GPU. It does not dequantise:
// this rank's own rows are stored by other channels too, and only the end of `start` says that they are.
// Ranks may make the same round in two halves or at once.
//
// No row is overwritten before it was read: round e + 2, in the same buffer, is started when all have
// released round e. No flag is overwritten before it was seen: a rank starts round e + 2 after its wait for
// round e + 1, to which each peer's flag comes after its own wait for round e.
#pragma once

#include "core/types.h"

namespace dcp {

struct KvGatherParams {
  // start: this rank's paged cache [num_blocks, block_size, row_bytes], and the rows that it publishes.
  const void* cache;
  int64_t block_size;                // rows
  int64_t block_stride, row_stride;  // in bytes
  const int64_t* source_rows;        // [num_source_rows] block * block_size + row in the block
  const int64_t* final_rows;         // [num_source_rows] row of the chunk
  int64_t num_source_rows;

  // wait: where the chunk is wanted in bf16, or null.
  void* out;           // [num_rows, row_bytes], bf16
  int64_t out_stride;  // in bytes
  int64_t num_rows;    // of the chunk
  const float* scale;  // one number, read during the call, or null: it is scale_value
  float scale_value;

  DType dtype;        // of the cache
  int64_t row_bytes;  // of a row in the buffer; a multiple of 16
  uint64_t call;      // descriptor: the same on all ranks
  int32_t buffer_idx;

  // Of the workspace: the same on all ranks.
  uint64_t buffer_offset, buffer_bytes;  // [2], of this lane, in `buffers`
  int32_t stream_idx;
  SymmView symm;     // flags and control words
  SymmView buffers;  // where the buffers lie
  ControlLayout control;
  WaitPolicy wait;
};

struct KvGatherFns {
  Status (*start)(const KvGatherParams& params, const Launch& launch);
  Status (*wait)(const KvGatherParams& params, const Launch& launch);
  Status (*whole)(const KvGatherParams& params, const Launch& launch);
};

}  // namespace dcp
