// Kernel and launch of query_gather; the specification is in the header.
#include "ops/query_gather.h"

#include "arch/target.h"
#include "core/broadcast.h"
#include "core/channel.h"
#include "core/fp8.h"

namespace dcp::DCP_NS {
namespace {

using Params = QueryGatherParams;
using Lanes = arch::Lanes<32>;

// Rows of the call that are rows [0, num_rows) of the buffer in this round.
struct Round {
  int64_t first_row;
  int64_t num_rows;
};

DCP_FN uint64_t call_of(const Params& p) {
  if (p.releases) return release_descriptor(p.lane);
  return query_descriptor(p.lane, p.dtype, p.out != nullptr, p.num_tokens);
}

// Where a head of a row lies in the buffers.
DCP_FN uint64_t gathered_head(const Params& p, int64_t row, int source, int head) {
  const int64_t num_heads = int64_t(p.symm.num_ranks) * p.num_local_heads;
  return p.buffer_offset + uint64_t((row * num_heads + source * p.num_local_heads + head) * p.head_bytes);
}

// One part of one head, rounded to e4m3 on its way.
template <class T>
DCP_FN void publish_quantised(const Lanes& lanes, const Params& p, const Broadcast& broadcast, uint64_t to,
                              const T* from, int64_t num_elements, float scale) {
  constexpr int kUnit = 16;
  const E4M3 format(p.dtype);
  if (p.has_units) {
    for (int64_t at = lanes.rank() * kUnit; at < num_elements; at += lanes.size() * kUnit) {
      T values[kUnit];
      Float8E4M3 codes[kUnit];
      arch::load_elements(from + at, values);
      for (int i = 0; i < kUnit; ++i) codes[i] = format.round(arch::to_float(values[i]) / scale);
      broadcast.store(to + at, arch::bit_cast<arch::Words16>(codes));
    }
  } else {
    for (int64_t at = lanes.rank(); at < num_elements; at += lanes.size()) {
      broadcast.store(to + at, format.round(arch::to_float(from[at]) / scale).bits);
    }
  }
}

// How a part of a head becomes bytes of the gathered head.
struct CopyBytes {
  static DCP_FN void publish(const Lanes& lanes, const Params&, const Broadcast& broadcast, uint64_t to,
                             const char* from, int64_t num_bytes, float) {
    broadcast.copy(lanes, to, from, num_bytes);
  }
};
template <class T>
struct Quantise {
  static DCP_FN void publish(const Lanes& lanes, const Params& p, const Broadcast& broadcast, uint64_t to,
                             const char* from, int64_t num_bytes, float scale) {
    publish_quantised(lanes, p, broadcast, to, reinterpret_cast<const T*>(from),
                      num_bytes / int64_t(sizeof(T)), scale);
  }
};

// Step `publish`: this channel's items of this round into the buffers of all ranks. Items and not rows, so
// that one row keeps many channels and groups of lanes busy.
template <class Convert>
DCP_FN void publish(const arch::Cta& cta, const Params& p, const Round& round,
                    const arch::PeerStores& stores) {
  const Lanes lanes(cta);
  const Broadcast broadcast(p.publish_to, stores);
  const float scale = p.scale != nullptr ? arch::load_constant(p.scale) : p.scale_value;
  const int64_t num_items = round.num_rows * p.num_local_heads;
  const int num_channels = p.control.num_channels;
  for (int64_t item = cta.index() + int64_t(num_channels) * lanes.group(); item < num_items;
       item += int64_t(num_channels) * lanes.num_groups()) {
    const int64_t row = item / p.num_local_heads, token = round.first_row + row;
    const int head = int(item - row * p.num_local_heads);
    const uint64_t to = gathered_head(p, row, p.symm.rank, head);
    DCP_NO_UNROLL
    for (int i = 0; i < p.num_parts; ++i) {
      const QueryPart& part = p.parts[i];
      const char* from =
          static_cast<const char*>(part.data) + token * part.token_stride + head * part.head_stride;
      Convert::publish(lanes, p, broadcast, to + part.offset, from, part.num_bytes, scale);
    }
  }
}

// This channel's items of all ranks, from the own buffer to `out`.
DCP_FN void copy_out(const arch::Cta& cta, const Params& p, const Round& round,
                     const arch::PeerStores& stores) {
  const Lanes lanes(cta);
  const int64_t num_items = round.num_rows * p.num_local_heads;
  const int num_channels = p.control.num_channels;
  for (int source = 0; source < p.symm.num_ranks; ++source) {
    for (int64_t item = cta.index() + int64_t(num_channels) * lanes.group(); item < num_items;
         item += int64_t(num_channels) * lanes.num_groups()) {
      const int64_t row = item / p.num_local_heads;
      const int head = int(item - row * p.num_local_heads);
      char* to = static_cast<char*>(p.out) + (round.first_row + row) * p.out_token_stride +
                 (int64_t(source) * p.num_local_heads + head) * p.out_head_stride;
      stores.copy(lanes, to, symm_own<char>(p.buffers, gathered_head(p, row, source, head)), p.head_bytes);
    }
  }
}

template <class Convert>
struct Kernel {
  using Params = QueryGatherParams;
  struct Shared {};

  static DCP_FN Status run(const arch::Cta& cta, const Params& p) {
    Channel channel(cta, p.symm, p.control, p.wait, p.stream_idx, call_of(p));
    StreamState* state = stream_state(p.symm, p.control, p.symm.rank, p.stream_idx);
    Status status = channel.enter();
    if (status == Status::kOk && !p.releases) status = require_closed(cta, p, state, channel);
    int64_t first_row = 0;
    while (status == Status::kOk) {  // T = 0 runs one round: every rank signals and waits in every call
      const int64_t rows_left = p.num_tokens - first_row;
      const Round round = {first_row, rows_left < p.max_round_rows ? rows_left : p.max_round_rows};
      status = exchange(cta, p, channel, round);
      first_row += round.num_rows;
      if (first_row >= p.num_tokens || status != Status::kOk) break;
      channel.next_round();
    }
    if (status == Status::kOk) status = channel.confirm();
    if (channel.leave(status) == Channel::Left::kLast) {
      const bool stays_open = !p.releases && p.out == nullptr;
      arch::store_relaxed_sys(&state->open_rows, stays_open ? uint64_t(p.num_tokens) + 1 : uint64_t(0));
    }
    return status;
  }

 private:
  // Peers may still read what was gathered before.
  static DCP_FN Status require_closed(const arch::Cta& cta, const Params& p, const StreamState* state,
                                      const Channel& channel) {
    const bool is_open = cta.thread_rank() == 0 && arch::load_relaxed_sys(&state->open_rows) != 0;
    if (cta.broadcast(int(is_open)) == 0) return Status::kOk;
    return channel.refuse(FaultKind::kQueryOpen, call_of(p));
  }

  static DCP_FN Status exchange(const arch::Cta& cta, const Params& p, Channel& channel, const Round& round) {
    const int64_t num_bytes = round.num_rows / p.control.num_channels * p.num_local_heads * p.head_bytes;
    const arch::PeerStores stores(channel.store_hint(), num_bytes);
    publish<Convert>(cta, p, round, stores);
    const bool uses_multicast = has_multicast(p.publish_to);
    for (bool has_read = false;; has_read = true) {
      channel.signal_all(uses_multicast);
      if (!has_read) stores.finish(cta);
      const Status status = channel.wait();
      if (status != Status::kOk || has_read) return status;
      arch::broadcast_arrived(has_multicast(p.buffers));  // peers' parts may have another unit
      if (p.out == nullptr) return status;
      copy_out(cta, p, round, arch::PeerStores(channel.store_hint(), 0));
      channel.next_round();
    }
  }
};

Status run(const Params& p, const Launch& launch) {
  if (!p.quantises) return arch::launch<Kernel<CopyBytes>>(p, launch);
  switch (p.source_dtype) {
    case DType::kFloat32:
      return arch::launch<Kernel<Quantise<float>>>(p, launch);
    case DType::kFloat16:
      return arch::launch<Kernel<Quantise<Half>>>(p, launch);
    case DType::kBFloat16:
      return arch::launch<Kernel<Quantise<BFloat16>>>(p, launch);
    default:
      return Status::kLaunchFailed;
  }
}

}  // namespace

QueryGatherFns query_gather() { return {run}; }

}  // namespace dcp::DCP_NS
