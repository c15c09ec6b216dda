// query_gather: each rank gathers and reads what it got, as attention does, until it releases the view.
//
//   tokens    T of each gather, a digit for each; capacity: rows of one round
//   shared    1: one buffer for all ranks, 0: one for each
//   script    of all ranks: 1 gathers a view, 2 releases it, 3 gathers to `out`. The view is read before the
//   next
//             step, and once more when that is no release: then it must still be there
//   expect    a FaultKind (core/types.h) that ends every run, on every rank
#include "gathers.h"
#include "ops/query_gather.h"
#include "scenarios.h"

namespace dcp::DCP_NS {
QueryGatherFns query_gather();
}

namespace scenario {

namespace {

enum Step { kView = 1, kRelease, kOut };
constexpr int kHeadBytes = 4;

}  // namespace

class Query : public Gathers {
 public:
  explicit Query(const explorer::Arguments& given)
      : Gathers(given, 1), tokens_(given.get("tokens", 1)), capacity_(int(given.get("capacity", 8))) {
    for (int step : script_) num_gathers_ += step != kRelease;
    for (int gather = 0; gather < num_gathers_; ++gather)
      max_tokens_ = std::max(max_tokens_, tokens_of(gather));
  }

  void set_up() override {
    make_regions(0, [](size_t) { return std::string(); });
    const auto name = [this](size_t at) {
      const size_t head = at / kHeadBytes, ranks = size_t(shape_.num_ranks);
      return "query[row " + std::to_string(head / ranks) + "][from " + std::to_string(head % ranks) + "]+" +
             std::to_string(at % kHeadBytes);
    };
    const int rows = std::max(max_tokens_, 1);
    make_buffers(size_t(std::min(rows, capacity_) * shape_.num_ranks * kHeadBytes), name);
    out_ = explorer::allocate_array<uint32_t>(size_t(rows * shape_.num_ranks * shape_.num_ranks), "out");
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
  QueryGatherParams params(int rank, int gather, int step) const;

  const int64_t tokens_;
  const int capacity_;
  int num_gathers_ = 0, max_tokens_ = 0;
  std::vector<std::vector<std::vector<uint32_t>>> data_;  // constants: [rank][gather]
  uint32_t* out_ = nullptr;
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

void Query::run_rank(int rank, int channel) const {
  int gather = -1;
  bool is_open = false;
  for (int step : script_) {
    if (step != kRelease) ++gather;
    const auto read_view = [&] {
      if (is_open) check(rank, step == kRelease ? gather : gather - 1, words_at(rank, 0));
    };
    const auto run = [&](const Launch& launch) {
      return core::query_gather().run(params(rank, gather, step), launch);
    };
    const auto finish = [&](Status status) {
      if (status != Status::kOk) return check_fault(rank, step == kRelease ? "a release" : "a gather");
      if (step == kView) check(rank, gather, words_at(rank, 0));
      if (step != kOut) return;
      uint32_t* out = out_ + rank * std::max(max_tokens_, 1) * shape_.num_ranks;
      check(rank, gather, out);
      for (int i = 0; i < max_tokens_ * shape_.num_ranks; ++i) out[i] = 0;
    };
    if (!call(state(rank), channel, read_view, run, finish)) return;
    is_open = step == kView;
  }
  check_ended_well(rank, channel);
}

std::unique_ptr<explorer::Program> make_query(const explorer::Arguments& given) {
  return std::make_unique<Query>(given);
}

}  // namespace scenario
