// Where the rows of `a2a_lse_reduce` lie: strided tensors of the caller, staging in the symmetric region, and
// which rows a shard has nothing to say about.
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS {

// Staging slot of `source` in the region of `owner`: rank order without the owner, who never sends to itself.
DCP_FN int staging_slot(int source, int owner) { return source < owner ? source : source - 1; }

// The offset of one staging row; the same in every region.
DCP_FN uint64_t staging_row(const StagingLayout& staging, int num_ranks, int parity, int slot, int64_t row) {
  const uint64_t index = (uint64_t(parity) * (num_ranks - 1) + slot) * staging.num_rows + row;
  return staging.offset + index * staging.row_bytes;
}

// Rows of one channel among `num_rows` staging rows: channel_idx, channel_idx + num_channels, ... The owner
// of a row is a function of the row alone. A split in contiguous blocks would move rows between channels when
// T changes, and a channel would overwrite staging that another channel of a slower peer still reads
// (tests/protocol).
struct ChannelRows {
  int64_t first;
  int64_t step;
};

DCP_FN ChannelRows channel_rows(int channel_idx, int num_channels) { return {channel_idx, num_channels}; }

// Which rows the lengths call empty on this rank.
struct ShardMask {
  const int32_t* seq_lens;         // [num_seqs] local KV lengths; null also when num_seqs is 0
  const int32_t* query_start_loc;  // [num_seqs + 1], or null: nothing is known
  int32_t num_seqs;

  DCP_FN bool known() const { return query_start_loc != nullptr; }

  // True for a row of a sequence without a local token, and for a row outside [query_start_loc[0],
  // query_start_loc[num_seqs]): graph padding.
  DCP_FN bool is_empty(int64_t row) const {
    if (query_start_loc == nullptr) return false;
    if (num_seqs == 0 || row < start(0) || row >= start(num_seqs)) return true;
    int low = 0, high = num_seqs;  // start(low) <= row < start(high)
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      if (start(middle) <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return arch::load_constant(seq_lens + low) <= 0;
  }
  DCP_FN int32_t start(int sequence) const { return arch::load_constant(query_start_loc + sequence); }
};

}  // namespace dcp::DCP_NS
