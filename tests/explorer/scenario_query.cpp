// query_gather: each rank gathers and reads what it got, as attention does, until it releases the view, or
// makes the a2a_lse_reduce that comes after attention.
//
//   tokens    T of each gather, a digit for each; capacity: rows of one round
//   shared    1: one buffer for all ranks, 0: one for each
//   script    of all ranks: 1 gathers a view, 2 releases it, 3 gathers to `out`. The view is read before the
//   next
//             step, and once more when that is no release: then it must still be there
//   other_rows=1   the reduce has another T than the gather
//   expect    a FaultKind (core/types.h) that ends every run, on every rank
#include "gathers.h"
#include "ops/a2a_lse_reduce.h"
#include "ops/query_gather.h"
#include "scenarios.h"

namespace dcp::DCP_NS {
QueryGatherFns query_gather();
A2aLseReduceFns a2a_lse_reduce();
}  // namespace dcp::DCP_NS

namespace scenario {

namespace {

enum Step { kView = 1, kRelease, kOut, kReduce };
enum Stream { kQueryStream, kReduceStream, kNumStreams };
constexpr int kHeadBytes = 4, kStagedBytes = 8;  // of a row: one float and its LSE

}  // namespace

class Query : public Gathers {
 public:
  explicit Query(const explorer::Arguments& given)
      : Gathers(given, kNumStreams),
        tokens_(given.get("tokens", 1)),
        capacity_(int(given.get("capacity", 8))),
        other_rows_(int(given.get("other_rows", 0))) {
    for (int step : script_) {
      num_gathers_ += step == kView || step == kOut;
      reduces_ |= step == kReduce;
    }
    for (int gather = 0; gather < num_gathers_; ++gather)
      max_tokens_ = std::max(max_tokens_, tokens_of(gather));
  }

  void set_up() override {
    const int rows = std::max(max_tokens_ + other_rows_, 1);
    make_regions(reduces_ ? 2 * slots_bytes() : 0, [](size_t at) { return "staging+" + std::to_string(at); });
    const auto name = [this](size_t at) {
      const size_t head = at / kHeadBytes, ranks = size_t(shape_.num_ranks);
      return "query[row " + std::to_string(head / ranks) + "][from " + std::to_string(head % ranks) + "]+" +
             std::to_string(at % kHeadBytes);
    };
    make_buffers(size_t(std::min(rows, capacity_) * shape_.num_ranks * kHeadBytes), name);
    out_ = explorer::allocate_array<uint32_t>(size_t(rows * shape_.num_ranks * shape_.num_ranks), "out");
    merged_ = explorer::allocate_array<float>(size_t(rows * shape_.num_ranks), "merged");
    lses_.assign(size_t(rows * shape_.num_ranks), 0.0f);
    data_.assign(size_t(shape_.num_ranks), std::vector<std::vector<uint32_t>>(size_t(num_gathers_)));
    for (int rank = 0; rank < shape_.num_ranks; ++rank) {
      for (int gather = 0; gather < num_gathers_; ++gather) {
        for (int row = 0; row < rows; ++row) {
          data_[size_t(rank)][size_t(gather)].push_back(value(gather, rank, row));
        }
      }
    }
  }

 protected:
  void run_rank(int rank, int channel) const override;

 private:
  int tokens_of(int gather) const { return digit(tokens_, num_gathers_, gather); }
  uint32_t value(int gather, int rank, int row) const {
    return 0x01010101u * uint32_t(1 + gather * 16 + row * 4 + rank);
  }
  void check(int rank, int gather, const uint32_t* got) const {
    for (int row = 0; row < tokens_of(gather); ++row) {
      for (int source = 0; source < shape_.num_ranks; ++source, ++got) {
        const uint32_t expected = value(gather, source, row);
        if (*got != expected) {
          explorer::fail("data", "rank %d: gather %d row %d of rank %d is 0x%x, not 0x%x", rank, gather, row,
                         source, *got, expected);
        }
      }
    }
  }
  uint64_t slots_bytes() const {
    return uint64_t((shape_.num_ranks - 1) * (max_tokens_ + other_rows_) * kStagedBytes);
  }
  // What attention makes of a view: a number that says which one it was.
  float partial(int gather, int rank, int row, int head) const {
    return float(1 + gather * 32 + row * 8 + rank * 128 + head * 2);
  }
  QueryGatherParams params(int rank, int gather, int step) const;
  Status reduce(int rank, int gather, const Launch& launch) const;
  void check_merged(int rank, int gather) const;

  const int64_t tokens_;
  const int capacity_, other_rows_;
  bool reduces_ = false;
  int num_gathers_ = 0, max_tokens_ = 0;
  std::vector<std::vector<std::vector<uint32_t>>> data_;  // constants: [rank][gather]
  uint32_t* out_ = nullptr;
  float* merged_ = nullptr;
  std::vector<float> lses_;  // all equal: the mean is what comes out
};

QueryGatherParams Query::params(int rank, int gather, int step) const {
  QueryGatherParams p = {};
  p.symm = symm(rank);
  p.buffers = p.publish_to = buffers(rank);
  p.control = shape_.control();
  p.wait = policy(rank);
  p.head_bytes = kHeadBytes;
  p.num_local_heads = 1;
  p.max_round_rows = capacity_;
  if (step == kRelease) {
    p.releases = true;
    return p;
  }
  // In two parts, as a query is.
  const auto* data = reinterpret_cast<const char*>(data_[size_t(rank)][size_t(gather)].data());
  p.parts[0] = {data, kHeadBytes, kHeadBytes, 2, 0};
  p.parts[1] = {data + 2, kHeadBytes, kHeadBytes, 2, 2};
  p.num_parts = 2;
  p.num_tokens = tokens_of(gather);
  p.out_head_stride = kHeadBytes;
  p.out_token_stride = shape_.num_ranks * kHeadBytes;
  if (step == kOut) p.out = out_ + rank * std::max(max_tokens_, 1) * shape_.num_ranks;
  return p;
}

Status Query::reduce(int rank, int gather, const Launch& launch) const {
  const int num_tokens = tokens_of(gather) + other_rows_, num_heads = shape_.num_ranks;
  float partials[64];
  for (int row = 0; row < num_tokens; ++row) {
    for (int head = 0; head < num_heads; ++head) {
      partials[row * num_heads + head] = partial(gather, rank, row, head);
    }
  }
  A2aLseReduceParams p = {};
  p.symm = symm(rank);
  p.control = shape_.control();
  p.wait = policy(rank);
  p.stream_idx = kReduceStream;
  p.query_stream_idx = kQueryStream;
  p.partial_out = partials;
  p.partial_lse = lses_.data();
  p.out = merged_ + rank * std::max(max_tokens_ + other_rows_, 1);
  p.partial_out_token_stride = p.partial_lse_token_stride = num_heads;
  p.partial_out_head_stride = p.partial_lse_head_stride = 1;
  p.out_token_stride = p.out_head_stride = 1;
  p.num_tokens = num_tokens;
  p.lse_base = LseBase::k2;
  p.num_nonfinite_lse = &state(rank).num_nonfinite;
  p.num_local_heads = p.head_dim = 1;
  p.max_round_rows = 8;
  p.staging = {shape_.control_bytes(), kStagedBytes, max_tokens_ + other_rows_};
  p.unpacked = p.staging;
  p.lse_in_row = 4;
  return core::a2a_lse_reduce().run(p, launch);
}

void Query::check_merged(int rank, int gather) const {
  float* merged = merged_ + rank * std::max(max_tokens_ + other_rows_, 1);
  for (int row = 0; row < tokens_of(gather); ++row) {
    float expected = 0;
    for (int r = 0; r < shape_.num_ranks; ++r)
      expected += partial(gather, r, row, rank) / float(shape_.num_ranks);
    if (!(std::fabs(merged[row] - expected) < 1e-3f)) {
      explorer::fail("data", "rank %d: reduce %d row %d is %g, not %g", rank, gather, row,
                     double(merged[row]), double(expected));
    }
    merged[row] = 0;
  }
}

void Query::run_rank(int rank, int channel) const {
  int gather = -1;
  bool is_open = false;
  for (int step : script_) {
    const bool is_gather = step == kView || step == kOut;
    const auto read_view = [&] {
      if (!is_open) return;
      explorer::note("rank %d reads its view", rank);
      check(rank, gather, words_at(rank, 0));
    };
    const auto run = [&](const Launch& launch) {
      if (step == kReduce) return reduce(rank, gather, launch);
      return core::query_gather().run(params(rank, gather + (is_gather ? 1 : 0), step), launch);
    };
    const auto finish = [&](Status status) {
      if (status != Status::kOk) return check_fault(rank, is_gather ? "a gather" : "a release or reduce");
      if (step == kReduce) return check_merged(rank, gather);
      if (step == kView) check(rank, gather + 1, words_at(rank, 0));
      if (step != kOut) return;
      uint32_t* out = out_ + rank * std::max(max_tokens_, 1) * shape_.num_ranks;
      check(rank, gather + 1, out);
      for (int i = 0; i < max_tokens_ * shape_.num_ranks; ++i) out[i] = 0;
    };
    if (!call(state(rank), channel, read_view, run, finish)) return;
    gather += is_gather;
    is_open = step == kView;
  }
  check_ended_well(rank, channel);
}

std::unique_ptr<explorer::Program> make_query(const explorer::Arguments& given) {
  return std::make_unique<Query>(given);
}

}  // namespace scenario
