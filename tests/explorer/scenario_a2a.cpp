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
        has_empty_(given.get("empty", 0) != 0) {
    for (int rank = 0; rank < shape_.num_ranks; ++rank) {
      const int64_t script = given.get("script" + std::to_string(rank), 0);
      for (int i = 0; script != 0 && i < num_digits(script); ++i) {
        scripts_[rank].push_back(digit(script, num_digits(script), i));
      }
      if (script == 0) scripts_[rank].assign(size_t(num_calls_), kCopy);
    }
    for (int call = 0; call < num_calls_; ++call) {
      for (int rank : {0, 1}) max_tokens_ = std::max(max_tokens_, tokens_of(rank, call));
    }
    if (other_tokens_ >= 0) expected_ = FaultKind::kMismatch;
  }

  void set_up() override;

 protected:
  void run_rank(int rank, int channel) const override;

 private:
  int tokens_of(int rank, int call) const {
    return digit(rank == 1 && other_tokens_ >= 0 ? other_tokens_ : tokens_, num_calls_, call);
  }
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

  A2aLseReduceParams params(int rank, int call) const;
  float* buffer_row(int rank, int buffer_idx, int row) const {
    return reinterpret_cast<float*>(symm(rank).bases[rank] + buffer_offset() +
                                    uint64_t(buffer_idx) * buffer_bytes()) +
           row * (heads_bytes() / 4);
  }
  int free_buffer(int rank) const;
  void prepare(int rank, int call, int step) const;
  void check(int rank, int call, Status status) const;
  void overwrite_buffers(int rank) const;

  const Wire wire_;
  const Sizes sizes_;
  const int num_calls_;
  const int64_t tokens_, other_tokens_;
  const int capacity_;
  const bool has_empty_;
  int max_tokens_ = 0;
  std::vector<int> scripts_[4];
  // Constants: [rank][call]. What callers pass where they pass ordinary tensors.
  std::vector<std::vector<std::vector<float>>> partial_, lses_;
  std::vector<std::vector<std::vector<int32_t>>> lengths_;
  std::vector<int32_t> starts_;
  float *out_ = nullptr, *out_lse_ = nullptr;
};

std::string A2a::payload_name(size_t at) const {
  const size_t staging_bytes = 2 * slots_bytes(), row_bytes = size_t(sizes_.row_bytes);
  const size_t rows = size_t(round_rows()), slots = size_t(shape_.num_ranks - 1);
  if (at < staging_bytes + (is_packet() ? slots_bytes() : 0)) {
    const size_t row = at / row_bytes;
    const std::string place = "[slot " + std::to_string(row / rows % slots) + "][row " +
                              std::to_string(row % rows) + "]+" + std::to_string(at % row_bytes);
    if (at >= staging_bytes) return "plain" + place;
    return "staging[parity " + std::to_string(row / rows / slots) + "]" + place;
  }
  at -= buffer_offset() - staging_offset();
  return "buffer " + std::to_string(at / buffer_bytes()) + " row " +
         std::to_string(at % buffer_bytes() / size_t(heads_bytes())) + "+" +
         std::to_string(at % buffer_bytes() % size_t(heads_bytes()));
}

void A2a::set_up() {
  const uint64_t buffers = wire_ == Wire::kPull ? 2 * buffer_bytes() : 0;
  make_regions(buffer_offset() - staging_offset() + buffers, [this](size_t at) { return payload_name(at); });
  const size_t rows = size_t(shape_.num_ranks) * size_t(max_tokens_);
  out_ = explorer::allocate_array<float>(rows * size_t(sizes_.head_dim), "out");
  out_lse_ = explorer::allocate_array<float>(rows, "out_lse");
  for (int row = 0; row <= max_tokens_; ++row) starts_.push_back(row);
  const size_t ranks = size_t(shape_.num_ranks), calls = size_t(num_calls_);
  partial_.assign(ranks, std::vector<std::vector<float>>(calls));
  lses_ = partial_;
  lengths_.assign(ranks, std::vector<std::vector<int32_t>>(calls));
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    for (int call = 0; call < num_calls_; ++call) {
      for (int row = 0; row < max_tokens_; ++row) {
        lengths_[size_t(rank)][size_t(call)].push_back(is_empty(call, rank, row) ? 0 : 1);
        for (int head = 0; head < shape_.num_ranks; ++head) {
          lses_[size_t(rank)][size_t(call)].push_back(lse(call, rank, row, head));
          for (int d = 0; d < sizes_.head_dim; ++d) {
            partial_[size_t(rank)][size_t(call)].push_back(value(call, rank, row, head, d));
          }
        }
      }
    }
  }
}

A2aLseReduceParams A2a::params(int rank, int call) const {
  A2aLseReduceParams p = {};
  const int num_heads = shape_.num_ranks, head_dim = sizes_.head_dim;
  p.symm = symm(rank);
  p.control = shape_.control();
  p.wait = policy(rank);
  p.partial_out = partial_[size_t(rank)][size_t(call)].data();
  p.partial_lse = lses_[size_t(rank)][size_t(call)].data();
  p.out = out_ + rank * max_tokens_ * head_dim;
  p.out_lse = out_lse_ + rank * max_tokens_;
  if (has_empty_) {
    p.seq_lens = lengths_[size_t(rank)][size_t(call)].data();
    p.query_start_loc = starts_.data();
    p.num_seqs = max_tokens_;
  }
  p.partial_out_token_stride = num_heads * head_dim;
  p.partial_out_head_stride = head_dim;
  p.partial_lse_token_stride = num_heads;
  p.partial_lse_head_stride = 1;
  p.out_token_stride = p.out_head_stride = head_dim;
  p.out_lse_token_stride = p.out_lse_head_stride = 1;
  p.num_tokens = tokens_of(rank, call);
  p.lse_base = LseBase::k2;
  p.num_nonfinite_lse = &state(rank).num_nonfinite;
  p.wire = wire_;
  p.num_local_heads = 1;
  p.head_dim = head_dim;
  p.max_round_rows = capacity_;
  p.staging = {staging_offset(), uint64_t(sizes_.row_bytes), round_rows()};
  p.unpacked = p.staging;
  if (is_packet()) p.unpacked.offset = unpacked_offset();
  p.lse_in_row = uint64_t(sizes_.lse_in_row);
  p.buffer_offset = buffer_offset();
  p.buffer_bytes = buffer_bytes();
  return p;
}

// As bindings/handle.h does it.
int A2a::free_buffer(int rank) const {
  const RankState& mine = state(rank);
  if (mine.handed_out != kNone) return 1 - mine.handed_out;
  return core::is_released(symm(rank), shape_.control(), 0, mine.last_used) ? mine.last_used
                                                                            : 1 - mine.last_used;
}

void A2a::prepare(int rank, int call, int step) const {
  RankState& mine = state(rank);
  if (wire_ != Wire::kPull) return;
  if (step == kCopy) {
    mine.buffer_idx = free_buffer(rank);
    return;
  }
  mine.buffer_idx = mine.handed_out;
  mine.handed_out = kNone;
  const std::vector<float>& from = partial_[size_t(rank)][size_t(call)];
  float* to = buffer_row(rank, mine.buffer_idx, step == kPassView ? 1 : 0);
  for (int i = 0; i < tokens_of(rank, call) * heads_bytes() / 4; ++i) to[i] = from[size_t(i)];
}

// After a fault the caller may write into what it has, while a late peer still reads there.
void A2a::overwrite_buffers(int rank) const {
  if (wire_ != Wire::kPull) return;
  for (int buffer_idx : {0, 1}) {
    float* to = buffer_row(rank, buffer_idx, 0);
    for (int i = 0; i < buffer_rows() * heads_bytes() / 4; ++i) to[i] = -1.0f;
  }
}

void A2a::check(int rank, int call, Status status) const {
  const int num_tokens = tokens_of(rank, call), head_dim = sizes_.head_dim;
  float* out = out_ + rank * max_tokens_ * head_dim;
  float* out_lse = out_lse_ + rank * max_tokens_;
  if (status != Status::kOk) check_fault(rank, "a call");
  if (status == Status::kOk && expected_ != FaultKind::kNone) {
    explorer::fail("fault", "rank %d: call %d, which is not that of its peers, ended well", rank, call);
  }
  for (int row = 0; row < num_tokens; ++row) {
    if (status != Status::kOk) {
      for (int d = 0; d < head_dim; ++d) {
        if (!std::isnan(out[row * head_dim + d])) {
          explorer::fail("stale", "rank %d: call %d failed, and row %d of its output is no NaN", rank, call,
                         row);
        }
      }
      continue;
    }
    double sum = 0, merged_lse = -INFINITY;
    for (int r = 0; r < shape_.num_ranks; ++r) sum += std::exp2(double(lse(call, r, row, rank)));
    if (sum > 0) merged_lse = std::log2(sum);
    for (int d = 0; d < head_dim; ++d) {
      double expected = 0;
      for (int r = 0; r < shape_.num_ranks && sum > 0; ++r) {
        expected += std::exp2(double(lse(call, r, row, rank))) / sum * value(call, r, row, rank, d);
      }
      const double got = out[row * head_dim + d], got_lse = out_lse[row];
      const bool is_same_lse = got_lse == merged_lse || std::fabs(got_lse - merged_lse) < 1e-5;
      if (!(std::fabs(got - expected) <= 1e-4 * std::fabs(expected)) || !is_same_lse) {
        explorer::fail("data", "rank %d: call %d row %d is %g (LSE %g), not %g (LSE %g)", rank, call, row,
                       got, got_lse, expected, merged_lse);
      }
    }
  }
  for (int i = 0; i < max_tokens_ * head_dim; ++i) out[i] = 0;
  for (int i = 0; i < max_tokens_; ++i) out_lse[i] = 0;
}

void A2a::run_rank(int rank, int channel) const {
  RankState& mine = state(rank);
  if (channel == 0) mine.handed_out = kNone;
  int call = 0;
  for (int step : scripts_[rank]) {
    if (step == kHandOut) {
      const auto hand_out = [&](const Launch& launch) {
        if (launch.first_channel != 0) return Status::kOk;
        const int buffer_idx = free_buffer(rank);
        const Status status = core::acquire_buffer(symm(rank), shape_.control(), policy(rank), 0, buffer_idx);
        mine.handed_out = buffer_idx;
        return status;
      };
      const bool good = this->call(
          rank, channel, [] {}, hand_out,
          [&](Status status) {
            if (status == Status::kOk) return;
            check_fault(rank, "partial_out");
            overwrite_buffers(rank);
          });
      if (!good) return;
      continue;
    }
    const auto run = [&](const Launch& launch) {
      A2aLseReduceParams p = params(rank, call);
      if (wire_ == Wire::kPull) {
        p.buffer_idx = mine.buffer_idx;
        p.copies_to_buffer = step == kCopy;
        if (step != kCopy) p.partial_out = buffer_row(rank, mine.buffer_idx, step == kPassView ? 1 : 0);
      }
      return core::a2a_lse_reduce().run(p, launch);
    };
    const bool good = this->call(
        rank, channel, [&] { prepare(rank, call, step); }, run,
        [&](Status status) {
          mine.last_used = mine.buffer_idx;
          check(rank, call, status);
          if (status != Status::kOk) overwrite_buffers(rank);
        });
    if (!good) return;
    ++call;
  }
}

std::unique_ptr<explorer::Program> make_a2a(const explorer::Arguments& given) {
  return std::make_unique<A2a>(given);
}

}  // namespace scenario
