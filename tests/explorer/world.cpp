// Names of the control words, the hosts of ranks, and what a fault may be.
#include "world.h"

namespace scenario {

namespace {

const char* const kFlagFields[] = {"",          ".payload_offset", ".token_stride", ".head_stride",
                                   ".released", ".unused",         ".unused",       ".unused"};
const char* const kFaultFields[] = {"poison",      "fault.ready",   "fault.ranks",     "fault.lane",
                                    "fault.epoch", "fault.my_call", "fault.peer_call", "fault.waited_ns"};

std::string stream_field(size_t offset) {
  switch (offset) {
    case offsetof(StreamState, epoch):
      return "epoch";
    case offsetof(StreamState, call):
      return "call";
    case offsetof(StreamState, num_calls):
      return "num_calls";
    case offsetof(StreamState, nonfinite_lse):
      return "nonfinite_lse";
    case offsetof(StreamState, channels_left):
      return "channels_left";
    case offsetof(StreamState, in_flight):
      return "call_in_flight";
    case offsetof(StreamState, open_rows):
      return "open_rows";
    case offsetof(StreamState, waited_epoch):
      return "waited_epoch";
    default:
      return "stream+" + std::to_string(offset);
  }
}
std::string channel_field(size_t offset) {
  switch (offset) {
    case offsetof(ChannelState, in_flight):
      return "in_flight";
    case offsetof(ChannelState, num_rounds):
      return "num_rounds";
    case offsetof(ChannelState, store_hint):
      return "store_hint";
    case offsetof(ChannelState, buffer_epochs):
      return "buffer_epochs[0]";
    case offsetof(ChannelState, buffer_epochs) + 8:
      return "buffer_epochs[1]";
    case offsetof(ChannelState, awaited_release):
      return "awaited_release";
    default:
      return "channel+" + std::to_string(offset);
  }
}

std::string bracket(const char* what, size_t number) {
  return std::string("[") + what + " " + std::to_string(number) + "]";
}

}  // namespace

std::string control_name(const Shape& shape, size_t offset) {
  const ControlLayout control = shape.control();
  const size_t channels = size_t(shape.num_channels), ranks = size_t(shape.num_ranks);
  if (offset < sizeof(FaultRecord)) return kFaultFields[offset / 8];
  if (offset >= control.flags_offset) {
    const size_t at = offset - control.flags_offset, in_stream = at % control.flags_bytes;
    const size_t flag = in_stream / sizeof(Flag);
    const std::string stream = shape.num_streams > 1 ? bracket("stream", at / control.flags_bytes) : "";
    return "flag" + stream + bracket("parity", flag / (channels * ranks)) +
           bracket("channel", flag / ranks % channels) + bracket("from", flag % ranks) +
           kFlagFields[in_stream % sizeof(Flag) / 8];
  }
  const size_t at = offset - control.streams_offset, in_stream = at % control.stream_bytes;
  const std::string stream = shape.num_streams > 1 ? bracket("stream", at / control.stream_bytes) + "." : "";
  if (in_stream < sizeof(StreamState)) return stream + stream_field(in_stream);
  const size_t line = in_stream / 64 - 1, in_line = in_stream % 64;
  if (line < channels) return stream + bracket("channel", line) + "." + channel_field(in_line);
  return stream + bracket("channel", line - channels) + (in_line < 4 ? ".rings" : ".awaited");
}

explorer::Options World::options() const {
  explorer::Options options;
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    for (int c = 0; c < shape_.threads_of_rank(); ++c) options.threads.push_back({rank, c});
  }
  options.allows_unordered_stores = shape_.unordered;
  options.races_are_doubts = races_are_doubts_;
  // Who leaves a faulted call last overwrites what the other channels have put out.
  options.counters_carry_knowledge = shape_.has_faults();
  if (shape_.has_faults() || has_deadlines_) {
    options.faults.mortal_ranks = shape_.mortal;
    options.faults.max_deaths = shape_.mortal != 0 ? 1 : 0;
    options.faults.deadline_ns = kJump;
    options.faults.max_early_deadlines = shape_.num_early;
  }
  return options;
}

void World::run(int thread) const {
  const int rank = thread / shape_.threads_of_rank(), of_rank = thread % shape_.threads_of_rank();
  run_rank(rank, of_rank);
  // A peer's host sees the end of the socket, and then what was done before it was closed.
  if (of_rank == 0 && shape_.leave) __atomic_store_n(&state(rank).has_left, 1, __ATOMIC_RELEASE);
}

// All ranks name one cause, and it stays what it was.
void World::check_end() const {
  for (int rank = 0; rank < shape_.num_ranks && shape_.num_lanes == 1; ++rank) {
    const uint64_t cause = states_[rank].cause;
    const uint64_t now = core::common_cause(symm(rank), shape_.control());
    if (cause != 0 && now != cause) {
      explorer::fail("cause", "rank %d: the cause was 0x%llx, and is 0x%llx", rank, (unsigned long long)cause,
                     (unsigned long long)now);
    }
  }
}

void World::make_regions(uint64_t payload_bytes, const std::function<std::string(size_t)>& payload_name) {
  const uint64_t control_bytes = shape_.control_bytes();
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    void* region = explorer::allocate(
        control_bytes + payload_bytes, [this, rank, control_bytes, payload_name](size_t at) {
          const std::string name =
              at < control_bytes ? control_name(shape_, at) : payload_name(at - control_bytes);
          return "rank " + std::to_string(rank) + " " + name;
        });
    bases_.push_back(reinterpret_cast<uint64_t>(region));
    core::init_region(bases_.back(), shape_.control(), shape_.num_ranks, shape_.start_epoch);
    polls_.push_back({this, rank});
  }
  states_ = explorer::allocate_array<RankState>(size_t(shape_.num_ranks * shape_.num_lanes), "caller");
}

WaitPolicy World::policy(int rank) const {
  WaitPolicy policy = {};
  policy.timeout_ns = policy.first_timeout_ns = shape_.forever ? 0 : kTimeout;
  policy.num_yields = shape_.sleeps ? 0 : INT_MAX;
  policy.poll_host = &World::poll_host;
  policy.poll_context = const_cast<Poll*>(&polls_[size_t(rank)]);
  return policy;
}

void World::poll_host(void* context, HostEvents* events) {
  const Poll& poll = *static_cast<const Poll*>(context);
  const World& world = *poll.world;
  if (world.shape_.lost) {
    events->lost_peers = explorer::dead_ranks();
    for (int rank = 0; rank < world.shape_.num_ranks; ++rank) {
      if (__atomic_load_n(&world.state(rank).has_left, __ATOMIC_ACQUIRE) != 0) {
        events->lost_peers |= core::rank_bit(rank);
      }
    }
  }
  if (world.shape_.interrupt && poll.rank == 0) events->interrupted = explorer::choose(2, "Ctrl-C") != 0;
}

void World::check_fault(int rank, const char* what) const {
  // As core::read_fault, which waits a moment for a record that is not ready.
  const uint64_t word = core::common_cause(symm(rank), shape_.control());
  const int reporter = int(word >> 48 & 0xff);
  const FaultRecord* record = core::symm_at<FaultRecord>(symm(rank), reporter, shape_.control().fault_offset);
  const bool has_record = word != 0 && core::arch::load_acquire_sys(&record->ready) != 0;
  const uint64_t ranks =
      has_record ? core::arch::load_relaxed_sys(&record->ranks) : core::rank_bit(int(word >> 40 & 0xff));
  const uint64_t my_call = has_record ? core::arch::load_relaxed_sys(&record->my_call) : 0;
  const FaultKind fault_kind = FaultKind(word >> 56);
  const uint64_t dead = explorer::dead_ranks();
  const int kind = int(fault_kind);
  if (shape_.num_lanes == 1) state(rank).cause = word;
  if (fault_kind == FaultKind::kNone)
    explorer::fail("fault", "rank %d: %s failed without a cause", rank, what);
  if (expected_ != FaultKind::kNone) {
    if (fault_kind == expected_) return;
    explorer::fail("fault", "rank %d: %s ended with kind %d, not %d", rank, what, kind, int(expected_));
  }
  if (!shape_.has_faults()) {
    explorer::fail("fault", "rank %d: %s, a healthy call, ended with kind %d, reported by rank %d", rank,
                   what, kind, reporter);
  }
  // One channel of the reporter may pass on what another one has not completed yet; and rank 0, where all
  // look, marks its own fault before it completes its record.
  if (!has_record && shape_.num_channels == 1 && reporter != 0) {
    explorer::fail("record", "rank %d: %s knows a fault of rank %d before its record", rank, what, reporter);
  }
  if (has_record && (ranks == 0 || my_call == 0)) {
    explorer::fail("record", "rank %d: %s found the record of rank %d half written", rank, what, reporter);
  }
  switch (fault_kind) {
    case FaultKind::kTimeout:
      // A deadline that passes early may name whoever is late.
      if (shape_.num_early == 0 && (ranks & ~dead) != 0) break;
      return;
    case FaultKind::kPeerLost:
      if (!shape_.lost || (ranks & ~dead) != 0) break;
      return;
    case FaultKind::kInterrupted:
      if (!shape_.interrupt || ranks != 1) break;
      return;
    default:
      break;
  }
  explorer::fail("blame", "rank %d: %s ended with kind %d and blames ranks 0x%x; dead are 0x%x", rank, what,
                 kind, unsigned(ranks), unsigned(dead));
}

}  // namespace scenario
