// Kernels and launches of kv_gather; the specification is in the header.
#include "ops/kv_gather.h"

#include "arch/target.h"
#include "core/broadcast.h"
#include "core/channel.h"
#include "core/fp8.h"

namespace dcp::DCP_NS {
namespace {

using Lanes = arch::Lanes<32>;

DCP_FN uint64_t chunk_row(const KvGatherParams& p, int64_t row) {
  return p.buffer_offset + p.buffer_idx * p.buffer_bytes + uint64_t(row * p.row_bytes);
}

// Step `publish`: this channel's rows into the buffers of all ranks.
DCP_FN void publish(const arch::Cta& cta, const KvGatherParams& p, const arch::PeerStores& stores) {
  const Lanes lanes(cta);
  const Broadcast broadcast(p.buffers, stores);
  const int num_channels = p.control.num_channels;
  for (int64_t i = cta.index() + int64_t(num_channels) * lanes.group(); i < p.num_source_rows;
       i += int64_t(num_channels) * lanes.num_groups()) {
    const int64_t row = p.source_rows[i], block = row / p.block_size;
    const char* from = static_cast<const char*>(p.cache) + block * p.block_stride +
                       (row - block * p.block_size) * p.row_stride;
    broadcast.copy(lanes, chunk_row(p, p.final_rows[i]), from, p.row_bytes);
  }
}

// Step `dequantise`: this channel's rows of the chunk, to the caller's tensor.
DCP_FN void dequantise(const arch::Cta& cta, const KvGatherParams& p) {
  const Lanes lanes(cta);
  const float scale = p.scale != nullptr ? arch::load_constant(p.scale) : p.scale_value;
  const E4M3 format(p.dtype);
  const int num_channels = p.control.num_channels;
  for (int64_t row = cta.index() + int64_t(num_channels) * lanes.group(); row < p.num_rows;
       row += int64_t(num_channels) * lanes.num_groups()) {
    const uint8_t* from = symm_own<const uint8_t>(p.buffers, chunk_row(p, row));
    BFloat16* to = reinterpret_cast<BFloat16*>(static_cast<char*>(p.out) + row * p.out_stride);
    arch::map_elements(lanes, to, from, p.row_bytes, [scale, format](uint8_t code) {
      return arch::from_float<BFloat16>(format.value({code}) * scale);
    });
  }
}

// The host sees to the turns; a graph that is replayed may not.
DCP_FN Status require_turn(const arch::Cta& cta, const KvGatherParams& p, const Channel& channel,
                           bool reuses_buffer) {
  const bool is_wrong = cta.thread_rank() == 0 && (reuses_buffer || !channel.is_in_turn());
  return cta.broadcast(int(is_wrong)) == 0 ? Status::kOk : channel.refuse(FaultKind::kChunkTurn, p.call);
}

// Steps `acquire`, `publish` and `signal`.
DCP_FN Status send(const arch::Cta& cta, const KvGatherParams& p, const Channel& channel) {
  const Status status = channel.acquire(p.buffer_idx);
  if (status != Status::kOk) return status;
  const int64_t num_bytes = p.num_source_rows / p.control.num_channels * p.row_bytes;
  const arch::PeerStores stores(channel.store_hint(), num_bytes);  // times the copies: after the wait
  publish(cta, p, stores);
  channel.lend(p.buffer_idx);
  channel.signal_all(has_multicast(p.buffers));
  stores.finish(cta);
  return status;
}

// Steps `release` and `wait`, for the flags of all channels or of this one.
DCP_FN Status receive(const KvGatherParams& p, const Channel& channel, bool of_all_channels) {
  channel.release_previous();
  const Status status = channel.wait(of_all_channels);
  if (status != Status::kOk) return status;
  arch::broadcast_arrived(has_multicast(p.buffers));
  return status;
}

struct StartKernel {
  using Params = KvGatherParams;
  struct Shared {};

  static DCP_FN Status run(const arch::Cta& cta, const Params& p) {
    Channel channel(cta, p.symm, p.control, p.wait, p.stream_idx, p.call, Phase::kStart);
    Status status = channel.enter();
    if (status == Status::kOk) status = require_turn(cta, p, channel, channel.was_lent_before(p.buffer_idx));
    if (status == Status::kOk) status = send(cta, p, channel);
    channel.leave(status);
    return status;
  }
};

struct WaitKernel {
  using Params = KvGatherParams;
  struct Shared {};

  static DCP_FN Status run(const arch::Cta& cta, const Params& p) {
    Channel channel(cta, p.symm, p.control, p.wait, p.stream_idx, p.call, Phase::kWait);
    Status status = channel.enter();
    if (status == Status::kOk) status = require_turn(cta, p, channel, false);
    const bool dequantises = p.out != nullptr;
    if (status == Status::kOk) status = receive(p, channel, dequantises);
    if (status == Status::kOk && dequantises) {
      dequantise(cta, p);
      status = channel.confirm_reads();
    } else if (status == Status::kOk) {
      status = channel.confirm();
    }
    channel.leave(status);
    return status;
  }
};

// It cannot dequantise: other channels of this rank store rows that this one would read, and have no flag
// here.
struct WholeKernel {
  using Params = KvGatherParams;
  struct Shared {};

  static DCP_FN Status run(const arch::Cta& cta, const Params& p) {
    Channel channel(cta, p.symm, p.control, p.wait, p.stream_idx, p.call);
    Status status = channel.enter();
    if (status == Status::kOk) status = require_turn(cta, p, channel, channel.was_lent_before(p.buffer_idx));
    if (status == Status::kOk) status = send(cta, p, channel);
    if (status == Status::kOk) status = receive(p, channel, false);
    if (status == Status::kOk) status = channel.confirm();
    if (channel.leave(status) != Channel::Left::kLeft) channel.count_as_waited();
    return status;
  }
};

Status start(const KvGatherParams& p, const Launch& launch) { return arch::launch<StartKernel>(p, launch); }
Status wait(const KvGatherParams& p, const Launch& launch) { return arch::launch<WaitKernel>(p, launch); }
Status whole(const KvGatherParams& p, const Launch& launch) { return arch::launch<WholeKernel>(p, launch); }

}  // namespace

KvGatherFns kv_gather() { return {start, wait, whole}; }

}  // namespace dcp::DCP_NS
