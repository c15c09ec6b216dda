// Kernel and launch of a2a_lse_reduce; the specification is in the header.
#include "ops/a2a_lse_reduce.h"

#include "arch/target.h"
#include "core/channel.h"
#include "core/layout.h"
#include "core/lse.h"
#include "core/tile.h"

namespace dcp::DCP_NS {
namespace {

using Params = A2aLseReduceParams;
using Lanes = arch::Lanes<32>;

// One tile of heads of one row is merged by one group of lanes.
struct Shared {
  float weight[Lanes::kMaxGroups][kMaxRanks][arch::kHeadTile];
  float live_weight[Lanes::kMaxGroups][kMaxRanks];
  const void* live_source[Lanes::kMaxGroups][kMaxRanks];
};

// Rows [first_row, first_row + num_rows) of the call are rows [0, num_rows) of the staging in this round.
struct Round {
  int64_t first_row;
  int64_t num_rows;
  int parity;
};

// Rows of every round but the last. Rounds of about the same size: a last round of one row would cost a full
// exchange. T and the capacity are the same on all ranks, so this is too.
DCP_FN int64_t rows_per_round(const Params& p) {
  if (p.num_tokens <= p.max_round_rows) return p.num_tokens;
  const int64_t num_rounds = (p.num_tokens + p.max_round_rows - 1) / p.max_round_rows;
  return (p.num_tokens + num_rounds - 1) / num_rounds;
}

DCP_FN ShardMask shard_mask(const Params& p) { return {p.seq_lens, p.query_start_loc, p.num_seqs}; }

DCP_FN uint64_t staging_row(const Params& p, int source, int owner, const Round& round, int64_t row) {
  const uint64_t slot = uint64_t(staging_slot(source, owner, p.symm.num_ranks));
  return (uint64_t(round.parity) * (p.symm.num_ranks - 1) + slot) * p.max_round_rows + row;
}

// This rank's LSE of one (token, head); -inf when the shard is empty. `num_nonfinite` counts those that are
// not finite on a row that the lengths do not call empty. Every (token, head) is read once in a call: by
// `publish` or by `reduce`.
DCP_FN float own_lse(const Params& p, int64_t token, int head, bool is_empty, uint64_t& num_nonfinite) {
  if (is_empty) return -__builtin_inff();
  const int64_t index = token * p.partial_lse_token_stride + head * p.partial_lse_head_stride;
  const float lse = load_lse(p.partial_lse, p.lse_dtype, index);
  if (is_finite(lse)) return lse;
  ++num_nonfinite;
  return -__builtin_inff();
}

// Step `publish`: this channel's rows of this round into `peer`'s staging.
template <class T>
DCP_FN void publish(const arch::Cta& cta, const Params& p, const Round& round, int peer,
                    const arch::PeerStores& stores, uint64_t& num_nonfinite) {
  const ShardMask mask = shard_mask(p);
  const ChannelRows rows = channel_rows(cta.index(), p.control.num_channels);
  const int first_head = peer * p.num_local_heads;
  const int64_t head_bytes = int64_t(p.head_dim) * sizeof(T);
  for (int64_t row = rows.first; row < round.num_rows; row += rows.step) {
    const int64_t token = round.first_row + row;
    const bool is_empty = mask.is_empty(token);
    const uint64_t to = staging_row(p, p.symm.rank, peer, round, row);
    float* lse = symm_at<float>(p.symm, peer, p.lse_offset + to * p.lse_row_bytes);
    for (int h = cta.thread_rank(); h < p.num_local_heads; h += cta.size()) {
      lse[h] = own_lse(p, token, first_head + h, is_empty, num_nonfinite);
    }
    if (is_empty) continue;
    char* payload = symm_at<char>(p.symm, peer, p.payload_offset + to * p.row_bytes);
    const T* source = static_cast<const T*>(p.partial_out) + token * p.partial_out_token_stride +
                      first_head * p.partial_out_head_stride;
    if (p.partial_out_head_stride == p.head_dim) {
      stores.copy(cta, payload, source, head_bytes * p.num_local_heads);
    } else {
      for (int h = 0; h < p.num_local_heads; ++h) {
        stores.copy(cta, payload + h * head_bytes, source + h * p.partial_out_head_stride, head_bytes);
      }
    }
  }
}

// Heads [first_head, first_head + num_heads) of one row, num_heads <= kHeadTile.
struct Tile {
  int64_t row;    // of the staging
  int64_t token;  // of the tensors
  int first_head;
  int num_heads;
};

// The weights of a tile: weight[s][h] = exp(lse_s - max) / sum, 0 for an empty shard. Every head goes through
// the shards in rank order; the tile's heads go side by side.
DCP_FN void tile_weights(const Lanes& lanes, const Params& p, const Round& round, const Tile& tile,
                         bool own_is_empty, float (*weight)[arch::kHeadTile], uint64_t& num_nonfinite) {
  const int num_ranks = p.symm.num_ranks, rank = p.symm.rank;
  const int own_first_head = rank * p.num_local_heads + tile.first_head;
  for (int s = 0; s < num_ranks; ++s) {
    const float* staged = nullptr;
    if (s != rank) {
      const uint64_t from = staging_row(p, s, rank, round, tile.row);
      staged = symm_own<const float>(p.symm, p.lse_offset + from * p.lse_row_bytes) + tile.first_head;
    }
    for (int h = lanes.rank(); h < arch::kHeadTile; h += lanes.size()) {
      if (h >= tile.num_heads) {
        weight[s][h] = -__builtin_inff();
      } else if (s == rank) {
        weight[s][h] = own_lse(p, tile.token, own_first_head + h, own_is_empty, num_nonfinite);
      } else {
        weight[s][h] = staged[h];
      }
    }
  }
  for (int h = lanes.rank(); h < arch::kHeadTile; h += lanes.size()) {
    float max = weight[0][h];
    for (int s = 1; s < num_ranks; ++s) max = weight[s][h] > max ? weight[s][h] : max;
    const float shift = is_finite(max) ? max : 0.0f;  // all empty: -inf - 0, no NaN
    float sum = 0.0f;
    for (int s = 0; s < num_ranks; ++s) {
      weight[s][h] = lse_exp(weight[s][h] - shift, p.lse_base);
      sum += weight[s][h];
    }
    const float scale = sum > 0.0f ? 1.0f / sum : 0.0f;
    for (int s = 0; s < num_ranks; ++s) weight[s][h] *= scale;
    if (p.out_lse != nullptr && h < tile.num_heads) {
      p.out_lse[tile.token * p.out_lse_token_stride + (tile.first_head + h) * p.out_lse_head_stride] =
          sum > 0.0f ? merged_lse(max, sum, p.lse_base) : -__builtin_inff();
    }
  }
  lanes.sync();
}

// Lists the shards of one head that have weight, in rank order. The others drop out: what they hold is never
// read, and 0 x NaN never happens.
template <class T>
DCP_FN int list_live(const Params& p, const Round& round, const Tile& tile, int h,
                     const float (*weight)[arch::kHeadTile], float* live_weight, const void** live_source) {
  const int rank = p.symm.rank, head = tile.first_head + h;
  int num_live = 0;
  for (int s = 0; s < p.symm.num_ranks; ++s) {
    if (weight[s][h] == 0.0f) continue;
    live_weight[num_live] = weight[s][h];
    if (s == rank) {
      live_source[num_live] = static_cast<const T*>(p.partial_out) + tile.token * p.partial_out_token_stride +
                              (rank * p.num_local_heads + head) * p.partial_out_head_stride;
    } else {
      const uint64_t from = staging_row(p, s, rank, round, tile.row);
      live_source[num_live] =
          symm_own<const T>(p.symm, p.payload_offset + from * p.row_bytes) + int64_t(head) * p.head_dim;
    }
    ++num_live;
  }
  return num_live;
}

// Step `reduce`: this channel's rows of this round.
template <class T>
DCP_FN void reduce(const arch::Cta& cta, const Params& p, const Round& round, uint64_t& num_nonfinite) {
  Shared& shared = cta.shared<Shared>();
  const Lanes lanes(cta);
  const ShardMask mask = shard_mask(p);
  const ChannelRows rows = channel_rows(cta.index(), p.control.num_channels);
  const int64_t num_channel_rows = (round.num_rows - rows.first + rows.step - 1) / rows.step;
  const int num_tiles = (p.num_local_heads + arch::kHeadTile - 1) / arch::kHeadTile;
  float (*weight)[arch::kHeadTile] = shared.weight[lanes.group()];
  float* live_weight = shared.live_weight[lanes.group()];
  const void** live_source = shared.live_source[lanes.group()];
  for (int64_t item = lanes.group(); item < num_channel_rows * num_tiles; item += lanes.num_groups()) {
    const int64_t row = rows.first + item / num_tiles * rows.step, token = round.first_row + row;
    const int first_head = int(item % num_tiles) * arch::kHeadTile,
              heads_left = p.num_local_heads - first_head;
    const Tile tile = {row, token, first_head, heads_left < arch::kHeadTile ? heads_left : arch::kHeadTile};
    tile_weights(lanes, p, round, tile, mask.is_empty(token), weight, num_nonfinite);
    for (int h = 0; h < tile.num_heads; ++h) {
      int num_live = 0;
      if (lanes.rank() == 0) num_live = list_live<T>(p, round, tile, h, weight, live_weight, live_source);
      num_live = lanes.broadcast(num_live);
      T* out = static_cast<T*>(p.out) + token * p.out_token_stride + (first_head + h) * p.out_head_stride;
      weighted_sum_row(lanes, out, reinterpret_cast<const T* const*>(live_source), live_weight, num_live,
                       p.head_dim);
      lanes.sync();
    }
  }
}

// What a caller sees of a call that failed: NaN in every row, never a stale or half-merged number.
template <class T>
DCP_FN void poison_output(const arch::Cta& cta, const Params& p) {
  const Lanes lanes(cta);
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    // The same rows as `reduce`: a row belongs to a channel by its place in its round.
    if (token % rows_per_round(p) % p.control.num_channels != cta.index()) continue;
    for (int h = lanes.group(); h < p.num_local_heads; h += lanes.num_groups()) {
      T* out = static_cast<T*>(p.out) + token * p.out_token_stride + h * p.out_head_stride;
      fill_row(lanes, out, p.head_dim, __builtin_nanf(""));
      if (p.out_lse != nullptr) {
        p.out_lse[token * p.out_lse_token_stride + h * p.out_lse_head_stride] = __builtin_nanf("");
      }
    }
  }
}

template <class T>
Status a2a_lse_reduce_kernel(const arch::Cta& cta, const Params& p) {
  const uint64_t call = call_descriptor(Op::kA2aLseReduce, p.lane, p.dtype, p.lse_base, p.num_tokens);
  Channel channel(cta, p.symm, p.control, p.wait, p.stream_idx, call);
  Status status = channel.enter();
  const int64_t round_rows = rows_per_round(p);
  uint64_t num_nonfinite = 0;
  int64_t first_row = 0;
  while (status == Status::kOk) {  // T = 0 runs one round: every rank signals and waits in every call
    const int64_t rows_left = p.num_tokens - first_row;
    const Round round = {first_row, rows_left < round_rows ? rows_left : round_rows, channel.parity()};
    const int64_t num_bytes =
        int64_t(p.symm.num_ranks - 1) * (round.num_rows / p.control.num_channels) * p.row_bytes;
    const arch::PeerStores stores(channel.store_hint(), num_bytes);
    for (int i = 1; i < p.symm.num_ranks; ++i) {
      const int peer = peer_order(p.symm, i);
      publish<T>(cta, p, round, peer, stores, num_nonfinite);
      channel.signal(peer);
    }
    stores.finish(cta);
    status = channel.wait();
    if (status != Status::kOk) break;
    reduce<T>(cta, p, round, num_nonfinite);
    first_row += round.num_rows;
    if (first_row >= p.num_tokens) break;
    channel.next_round();
  }
  // A producer's bug that the merge hides, as it takes such a shard for empty: so it must show somewhere.
  if (shard_mask(p).known() && num_nonfinite != 0) {
    arch::fetch_add(&stream_state(p.symm, p.control, p.symm.rank, p.stream_idx)->nonfinite_lse,
                    num_nonfinite);
  }
  if (status == Status::kOk) status = channel.confirm();
  if (status != Status::kOk) poison_output<T>(cta, p);
  channel.leave(status);
  return status;
}

}  // namespace

Status a2a_lse_reduce(const Params& p) {
  StreamState* state = stream_state(p.symm, p.control, p.symm.rank, p.stream_idx);
  if (!arch::claim_call(state)) return Status::kBusy;
  const int num_channels = p.control.num_channels;
  Status status = Status::kOk;
  switch (p.dtype) {
    case DType::kFloat32:
      status = arch::launch<Shared>(a2a_lse_reduce_kernel<float>, num_channels, p);
      break;
    case DType::kFloat16:
      status = arch::launch<Shared>(a2a_lse_reduce_kernel<Half>, num_channels, p);
      break;
    case DType::kBFloat16:
      status = arch::launch<Shared>(a2a_lse_reduce_kernel<BFloat16>, num_channels, p);
      break;
  }
  arch::release_call(state);
  return status;
}

}  // namespace dcp::DCP_NS
