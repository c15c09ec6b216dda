// a2a_lse_reduce over every wire: each rank makes a few calls, and checks what it got. In pull mode the
// caller hands buffers out, writes into them and passes them, copies, and overwrites both buffers after a
// fault.
//
//   wire      core/types.h: 0 push, 1 pull, 2 .. 4 packets of 8, 16, 128 bytes
//   calls     how many; tokens: T of each, a digit for a call (leading zeros may be left out)
//   tokens1   the same for rank 1, where it makes other calls: all ranks must end in a mismatch
//   capacity  rows of one round
//   script0, script1, ...   of a rank, a digit for a step of its caller: 1 hands out a buffer, 2 writes and
//   passes
//             it, 3 passes an ordinary tensor, 4 as 2, but a view that starts one row on. Left out: 33...
//   empty=1   some rows are called empty by the lengths
//   swap=1    of two lanes in one thread, rank 1 makes the calls of the second one first
#include "scenarios.h"

#include "ops/a2a_lse_reduce.h"

namespace dcp::DCP_NS {
A2aLseReduceFns a2a_lse_reduce();
}

namespace scenario {

namespace {

constexpr int kNone = -1;
enum Step { kHandOut = 1, kPass, kCopy, kPassView };

struct Sizes {
  int head_dim, lse_in_row, row_bytes;
};
// As small as a wire allows: rows of a word or two, but for packets of 128 bytes.
Sizes sizes_of(Wire wire) {
  switch (wire) {
    case Wire::kPacket8:
      return {1, 4, 16};
    case Wire::kPacket16:
      return {3, 12, 32};
    case Wire::kPacket128:
      return {32, 128, 256};
    case Wire::kPull:
      return {1, 0, 4};
    default:
      return {2, 8, 12};
  }
}

}  // namespace

class A2a : public World {
 public:
  explicit A2a(const explorer::Arguments& given)
      : World(given, 1),
        wire_(Wire(given.get("wire", 0))),
        sizes_(sizes_of(wire_)),
        num_calls_(int(given.get("calls", 1))),
        tokens_(given.get("tokens", 1)),
        other_tokens_(given.get("tokens1", -1)),
        capacity_(int(given.get("capacity", 8))),
        has_empty_(given.get("empty", 0) != 0),
        swaps_lanes_(given.get("swap", 0) != 0) {
    for (int rank = 0; rank < shape_.num_ranks; ++rank) {
      const int64_t script = given.get("script" + std::to_string(rank), 0);
      for (int i = 0; script != 0 && i < num_digits(script); ++i) {
        scripts_[rank].push_back(digit(script, num_digits(script), i));
      }
      if (script == 0) scripts_[rank].assign(size_t(num_calls_), kCopy);
      int num_calls = 0;
      for (int step : scripts_[rank]) num_calls += step != kHandOut;
      DCP_CHECK(num_calls == num_calls_, num_calls);
    }
    for (int call = 0; call < num_calls_; ++call) {
      for (int rank : {0, 1}) max_tokens_ = std::max(max_tokens_, tokens_of(rank, call));
    }
    races_are_doubts_ = wire_ == Wire::kPull && shape_.has_faults();
    has_deadlines_ = swaps_lanes_;
    if (other_tokens_ >= 0 || swaps_lanes_) expected_ = FaultKind::kMismatch;
  }

  void set_up() override;

 protected:
  void run_rank(int rank, int thread) const override;

 private:
  // T of a call, by its number.
  int tokens_of(int rank, int call) const {
    return digit(rank == 1 && other_tokens_ >= 0 ? other_tokens_ : tokens_, num_calls_, call % num_calls_);
  }
  bool is_mismatch(int call) const { return swaps_lanes_ || tokens_of(0, call) != tokens_of(1, call); }
  bool is_empty(int call, int rank, int row) const { return has_empty_ && (call + rank + row) % 3 == 0; }
  float value(int call, int rank, int row, int head, int d) const {
    return float(1 + call * 37 + row * 11 + rank * 301 + head * 5 + d * 3);
  }
  float lse(int call, int rank, int row, int head) const {
    return is_empty(call, rank, row) ? -INFINITY : float((call + 2 * rank + row + head) % 3) * 0.5f;
  }

  int round_rows() const { return std::min(capacity_, max_tokens_); }
  int buffer_rows() const { return std::min(capacity_, max_tokens_) + 1; }
  int heads_bytes() const { return shape_.num_ranks * sizes_.head_dim * int(sizeof(float)); }
  uint64_t staging_offset() const { return shape_.control_bytes(); }
  uint64_t slots_bytes() const {
    return uint64_t(shape_.num_ranks - 1) * uint64_t(round_rows() * sizes_.row_bytes);
  }
  uint64_t unpacked_offset() const { return staging_offset() + 2 * slots_bytes(); }
  bool is_packet() const { return wire_ >= Wire::kPacket8; }
  uint64_t buffer_offset() const { return unpacked_offset() + (is_packet() ? slots_bytes() : 0); }
  uint64_t buffer_bytes() const { return uint64_t(buffer_rows() * heads_bytes()); }
  std::string payload_name(size_t at) const;

  // A rank on one of its lanes.
  struct Seat {
    int rank, lane;
  };
  int number(Seat seat) const { return seat.rank * shape_.num_lanes + seat.lane; }
  RankState& state_of(Seat seat) const { return state(seat.rank, seat.lane); }
  float* out(Seat seat) const { return out_ + number(seat) * max_tokens_ * sizes_.head_dim; }
  float* out_lse(Seat seat) const { return out_lse_ + number(seat) * max_tokens_; }
  // Calls have numbers of their own on every lane.
  size_t call_number(Seat seat, int call) const { return size_t(seat.lane * num_calls_ + call); }
  const std::vector<float>& partial(Seat seat, int call) const {
    return partial_[size_t(seat.rank)][call_number(seat, call)];
  }
  uint64_t lane_bytes() const {
    const uint64_t buffers = wire_ == Wire::kPull ? 2 * buffer_bytes() : 0;
    return buffer_offset() - staging_offset() + buffers;
  }
  uint64_t lane_offset(int lane) const { return uint64_t(lane) * lane_bytes(); }
  float* buffer_row(Seat seat, int buffer_idx, int row) const {
    return reinterpret_cast<float*>(symm(seat.rank).bases[seat.rank] + lane_offset(seat.lane) +
                                    buffer_offset() + uint64_t(buffer_idx) * buffer_bytes()) +
           row * (heads_bytes() / 4);
  }

  A2aLseReduceParams params(Seat seat, int call) const;
  int free_buffer(Seat seat) const;
  void write_buffer(Seat seat, int call, bool as_view) const;
  void check(Seat seat, int call, Status status) const;
  void overwrite_buffers(Seat seat) const;
  bool hand_out(Seat seat, int channel, size_t at, int num_done) const;
  void run_lane(Seat seat, int channel) const;

  const Wire wire_;
  const Sizes sizes_;
  const int num_calls_;
  const int64_t tokens_, other_tokens_;
  const int capacity_;
  const bool has_empty_, swaps_lanes_;
  int max_tokens_ = 0;
  std::vector<int> scripts_[4];
  // Constants: [rank][call]. What callers pass where they pass ordinary tensors.
  std::vector<std::vector<std::vector<float>>> partial_, lses_;
  std::vector<std::vector<std::vector<int32_t>>> lengths_;
  std::vector<int32_t> starts_;
  float *out_ = nullptr, *out_lse_ = nullptr;
};

std::string A2a::payload_name(size_t at) const {
  const std::string lane = shape_.num_lanes > 1 ? "lane " + std::to_string(at / lane_bytes()) + " " : "";
  at %= lane_bytes();
  const size_t staging_bytes = 2 * slots_bytes(), row_bytes = size_t(sizes_.row_bytes);
  const size_t rows = size_t(round_rows()), slots = size_t(shape_.num_ranks - 1);
  if (at < staging_bytes + (is_packet() ? slots_bytes() : 0)) {
    const size_t row = at / row_bytes;
    const std::string place = "[slot " + std::to_string(row / rows % slots) + "][row " +
                              std::to_string(row % rows) + "]+" + std::to_string(at % row_bytes);
    if (at >= staging_bytes) return lane + "plain" + place;
    return lane + "staging[parity " + std::to_string(row / rows / slots) + "]" + place;
  }
  at -= buffer_offset() - staging_offset();
  const size_t in_buffer = at % buffer_bytes(), row_size = size_t(heads_bytes());
  return lane + "buffer[" + std::to_string(at / buffer_bytes()) + "][row " +
         std::to_string(in_buffer / row_size) + "]+" + std::to_string(in_buffer % row_size);
}

void A2a::set_up() {
  const size_t ranks = size_t(shape_.num_ranks), lanes = size_t(shape_.num_lanes);
  make_regions(lanes * lane_bytes(), [this](size_t at) { return payload_name(at); });
  const size_t rows = ranks * lanes * size_t(max_tokens_);
  out_ = explorer::allocate_array<float>(rows * size_t(sizes_.head_dim), "out");
  out_lse_ = explorer::allocate_array<float>(rows, "out_lse");
  for (int row = 0; row <= max_tokens_; ++row) starts_.push_back(row);
  const size_t calls = lanes * size_t(num_calls_);
  partial_.assign(ranks, std::vector<std::vector<float>>(calls));
  lses_ = partial_;
  lengths_.assign(ranks, std::vector<std::vector<int32_t>>(calls));
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t call = 0; call < calls; ++call) {
      for (int row = 0; row < max_tokens_; ++row) {
        lengths_[rank][call].push_back(is_empty(int(call), int(rank), row) ? 0 : 1);
        for (int head = 0; head < shape_.num_ranks; ++head) {
          lses_[rank][call].push_back(lse(int(call), int(rank), row, head));
          for (int d = 0; d < sizes_.head_dim; ++d) {
            partial_[rank][call].push_back(value(int(call), int(rank), row, head, d));
          }
        }
      }
    }
  }
}

A2aLseReduceParams A2a::params(Seat seat, int call) const {
  A2aLseReduceParams p = {};
  const int num_heads = shape_.num_ranks, head_dim = sizes_.head_dim;
  p.symm = symm(seat.rank);
  p.control = shape_.control();
  p.wait = policy(seat.rank);
  p.lane = p.stream_idx = seat.lane;
  p.partial_out = partial(seat, call).data();
  p.partial_lse = lses_[size_t(seat.rank)][call_number(seat, call)].data();
  p.out = out(seat);
  p.out_lse = out_lse(seat);
  if (has_empty_) {
    p.seq_lens = lengths_[size_t(seat.rank)][call_number(seat, call)].data();
    p.query_start_loc = starts_.data();
    p.num_seqs = max_tokens_;
  }
  p.partial_out_token_stride = num_heads * head_dim;
  p.partial_out_head_stride = head_dim;
  p.partial_lse_token_stride = num_heads;
  p.partial_lse_head_stride = 1;
  p.out_token_stride = p.out_head_stride = head_dim;
  p.out_lse_token_stride = p.out_lse_head_stride = 1;
  p.num_tokens = tokens_of(seat.rank, call);
  p.lse_base = LseBase::k2;
  p.num_nonfinite_lse = &state_of(seat).num_nonfinite;
  p.wire = wire_;
  p.num_local_heads = 1;
  p.head_dim = head_dim;
  p.max_round_rows = capacity_;
  p.staging = {staging_offset() + lane_offset(seat.lane), uint64_t(sizes_.row_bytes), round_rows()};
  p.unpacked = p.staging;
  if (is_packet()) p.unpacked.offset = unpacked_offset() + lane_offset(seat.lane);
  p.lse_in_row = uint64_t(sizes_.lse_in_row);
  p.buffer_offset = buffer_offset() + lane_offset(seat.lane);
  p.buffer_bytes = buffer_bytes();
  return p;
}

// As bindings/handle.h does it.
int A2a::free_buffer(Seat seat) const {
  const RankState& mine = state_of(seat);
  if (mine.handed_out != kNone) return 1 - mine.handed_out;
  const bool is_free = core::is_released(symm(seat.rank), shape_.control(), seat.lane, mine.last_used);
  return is_free ? mine.last_used : 1 - mine.last_used;
}

// The rows of call `call` into the buffer that is handed out.
void A2a::write_buffer(Seat seat, int call, bool as_view) const {
  const float* from = partial(seat, call).data();
  float* to = buffer_row(seat, state_of(seat).handed_out, as_view ? 1 : 0);
  for (int i = 0; i < tokens_of(seat.rank, call) * heads_bytes() / 4; ++i) to[i] = from[i];
}

// After a fault the caller may write into what it has, while a late peer still reads there.
void A2a::overwrite_buffers(Seat seat) const {
  if (wire_ != Wire::kPull) return;
  for (int buffer_idx : {0, 1}) {
    float* to = buffer_row(seat, buffer_idx, 0);
    for (int i = 0; i < buffer_rows() * heads_bytes() / 4; ++i) to[i] = -1.0f;
  }
}

void A2a::check(Seat seat, int call, Status status) const {
  const int rank = seat.rank, name = int(call_number(seat, call)), head_dim = sizes_.head_dim;
  if (status != Status::kOk) check_fault(rank, "a call");
  if (status == Status::kOk && is_mismatch(call)) {
    explorer::fail("fault", "rank %d: call %d, which is not that of its peers, ended well", rank, name);
  }
  for (int row = 0; row < tokens_of(rank, call); ++row) {
    const float* got = out(seat) + row * head_dim;
    const double got_lse = double(out_lse(seat)[row]);
    if (status != Status::kOk) {
      for (int d = 0; d < head_dim; ++d) {
        if (std::isnan(got[d])) continue;
        explorer::fail("stale", "rank %d: call %d failed, and row %d of its output is no NaN", rank, name,
                       row);
      }
      continue;
    }
    double sum = 0, merged_lse = -INFINITY;
    for (int r = 0; r < shape_.num_ranks; ++r) sum += std::exp2(double(lse(name, r, row, rank)));
    if (sum > 0) merged_lse = std::log2(sum);
    const bool is_same_lse = got_lse == merged_lse || std::fabs(got_lse - merged_lse) < 1e-5;
    for (int d = 0; d < head_dim; ++d) {
      double expected = 0;
      for (int r = 0; r < shape_.num_ranks && sum > 0; ++r) {
        expected += std::exp2(double(lse(name, r, row, rank))) / sum * double(value(name, r, row, rank, d));
      }
      if (std::fabs(double(got[d]) - expected) <= 1e-4 * std::fabs(expected) && is_same_lse) continue;
      explorer::fail("data", "rank %d: call %d row %d is %g (LSE %g), not %g (LSE %g)", rank, name, row,
                     double(got[d]), got_lse, expected, merged_lse);
    }
  }
  for (int i = 0; i < max_tokens_ * head_dim; ++i) out(seat)[i] = 0;
  for (int i = 0; i < max_tokens_; ++i) out_lse(seat)[i] = 0;
}

// What Workspace.partial_out does. The caller writes into what it gets at once: the rows of the call after
// `num_done` that passes it.
bool A2a::hand_out(Seat seat, int channel, size_t at, int num_done) const {
  RankState& mine = state_of(seat);
  const auto run = [&](const Launch& launch) {
    if (launch.first_channel != 0) return Status::kOk;
    const int buffer_idx = free_buffer(seat);
    const Status status =
        core::acquire_buffer(symm(seat.rank), shape_.control(), policy(seat.rank), seat.lane, buffer_idx);
    mine.handed_out = buffer_idx;
    return status;
  };
  const auto finish = [&](Status status) {
    if (status != Status::kOk) {
      check_fault(seat.rank, "partial_out");
      return overwrite_buffers(seat);
    }
    const std::vector<int>& script = scripts_[seat.rank];
    int call = num_done;
    for (size_t next = at + 1; next < script.size(); ++next) {
      if (script[next] == kHandOut) return;  // handed out in vain
      if (script[next] != kCopy) return write_buffer(seat, call, script[next] == kPassView);
      ++call;
    }
  };
  return call(mine, channel, [] {}, run, finish);
}

void A2a::run_lane(Seat seat, int channel) const {
  RankState& mine = state_of(seat);
  if (channel == 0) mine.handed_out = kNone;
  int done = 0;
  for (size_t at = 0; at < scripts_[seat.rank].size(); ++at) {
    const int step = scripts_[seat.rank][at];
    if (step == kHandOut) {
      if (!hand_out(seat, channel, at, done)) return;
      continue;
    }
    const auto prepare = [&] {
      mine.buffer_idx = step == kCopy ? free_buffer(seat) : mine.handed_out;
      if (step != kCopy) mine.handed_out = kNone;
    };
    const auto run = [&](const Launch& launch) {
      A2aLseReduceParams p = params(seat, done);
      if (wire_ == Wire::kPull) {
        p.buffer_idx = mine.buffer_idx;
        p.copies_to_buffer = step == kCopy;
        if (step != kCopy) p.partial_out = buffer_row(seat, mine.buffer_idx, step == kPassView ? 1 : 0);
      }
      return core::a2a_lse_reduce().run(p, launch);
    };
    if (channel == 0) explorer::note("rank %d makes call %d", seat.rank, int(call_number(seat, done)));
    const auto finish = [&](Status status) {
      mine.last_used = mine.buffer_idx;
      check(seat, done, status);
      if (status != Status::kOk) overwrite_buffers(seat);
    };
    if (!call(mine, channel, prepare, run, finish)) return;
    ++done;
  }
}

void A2a::run_rank(int rank, int thread) const {
  if (shape_.num_lanes == 1) return run_lane({rank, 0}, thread);
  if (!shape_.one_thread) return run_lane({rank, thread}, 0);
  for (int i = 0; i < shape_.num_lanes; ++i) {
    run_lane({rank, swaps_lanes_ && rank == 1 ? shape_.num_lanes - 1 - i : i}, 0);
  }
}

std::unique_ptr<explorer::Program> make_a2a(const explorer::Arguments& given) {
  return std::make_unique<A2a>(given);
}

}  // namespace scenario
