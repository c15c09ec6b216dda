#include "steps.h"

#include <functional>
#include <stdexcept>

#include "device.h"

namespace dcp::DCP_NS {

A2aLseReduceFns a2a_lse_reduce();
QueryGatherFns query_gather();
KvGatherFns kv_gather();
#if defined(DCP_TARGET_CUDA)
Status a2a_ranks(const A2aLseReduceParams*, const A2aLseReduceParams&, int, const Launch&);
Status query_ranks(const QueryGatherParams*, const QueryGatherParams&, int, const Launch&);
Status kv_start_ranks(const KvGatherParams*, const KvGatherParams&, int, const Launch&);
Status kv_wait_ranks(const KvGatherParams*, const KvGatherParams&, int, const Launch&);
#define CARD_RANKS(name) &dcp::DCP_NS::name
#else
#define CARD_RANKS(name) nullptr
#endif

}  // namespace dcp::DCP_NS

namespace one_card {

const bool kHasDevice = kOnDevice;

dcp::Status Step::run_one_grid(Stream) { throw std::runtime_error("no kernel with all ranks in one grid"); }

namespace {

namespace ops = dcp::DCP_NS;

// -- ops

template <class Params>
using RunFn = dcp::Status (*)(const Params& params, const dcp::Launch& launch);
template <class Params>
using RanksFn = dcp::Status (*)(const Params* ranks, const Params& like, int num_ranks,
                                const dcp::Launch& launch);

template <class Params>
class OpStep : public Step {
 public:
  OpStep(std::vector<Params> ranks, RunFn<Params> run, RanksFn<Params> run_ranks)
      : ranks_(std::move(ranks)), run_(run), run_ranks_(run_ranks) {
    if (ranks_.empty()) throw std::invalid_argument("a step needs the parameters of its ranks");
  }
  ~OpStep() override { release_memory(on_device_); }
  int num_ranks() const override { return int(ranks_.size()); }
  dcp::Status run(int rank, Stream stream) override { return run_(ranks_.at(size_t(rank)), launch(stream)); }
  dcp::Status run_one_grid(Stream stream) override {
    if (run_ranks_ == nullptr) return Step::run_one_grid(stream);
    if (on_device_ == nullptr) {
      on_device_ = static_cast<Params*>(copy_to_device(ranks_.data(), ranks_.size() * sizeof(Params)));
    }
    return run_ranks_(on_device_, ranks_[0], num_ranks(), launch(stream));
  }

 private:
  dcp::Launch launch(Stream stream) const {
    dcp::Launch launch = {};
    launch.first_channel = 0;
    launch.end_channel = ranks_[0].control.num_channels;
    launch.stream = reinterpret_cast<void*>(stream);
    return launch;
  }

  const std::vector<Params> ranks_;
  const RunFn<Params> run_;
  const RanksFn<Params> run_ranks_;
  Params* on_device_ = nullptr;
};

// -- payload that tells

// Whole numbers below 2^16: the mean over 2, 4 or 8 ranks is exact in fp32.
CARD_FN inline float pattern(uint64_t epoch, int rank, int64_t element) {
  uint32_t x =
      uint32_t(epoch) * 0x9e3779b1u ^ uint32_t(rank + 1) * 0x85ebca6bu ^ uint32_t(element) * 0xc2b2ae35u;
  x = (x ^ (x >> 15)) * 0x2c1b3c6du;
  x = (x ^ (x >> 12)) * 0x297a2d39u;
  return float((x ^ (x >> 15)) >> 16);
}
// The same on all ranks: equal weights. In base 2 the merged LSE is this and log2 of the ranks.
CARD_FN inline float pattern_lse(uint64_t epoch, int64_t row) { return float((epoch + uint64_t(row)) % 13); }

// 16 bytes of payload.
struct Fill {
  Pattern p;
  CARD_FN void operator()(int64_t i) const {
    const uint64_t epoch = *p.epoch + 1;
    for (int64_t k = 4 * i; k < 4 * i + 4; ++k) p.partial_out[k] = pattern(epoch, p.rank, k);
    const int64_t row = 4 * i / p.head_dim;
    if (4 * i % p.head_dim == 0) p.partial_lse[row] = pattern_lse(epoch, row);
  }
};

// 16 bytes of the result.
struct Check {
  Pattern p;
  CARD_FN void operator()(int64_t i) const {
    const uint64_t epoch = *p.epoch;
    const int num_local_heads = p.num_heads / p.num_ranks;
    const int64_t local_row = 4 * i / p.head_dim, token = local_row / num_local_heads;
    const int64_t row = token * p.num_heads + p.rank * num_local_heads + local_row % num_local_heads;
    bool is_right = true;
    for (int64_t k = 4 * i; k < 4 * i + 4; ++k) {
      const int64_t element = row * p.head_dim + k % p.head_dim;
      float sum = 0.0f;
      for (int source = 0; source < p.num_ranks; ++source) sum += pattern(epoch, source, element);
      is_right = is_right && p.out[k] == sum / float(p.num_ranks);
    }
    if (4 * i % p.head_dim == 0) {
      float log2_ranks = 0.0f;
      for (int n = p.num_ranks; n > 1; n /= 2) log2_ranks += 1.0f;
      is_right = is_right && p.out_lse[local_row] == pattern_lse(epoch, row) + log2_ranks;
    }
    if (!is_right && count_one(&p.errors[0]) == 0) {
      p.errors[1] = epoch;
      p.errors[2] = uint64_t(i);
    }
  }
};

template <class F, bool kOfInput>
class PatternStep : public Step {
 public:
  explicit PatternStep(std::vector<Pattern> ranks) : ranks_(std::move(ranks)) {}
  int num_ranks() const override { return int(ranks_.size()); }
  dcp::Status run(int rank, Stream stream) override {
    const Pattern& p = ranks_.at(size_t(rank));
    const int64_t num_heads = kOfInput ? p.num_heads : p.num_heads / p.num_ranks;
    for_each(stream, p.num_tokens * num_heads * p.head_dim / 4, F{p});
    return dcp::Status::kOk;
  }

 private:
  const std::vector<Pattern> ranks_;
};

// -- bytes

class CopyStep : public Step {
 public:
  explicit CopyStep(std::vector<Bytes> ranks) : ranks_(std::move(ranks)) {}
  int num_ranks() const override { return int(ranks_.size()); }
  dcp::Status run(int rank, Stream stream) override {
    const Bytes& bytes = ranks_.at(size_t(rank));
    if (bytes.num_bytes > 0) copy_bytes(stream, bytes.to, bytes.from, bytes.num_bytes);
    return dcp::Status::kOk;
  }

 private:
  const std::vector<Bytes> ranks_;
};

struct CountDifferent {
  const uint16_t *a, *b;
  uint64_t* errors;
  CARD_FN void operator()(int64_t i) const {
    if (a[i] != b[i] && count_one(&errors[0]) == 0) errors[2] = uint64_t(i);
  }
};

class CompareStep : public Step {
 public:
  CompareStep(std::vector<Bytes> ranks, std::vector<uint64_t> errors)
      : ranks_(std::move(ranks)), errors_(std::move(errors)) {}
  int num_ranks() const override { return int(ranks_.size()); }
  dcp::Status run(int rank, Stream stream) override {
    const Bytes& bytes = ranks_.at(size_t(rank));
    const CountDifferent different = {reinterpret_cast<const uint16_t*>(bytes.to),
                                      reinterpret_cast<const uint16_t*>(bytes.from),
                                      reinterpret_cast<uint64_t*>(errors_.at(size_t(rank)))};
    if (bytes.num_bytes > 0) for_each(stream, bytes.num_bytes / 2, different);
    return dcp::Status::kOk;
  }

 private:
  const std::vector<Bytes> ranks_;
  const std::vector<uint64_t> errors_;
};

struct Nothing {
  CARD_FN void operator()(int64_t) const {}
};

class EmptyStep : public Step {
 public:
  explicit EmptyStep(int num_ranks) : num_ranks_(num_ranks) {}
  int num_ranks() const override { return num_ranks_; }
  dcp::Status run(int, Stream stream) override {
    for_each(stream, 1, Nothing{});
    return dcp::Status::kOk;
  }

 private:
  const int num_ranks_;
};

template <class Params>
StepPtr op_step(std::vector<Params> ranks, RunFn<Params> run, RanksFn<Params> run_ranks) {
  return std::make_shared<OpStep<Params>>(std::move(ranks), run, run_ranks);
}

}  // namespace

StepPtr a2a_step(std::vector<dcp::A2aLseReduceParams> ranks) {
  return op_step<dcp::A2aLseReduceParams>(std::move(ranks), ops::a2a_lse_reduce().run, CARD_RANKS(a2a_ranks));
}
StepPtr merge_step(std::vector<dcp::A2aLseReduceParams> ranks) {
  return op_step<dcp::A2aLseReduceParams>(std::move(ranks), ops::a2a_lse_reduce().merge, nullptr);
}
StepPtr query_step(std::vector<dcp::QueryGatherParams> ranks) {
  return op_step<dcp::QueryGatherParams>(std::move(ranks), ops::query_gather().run, CARD_RANKS(query_ranks));
}
StepPtr kv_start_step(std::vector<dcp::KvGatherParams> ranks) {
  return op_step<dcp::KvGatherParams>(std::move(ranks), ops::kv_gather().start, CARD_RANKS(kv_start_ranks));
}
StepPtr kv_wait_step(std::vector<dcp::KvGatherParams> ranks) {
  return op_step<dcp::KvGatherParams>(std::move(ranks), ops::kv_gather().wait, CARD_RANKS(kv_wait_ranks));
}
StepPtr fill_step(std::vector<Pattern> ranks) {
  return std::make_shared<PatternStep<Fill, true>>(std::move(ranks));
}
StepPtr check_step(std::vector<Pattern> ranks) {
  return std::make_shared<PatternStep<Check, false>>(std::move(ranks));
}
StepPtr copy_step(std::vector<Bytes> ranks) { return std::make_shared<CopyStep>(std::move(ranks)); }
StepPtr compare_step(std::vector<Bytes> ranks, std::vector<uint64_t> errors) {
  return std::make_shared<CompareStep>(std::move(ranks), std::move(errors));
}
StepPtr empty_step(int num_ranks) { return std::make_shared<EmptyStep>(num_ranks); }

std::vector<int> repeat(const Steps& steps, const Streams& streams, int num_rounds) {
  std::vector<int> statuses(streams.size(), 0);
  on_all_ranks(int(streams.size()), num_rounds, [&](int rank) {
    for (const StepPtr& step : steps) {
      const int status = int(step->run(rank, streams[size_t(rank)]));
      if (status != 0 && statuses[size_t(rank)] == 0) statuses[size_t(rank)] = status;
    }
  });
  return statuses;
}

}  // namespace one_card
