// kv_gather: each rank starts chunks and waits for them, and reads one while the next one is on its way.
//
//   rows      of every chunk; row i of chunk n belongs to rank (i + n) % ranks
//   shared    1: one pair of buffers for all ranks, 0: one for each
//   script    of all ranks: 1 starts the next chunk, 2 waits for it, 3 reads the one that was waited for
//   last,
//             4 gathers a whole one, 5 waits and dequantises. script1: of rank 1, where it differs
//   expect    a FaultKind (core/types.h) that ends every run, on every rank
#include "gathers.h"
#include "core/digest.h"
#include "core/fp8.h"
#include "ops/kv_gather.h"
#include "scenarios.h"

namespace dcp::DCP_NS {
KvGatherFns kv_gather();
}

namespace scenario {

namespace {

enum Step { kStart = 1, kWait, kRead, kWhole, kDequantise };
constexpr int kRowBytes = 4, kMaxRows = 8;

}  // namespace

class Kv : public Gathers {
 public:
  explicit Kv(const explorer::Arguments& given)
      : Gathers(given, 1),
        num_rows_(int(given.get("rows", 2))),
        same_buffer_(given.get("same_buffer", 0) != 0) {
    for (int step : script_) {
      num_chunks_ += step == kStart || step == kWhole;
      dequantises_ |= step == kDequantise;
    }
    const int64_t other = given.get("script1", 0);
    other_ = script_;
    if (other != 0) other_.clear();
    for (int i = 0; other != 0 && i < num_digits(other); ++i) {
      other_.push_back(digit(other, num_digits(other), i));
    }
  }

  void set_up() override {
    make_regions(0, [](size_t) { return std::string(); });
    make_buffers(2 * buffer_bytes(), [this](size_t at) {
      return "chunk[buffer " + std::to_string(at / buffer_bytes()) + "][row " +
             std::to_string(at % buffer_bytes() / kRowBytes) + "]+" + std::to_string(at % kRowBytes);
    });
    if (dequantises_) {
      out_ = explorer::allocate_array<BFloat16>(size_t(shape_.num_ranks * num_rows_ * kRowBytes), "out");
    }
    caches_.assign(size_t(shape_.num_ranks), std::vector<std::vector<uint32_t>>(size_t(num_chunks_)));
    sources_.assign(size_t(shape_.num_ranks), std::vector<std::vector<int64_t>>(size_t(num_chunks_)));
    finals_ = sources_;
    for (int chunk = 0; chunk < num_chunks_; ++chunk) {
      for (int row = 0; row < num_rows_; ++row) {
        const size_t owner = size_t((row + chunk) % shape_.num_ranks);
        sources_[owner][size_t(chunk)].push_back(int64_t(caches_[owner][size_t(chunk)].size()));
        finals_[owner][size_t(chunk)].push_back(row);
        caches_[owner][size_t(chunk)].push_back(value(chunk, row));
      }
    }
  }

 protected:
  void run_rank(int rank, int channel) const override;

 private:
  uint64_t buffer_bytes() const { return uint64_t(num_rows_) * kRowBytes; }
  uint32_t value(int chunk, int row) const { return 0x01010101u * uint32_t(1 + chunk * kMaxRows + row); }
  int buffer_of(int chunk) const { return same_buffer_ ? 0 : chunk % 2; }
  KvGatherParams params(int rank, int chunk) const;
  void read(int rank, int chunk) const {
    explorer::note("rank %d reads chunk %d", rank, chunk);
    const uint32_t* got = words_at(rank, uint64_t(buffer_of(chunk)) * buffer_bytes());
    for (int row = 0; row < num_rows_; ++row) {
      if (got[row] != value(chunk, row)) {
        explorer::fail("data", "rank %d: chunk %d row %d is 0x%x, not 0x%x", rank, chunk, row, got[row],
                       value(chunk, row));
      }
    }
  }
  void read_out(int rank, int chunk) const {
    BFloat16* out = out_ + rank * num_rows_ * kRowBytes;
    const core::E4M3 format(DType::kFloat8E4M3);
    for (int i = 0; i < num_rows_ * kRowBytes; ++i) {
      const Float8E4M3 code = {uint8_t(value(chunk, i / kRowBytes))};
      const BFloat16 expected = core::arch::from_float<BFloat16>(format.value(code));
      if (out[i].bits != expected.bits) {
        explorer::fail("data", "rank %d: chunk %d row %d is 0x%x in bf16, not 0x%x", rank, chunk,
                       i / kRowBytes, out[i].bits, expected.bits);
      }
      out[i].bits = 0;
    }
  }

  const int num_rows_;
  const bool same_buffer_;
  int num_chunks_ = 0;
  bool dequantises_ = false;
  std::vector<int> other_;
  std::vector<std::vector<std::vector<uint32_t>>> caches_;  // constants: [rank][chunk]
  std::vector<std::vector<std::vector<int64_t>>> sources_, finals_;
  BFloat16* out_ = nullptr;
};

KvGatherParams Kv::params(int rank, int chunk) const {
  const size_t r = size_t(rank), n = size_t(chunk);
  KvGatherParams p = {};
  p.symm = symm(rank);
  p.buffers = buffers(rank);
  p.control = shape_.control();
  p.wait = policy(rank);
  p.cache = caches_[r][n].data();
  p.block_size = 1;
  p.block_stride = p.row_stride = p.row_bytes = kRowBytes;
  p.source_rows = sources_[r][n].data();
  p.final_rows = finals_[r][n].data();
  p.num_source_rows = int64_t(sources_[r][n].size());
  p.num_rows = num_rows_;
  p.scale_value = 1.0f;
  p.dtype = dequantises_ ? DType::kFloat8E4M3 : DType::kFloat32;
  p.buffer_idx = buffer_of(chunk);
  p.buffer_bytes = buffer_bytes();
  p.call = core::chunk_descriptor(0, p.dtype, p.buffer_idx, chunk, 1);
  return p;
}

void Kv::run_rank(int rank, int channel) const {
  int num_started = 0, num_waited = 0;
  for (int step : rank == 1 ? other_ : script_) {
    if (step == kRead) {
      if (channel == 0) read(rank, num_waited - 1);
      continue;
    }
    const bool starts = step == kStart || step == kWhole;
    const int chunk = starts ? num_started++ : num_waited;
    if (step != kStart) ++num_waited;
    const auto run = [&](const Launch& launch) {
      KvGatherParams p = params(rank, std::min(chunk, num_chunks_ - 1));
      if (step == kDequantise) p.out = out_ + rank * num_rows_ * kRowBytes;
      p.out_stride = kRowBytes * int64_t(sizeof(BFloat16));
      if (step == kStart) return core::kv_gather().start(p, launch);
      if (step == kWhole) return core::kv_gather().whole(p, launch);
      return core::kv_gather().wait(p, launch);
    };
    const auto finish = [&](Status status) {
      if (status != Status::kOk) return check_fault(rank, starts ? "a start" : "a wait");
      if (step == kDequantise) read_out(rank, chunk);
    };
    if (!call(state(rank), channel, [] {}, run, finish)) return;
  }
  check_ended_well(rank, channel);
}

std::unique_ptr<explorer::Program> make_kv(const explorer::Arguments& given) {
  return std::make_unique<Kv>(given);
}

}  // namespace scenario
