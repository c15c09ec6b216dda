// Kernel and launch of a2a_lse_reduce; the specification is in the header.
#include "ops/a2a_lse_reduce.h"

#include "arch/target.h"
#include "core/channel.h"
#include "core/layout.h"
#include "core/lse.h"
#include "core/packet.h"
#include "core/tile.h"

namespace dcp::DCP_NS {
namespace {

using Params = A2aLseReduceParams;
using Lanes = arch::Lanes<32>;

// One tile of heads of one row is merged by one group of lanes.
struct Shared {
  ShardRows shards[kMaxRanks];
  float weight[Lanes::kMaxGroups][kMaxRanks][arch::kHeadTile];
  float live_weight[Lanes::kMaxGroups][kMaxRanks];
  const void* live_source[Lanes::kMaxGroups][kMaxRanks];
};

template <Wire kWire>
inline constexpr int kPacketBytes = kWire == Wire::kPacket8     ? 8
                                    : kWire == Wire::kPacket16  ? 16
                                    : kWire == Wire::kPacket128 ? 128
                                                                : 0;

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

// The staging row of `source` in the region of `owner`.
DCP_FN uint64_t staged_row(const Params& p, int source, int owner, const Round& round, int64_t row) {
  return staging_row(p.staging, p.symm.num_ranks, round.parity, staging_slot(source, owner), row);
}

// The plain row of `source` in this rank's own region: the staging row itself, but for packets.
template <Wire kWire>
DCP_FN uint64_t plain_row(const Params& p, int source, const Round& round, int64_t row) {
  if constexpr (kPacketBytes<kWire> == 0) return staged_row(p, source, p.symm.rank, round, row);
  return staging_row(p.unpacked, p.symm.num_ranks, 0, staging_slot(source, p.symm.rank), row);
}

template <class T>
DCP_FN const T* own_head(const Params& p, int64_t token, int head) {
  return static_cast<const T*>(p.partial_out) + token * p.partial_out_token_stride +
         head * p.partial_out_head_stride;
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

// `num_heads` heads of one row of partial_out, from `first_head` on, to contiguous memory.
template <class T>
DCP_FN void copy_heads(const arch::Cta& cta, const Params& p, const arch::PeerStores& stores, char* to,
                       int64_t token, int first_head, int num_heads) {
  const int64_t head_bytes = int64_t(p.head_dim) * sizeof(T);
  if (p.partial_out_head_stride == p.head_dim) {
    stores.copy(cta, to, own_head<T>(p, token, first_head), head_bytes * num_heads);
    return;
  }
  for (int h = 0; h < num_heads; ++h) {
    stores.copy(cta, to + h * head_bytes, own_head<T>(p, token, first_head + h), head_bytes);
  }
}

template <class T, Wire kWire>
using Packets = PacketRow<T, kPacketBytes<kWire>>;
template <class T, Wire kWire>
DCP_FN Packets<T, kWire> packet_row(const Params& p) {
  return {p.num_local_heads, p.head_dim, int(p.lse_in_row)};
}

// Step `publish`: this channel's rows of this round into `peer`'s staging. `call` is that of
// PacketRow::store.
template <class T, Wire kWire>
DCP_FN void publish(const arch::Cta& cta, const Params& p, const Round& round, int peer, uint32_t epoch,
                    int& call, const arch::PeerStores& stores, uint64_t& num_nonfinite) {
  const ShardMask mask = shard_mask(p);
  const ChannelRows rows = channel_rows(cta.index(), p.control.num_channels);
  const int first_head = peer * p.num_local_heads;
  for (int64_t row = rows.first; row < round.num_rows; row += rows.step) {
    const int64_t token = round.first_row + row;
    const bool is_empty = mask.is_empty(token);
    char* to = symm_at<char>(p.symm, peer, staged_row(p, p.symm.rank, peer, round, row));
    const auto lse = [&](int h) { return own_lse(p, token, first_head + h, is_empty, num_nonfinite); };
    if constexpr (kPacketBytes<kWire> > 0) {
      const Packets<T, kWire> packets = packet_row<T, kWire>(p);
      const typename Packets<T, kWire>::Lanes lanes(cta);
      const Heads<T> heads = {own_head<T>(p, token, first_head), p.partial_out_head_stride};
      packets.store(lanes, to, call, epoch, heads, lse);
    } else {
      float* staged_lse = reinterpret_cast<float*>(to + p.lse_in_row);
      for (int h = cta.thread_rank(); h < p.num_local_heads; h += cta.size()) staged_lse[h] = lse(h);
      if (kWire == Wire::kPush && !is_empty) {
        copy_heads<T>(cta, p, stores, to, token, first_head, p.num_local_heads);
      }
    }
  }
}

// Step `acquire`, the second half: this channel's rows, without this rank's own heads, into a buffer that
// peers can read. An empty row is not read there.
template <class T>
DCP_FN void copy_to_buffer(const arch::Cta& cta, const Params& p, const Round& round,
                           const PayloadPlace& place, const arch::PeerStores& stores) {
  const ShardMask mask = shard_mask(p);
  const ChannelRows rows = channel_rows(cta.index(), p.control.num_channels);
  const int first_own = p.symm.rank * p.num_local_heads, end_own = first_own + p.num_local_heads;
  const int64_t head_bytes = int64_t(p.head_dim) * sizeof(T);
  for (int64_t row = rows.first; row < round.num_rows; row += rows.step) {
    const int64_t token = round.first_row + row;
    if (mask.is_empty(token)) continue;
    char* to = symm_own<char>(p.symm, place.offset) + row * place.token_stride * int64_t(sizeof(T));
    copy_heads<T>(cta, p, stores, to, token, 0, first_own);
    copy_heads<T>(cta, p, stores, to + end_own * head_bytes, token, end_own,
                  p.symm.num_ranks * p.num_local_heads - end_own);
  }
}

// Where peers find the payload of this round.
template <class T>
DCP_FN PayloadPlace payload_place(const Params& p, const Round& round) {
  if (p.copies_to_buffer) {
    return {p.buffer_offset + p.buffer_idx * p.buffer_bytes,
            int64_t(p.symm.num_ranks) * p.num_local_heads * p.head_dim, p.head_dim};
  }
  const uint64_t first = reinterpret_cast<uint64_t>(own_head<T>(p, round.first_row, 0));
  return {first - arch::load_constant(p.symm.bases + p.symm.rank), p.partial_out_token_stride,
          p.partial_out_head_stride};
}

// Step `receive`: unpacks this channel's rows. A packet that does not come ends it, with kFaulted.
template <class T, Wire kWire>
DCP_FN Status receive(const arch::Cta& cta, const Params& p, const Round& round, uint32_t epoch,
                      const Channel& channel) {
  const Packets<T, kWire> packets = packet_row<T, kWire>(p);
  const typename Packets<T, kWire>::Lanes lanes(cta);
  const ChannelRows rows = channel_rows(cta.index(), p.control.num_channels);
  int call = lanes.group();
  int64_t start_ns = 0;
  Status status = Status::kOk;
  for (int i = 1; i < p.symm.num_ranks; ++i) {
    const int source = peer_order(p.symm, i);
    for (int64_t row = rows.first; row < round.num_rows && status == Status::kOk; row += rows.step) {
      const char* from = symm_own<char>(p.symm, staged_row(p, source, p.symm.rank, round, row));
      char* to = symm_own<char>(p.symm, plain_row<kWire>(p, source, round, row));
      for (; call < packets.num_calls() && status == Status::kOk; call += lanes.num_groups()) {
        const typename Packets<T, kWire>::Arriving arriving = {packets, lanes, from, call, epoch, to};
        status = channel.wait_for_packets(i, arriving, start_ns);
      }
      call -= packets.num_calls();
    }
  }
  cta.sync();  // a thread that gave up has seen or written poison: now thread 0 sees it too
  return channel.confirm();
}

// The weights of a tile: weight[s][h] = exp(lse_s - max) / sum, 0 for an empty shard. Every head is summed
// over the shards in rank order; the tile's heads go side by side. The loops over heads are the inner ones
// and have no branches: of such loops the compiler makes vectors.
template <Wire kWire>
DCP_FN void tile_weights(const Lanes& lanes, const Params& p, const Round& round, const Tile& tile,
                         bool own_is_empty, float (*weight)[arch::kHeadTile], uint64_t& num_nonfinite) {
  const int num_ranks = p.symm.num_ranks, rank = p.symm.rank;
  const int own_first_head = rank * p.num_local_heads + tile.first_head;
  const LanePart part(lanes);
  for (int s = part.first_shard; s < num_ranks; s += part.shard_step) {
    const float* staged = nullptr;
    if (s != rank) {
      const uint64_t from = plain_row<kWire>(p, s, round, tile.row);
      staged = symm_own<const float>(p.symm, from + p.lse_in_row) + tile.first_head;
    }
    for (int h = part.first_head; h < arch::kHeadTile; h += part.head_step) {
      if (h >= tile.num_heads) {
        weight[s][h] = -__builtin_inff();
      } else if (s == rank) {
        weight[s][h] = own_lse(p, tile.token, own_first_head + h, own_is_empty, num_nonfinite);
      } else {
        weight[s][h] = arch::pointer_to(staged)[h];
      }
    }
  }
  float max[arch::kHeadTile], sum[arch::kHeadTile];
  weights_of_lses(lanes, part, num_ranks, p.lse_base, weight, max, sum);
  if (p.out_lse != nullptr) {
    for (int h = lanes.rank(); h < tile.num_heads; h += lanes.size()) {
      p.out_lse[tile.token * p.out_lse_token_stride + (tile.first_head + h) * p.out_lse_head_stride] =
          sum[h] > 0.0f ? merged_lse(max[h], sum[h], p.lse_base) : -__builtin_inff();
    }
  }
  lanes.sync();
}

// Finds the shards' rows of this round, by all threads of the CTA.
template <class T, Wire kWire>
DCP_FN void find_shards(const arch::Cta& cta, const Params& p, const Channel* channel, const Round& round,
                        ShardRows* shards) {
  const int rank = p.symm.rank, first_head = rank * p.num_local_heads;
  for (int s = cta.thread_rank(); s < p.symm.num_ranks; s += cta.size()) {
    if (s == rank) {
      shards[s] = {own_head<T>(p, round.first_row, first_head), p.partial_out_token_stride,
                   p.partial_out_head_stride};
    } else if constexpr (kWire == Wire::kPull) {
      const PayloadPlace at = channel->payload_of(s);
      shards[s] = {symm_at<const T>(p.symm, s, at.offset) + first_head * at.head_stride, at.token_stride,
                   at.head_stride};
    } else {
      shards[s] = {symm_own<const T>(p.symm, plain_row<kWire>(p, s, round, 0)),
                   int64_t(p.unpacked.row_bytes / sizeof(T)), p.head_dim};
    }
  }
  cta.sync();
}

// Step `reduce`: this channel's rows of this round.
template <class T, Wire kWire>
DCP_FN void reduce(const arch::Cta& cta, const Params& p, const Channel* channel, const Round& round,
                   uint64_t& num_nonfinite) {
  Shared& shared = cta.shared<Shared>();
  const Lanes lanes(cta);
  const ShardMask mask = shard_mask(p);
  const ChannelRows rows = channel_rows(cta.index(), p.control.num_channels);
  const int64_t num_channel_rows = (round.num_rows - rows.first + rows.step - 1) / rows.step;
  const int num_tiles = (p.num_local_heads + arch::kHeadTile - 1) / arch::kHeadTile;
  if (num_channel_rows == 0) return;
  find_shards<T, kWire>(cta, p, channel, round, shared.shards);
  const ShardRows& peer = shared.shards[p.symm.rank == 0 ? p.symm.num_ranks - 1 : 0];
  const bool streams =
      arch::streams_output(p.num_tokens * p.num_local_heads * p.head_dim * int64_t(sizeof(T)));
  float (*weight)[arch::kHeadTile] = shared.weight[lanes.group()];
  float* live_weight = shared.live_weight[lanes.group()];
  const void** live_source = shared.live_source[lanes.group()];
  for (int64_t item = lanes.group(); item < num_channel_rows * num_tiles; item += lanes.num_groups()) {
    const int64_t row = rows.first + item / num_tiles * rows.step, token = round.first_row + row;
    const int first_head = int(item % num_tiles) * arch::kHeadTile,
              heads_left = p.num_local_heads - first_head;
    const Tile tile = {row, token, first_head, heads_left < arch::kHeadTile ? heads_left : arch::kHeadTile};
    tile_weights<kWire>(lanes, p, round, tile, mask.is_empty(token), weight, num_nonfinite);
    for (int h = 0; h < tile.num_heads; ++h) {
      int num_live = 0;
      if (lanes.rank() == 0) {
        num_live =
            list_live<T>(shared.shards, p.symm.num_ranks, tile, h, weight, live_weight, live_source);
      }
      num_live = lanes.broadcast(num_live);
      T* out = static_cast<T*>(p.out) + token * p.out_token_stride + (first_head + h) * p.out_head_stride;
      const int64_t next = next_read<T>(peer, first_head + h, p.num_local_heads, p.head_dim, rows.step);
      weighted_sum_row(lanes, out, reinterpret_cast<const T* const*>(live_source), live_weight, num_live,
                       p.head_dim, next, streams);
      lanes.sync();
    }
  }
  if (streams) arch::streams_done();
}

// What a caller sees of a call that failed: NaN in every row, never a stale or half-merged number. Rows
// first, first + step, ...
template <class T>
DCP_FN void poison_output(const arch::Cta& cta, const Params& p, int64_t first, int64_t step) {
  const Lanes lanes(cta);
  for (int64_t token = first; token < p.num_tokens; token += step) {
    for (int h = lanes.group(); h < p.num_local_heads; h += lanes.num_groups()) {
      T* out = static_cast<T*>(p.out) + token * p.out_token_stride + h * p.out_head_stride;
      fill_row(lanes, out, p.head_dim, __builtin_nanf(""));
      if (p.out_lse != nullptr) {
        p.out_lse[token * p.out_lse_token_stride + h * p.out_lse_head_stride] = __builtin_nanf("");
      }
    }
  }
}

// A producer's bug that the merge hides, as it takes such a shard for empty: so it must show somewhere.
DCP_FN void count_nonfinite(const Params& p, uint64_t num_nonfinite) {
  if (shard_mask(p).known() && num_nonfinite != 0) arch::fetch_add(p.num_nonfinite_lse, num_nonfinite);
}

template <class T, Wire kWire>
struct Kernel {
  using Params = A2aLseReduceParams;
  using Shared = dcp::DCP_NS::Shared;

  static DCP_FN Status run(const arch::Cta& cta, const Params& p) {
    const uint64_t call = call_descriptor(Op::kA2aLseReduce, p.lane, p.dtype, p.lse_base, p.num_tokens);
    Channel channel(cta, p.symm, p.control, p.wait, p.stream_idx, call);
    Status status = channel.enter();
    if (status == Status::kOk && p.query_stream_idx >= 0) status = require_query_rows(cta, p, channel);
    const int64_t round_rows = rows_per_round(p);
    uint64_t num_nonfinite = 0;
    int64_t first_row = 0;
    while (status == Status::kOk) {  // T = 0 runs one round: every rank signals and waits in every call
      const int64_t rows_left = p.num_tokens - first_row;
      const Round round = {first_row, rows_left < round_rows ? rows_left : round_rows, channel.parity()};
      status = exchange(cta, p, channel, round, num_nonfinite);
      first_row += round.num_rows;
      if (first_row >= p.num_tokens || status != Status::kOk) break;
      channel.next_round();
    }
    count_nonfinite(p, num_nonfinite);
    if (status == Status::kOk) status = kWire == Wire::kPull ? channel.confirm_reads() : channel.confirm();
    const Channel::Left left = channel.leave(status);
    if (left == Channel::Left::kLast && p.query_stream_idx >= 0) {
      arch::store_relaxed_sys(&query_state(p)->open_rows, uint64_t(0));
    }
    // Other channels may have merged their rows before the fault.
    if (cta.broadcast(int(left)) == int(Channel::Left::kLastFaulted)) poison_output<T>(cta, p, 0, 1);
    return status;
  }

 private:
  static DCP_FN StreamState* query_state(const Params& p) {
    return stream_state(p.symm, p.control, p.symm.rank, p.query_stream_idx);
  }
  // A reduce after a gather merges the rows that were gathered.
  static DCP_FN Status require_query_rows(const arch::Cta& cta, const Params& p, const Channel& channel) {
    const uint64_t rows = arch::load_relaxed_sys(&query_state(p)->open_rows);
    const bool differs = cta.thread_rank() == 0 && rows != 0 && rows != uint64_t(p.num_tokens) + 1;
    if (cta.broadcast(int(differs)) == 0) return Status::kOk;
    return channel.refuse(FaultKind::kQueryRows, arch::load_relaxed_sys(&query_state(p)->call));
  }

  static DCP_FN Status exchange(const arch::Cta& cta, const Params& p, Channel& channel, const Round& round,
                                uint64_t& num_nonfinite) {
    const uint32_t epoch = channel.epoch_low();
    const bool copies = kWire == Wire::kPush || (kWire == Wire::kPull && p.copies_to_buffer);
    Status status = Status::kOk;
    if (kWire == Wire::kPull && copies) status = channel.acquire(p.buffer_idx);
    if (status != Status::kOk) return status;
    const int64_t num_bytes = int64_t(p.symm.num_ranks - 1) * (round.num_rows / p.control.num_channels) *
                              p.num_local_heads * p.head_dim * int64_t(sizeof(T));
    // Times the copies: so it comes after the wait.
    const arch::PeerStores stores(channel.store_hint(), copies ? num_bytes : 0);
    PayloadPlace place = {};
    if constexpr (kWire == Wire::kPull) {
      place = payload_place<T>(p, round);
      if (copies) copy_to_buffer<T>(cta, p, round, place, stores);
      channel.lend(p.buffer_idx);
    }
    int call = 0;
    if constexpr (kPacketBytes<kWire> > 0) call = typename Packets<T, kWire>::Lanes(cta).group();
    for (int i = 1; i < p.symm.num_ranks; ++i) {
      const int peer = peer_order(p.symm, i, cta.index());
      publish<T, kWire>(cta, p, round, peer, epoch, call, stores, num_nonfinite);
      if constexpr (arch::kSignalsTogether) continue;
      if constexpr (kWire == Wire::kPush) channel.signal(peer);
      if constexpr (kWire == Wire::kPull) channel.signal(peer, place);
      if constexpr (kPacketBytes<kWire> > 0) channel.signal_unordered(peer);
    }
    if constexpr (arch::kSignalsTogether) {
      if constexpr (kWire == Wire::kPush) channel.signal_each();
      if constexpr (kWire == Wire::kPull) channel.signal_each(place);
      if constexpr (kPacketBytes<kWire> > 0) channel.signal_each_unordered();
    }
    stores.finish(cta);
    if constexpr (kPacketBytes<kWire> > 0) {
      status = receive<T, kWire>(cta, p, round, epoch, channel);
      if (status != Status::kOk) return status;
      reduce<T, kWire>(cta, p, &channel, round, num_nonfinite);
      return channel.wait();
    } else {
      status = channel.wait();
      if (status != Status::kOk) return status;
      reduce<T, kWire>(cta, p, &channel, round, num_nonfinite);
      if constexpr (kWire == Wire::kPull) channel.release();
      return status;
    }
  }
};

template <class T, Wire kWire>
struct DiscardKernel {
  using Params = A2aLseReduceParams;
  using Shared = dcp::DCP_NS::Shared;
  static DCP_FN Status run(const arch::Cta& cta, const Params& p) {
    poison_output<T>(cta, p, cta.index(), p.control.num_channels);
    return Status::kOk;
  }
};

template <class T, Wire kWire>
struct PackKernel {
  using Params = A2aLseReduceParams;
  using Shared = dcp::DCP_NS::Shared;
  static DCP_FN Status run(const arch::Cta& cta, const Params& p) {
    const Round round = {p.first_row, p.num_rows, 0};
    uint64_t num_nonfinite = 0, no_hint = 0;
    const arch::PeerStores stores(&no_hint, 0);
    int call = 0;
    for (int peer = 0; peer < p.symm.num_ranks; ++peer) {
      if (peer != p.symm.rank) publish<T, kWire>(cta, p, round, peer, 0, call, stores, num_nonfinite);
    }
    count_nonfinite(p, num_nonfinite);
    return Status::kOk;
  }
};

template <class T, Wire kWire>
struct MergeKernel {
  using Params = A2aLseReduceParams;
  using Shared = dcp::DCP_NS::Shared;
  static DCP_FN Status run(const arch::Cta& cta, const Params& p) {
    uint64_t num_nonfinite = 0;
    reduce<T, kWire>(cta, p, nullptr, {p.first_row, p.num_rows, 0}, num_nonfinite);
    count_nonfinite(p, num_nonfinite);
    return Status::kOk;
  }
};

template <template <class, Wire> class K, Wire kWire>
Status launch_for_dtype(const Params& p, const Launch& launch) {
  switch (p.dtype) {
    case DType::kFloat32:
      return arch::launch<K<float, kWire>>(p, launch);
    case DType::kFloat16:
      return arch::launch<K<Half, kWire>>(p, launch);
    case DType::kBFloat16:
      return arch::launch<K<BFloat16, kWire>>(p, launch);
    default:
      return Status::kLaunchFailed;
  }
}

Status run(const Params& p, const Launch& launch) {
  switch (p.wire) {
    case Wire::kPush:
      return launch_for_dtype<Kernel, Wire::kPush>(p, launch);
    case Wire::kPull:
      if constexpr (arch::kHasPull) return launch_for_dtype<Kernel, Wire::kPull>(p, launch);
      break;
    case Wire::kPacket8:
      return launch_for_dtype<Kernel, Wire::kPacket8>(p, launch);
    case Wire::kPacket16:
      return launch_for_dtype<Kernel, Wire::kPacket16>(p, launch);
    case Wire::kPacket128:
      if constexpr (arch::kMaxPacketBytes >= 128)
        return launch_for_dtype<Kernel, Wire::kPacket128>(p, launch);
  }
  return Status::kLaunchFailed;
}

}  // namespace

// A function and not a constant: some compilers would give a constant to the device too, where these do not
// exist.
A2aLseReduceFns a2a_lse_reduce() {
  if constexpr (arch::kIsSynchronous) {
    return {run, launch_for_dtype<DiscardKernel, Wire::kPush>, launch_for_dtype<PackKernel, Wire::kPush>,
            launch_for_dtype<MergeKernel, Wire::kPush>};
  } else {
    return {run, nullptr, nullptr, nullptr};
  }
}

}  // namespace dcp::DCP_NS
