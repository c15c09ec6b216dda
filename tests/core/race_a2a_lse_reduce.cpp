// Ranks are threads over one mapping, the kernel source is the shipped one: what ThreadSanitizer sees here is
// the protocol of csrc/ops/a2a_lse_reduce.cc. Every rank checks what it got; exit code 1 = wrong numbers, 66
// = a race.
//
//   race_a2a_lse_reduce RANKS CHANNELS CALLS SEED WIRE MUTATION
//
// WIRE as in core/types.h (0 push, 1 pull, 2 .. 4 packets), MUTATION as in arch/cpu.h and cta_threads.h (0
// none).
//
// Channels run in threads of their own. With WIRE = 1 a rank writes its input now into a buffer of the
// region, now elsewhere.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "host/call.h"
#include "host/region.h"
#include "ops/a2a_lse_reduce.h"
#include "threads.h"

namespace dcp::DCP_NS {
A2aLseReduceFns a2a_lse_reduce();
}

int dcp_mutation = 0;

namespace {

using namespace dcp;

constexpr int kLocalHeads = 3, kHeadDim = 20, kMaxTokens = 4;
// Large enough for a plain row and for its packets.
constexpr uint64_t kRowBytes = 1024, kLseInRow = 240;
constexpr int kBuffers = 2;

struct Shape {
  int num_ranks, num_channels, num_calls;
  unsigned seed;
  Wire wire;

  uint64_t slot_rows() const { return uint64_t(num_ranks - 1) * kMaxTokens; }
  ControlLayout control() const {
    const uint64_t stream_bytes =
        sizeof(StreamState) + num_channels * (sizeof(ChannelState) + sizeof(Doorbell));
    const uint64_t flags_bytes = uint64_t(2) * num_channels * num_ranks * sizeof(Flag);
    return {0, 64, stream_bytes, 64 + stream_bytes, flags_bytes, 1, num_channels};
  }
  uint64_t staging_offset() const { return control().flags_offset + control().flags_bytes; }
  uint64_t unpacked_offset() const { return staging_offset() + 2 * slot_rows() * kRowBytes; }
  uint64_t buffer_offset() const { return unpacked_offset() + slot_rows() * kRowBytes; }
  uint64_t buffer_bytes() const { return uint64_t(kMaxTokens) * kLocalHeads * num_ranks * kHeadDim * 4; }
  uint64_t num_bytes() const { return buffer_offset() + kBuffers * buffer_bytes() + 64; }
};

// The number of tokens of a call: the same on all ranks, and often another than in the call before.
int tokens_of(const Shape& shape, int call) {
  std::mt19937 random(shape.seed * 7919 + call);
  return int(random() % (2 * kMaxTokens + 2));  // 0, up to the capacity, above it (rounds)
}

float value_of(int call, int rank, int token, int head) {
  return float((call * 31 + rank * 17 + token * 5 + head) % 97);
}
float lse_of(int call, int rank, int token, int head) {
  return float((call + 3 * rank + token + 2 * head) % 7) * 0.5f;
}

// Which buffer this rank writes next: strictly in turn, so that it also waits, unlike bindings/handle.h.
struct Turn {
  int next = 0;
};

// All channels of one call, each in a thread when there are several.
Status run_channels(const A2aLseReduceParams& p, Threads& channels) {
  if (p.control.num_channels == 1) return DCP_NS::a2a_lse_reduce().run(p, {0, 1, nullptr});
  std::vector<Status> statuses(p.control.num_channels);
  channels.run([&](int c) { statuses[c] = DCP_NS::a2a_lse_reduce().run(p, {c, c + 1, nullptr}); });
  for (Status status : statuses) {
    if (status != Status::kOk) return status;
  }
  return Status::kOk;
}

bool run_call(const Shape& shape, const uint64_t* bases, int rank, int call, Turn& turn, bool in_buffer,
              Threads& channels) {
  const int num_heads = kLocalHeads * shape.num_ranks, num_tokens = tokens_of(shape, call);
  std::vector<float> elsewhere(size_t(num_tokens) * num_heads * kHeadDim),
      lse(size_t(num_tokens) * num_heads);
  std::vector<float> out(size_t(num_tokens) * kLocalHeads * kHeadDim, -1.0f);
  A2aLseReduceParams p = {};
  p.symm = {bases, rank, shape.num_ranks};
  p.control = shape.control();
  p.wait = {60000000000, 60000000000, 20, 20, nullptr, nullptr};
  float* partial = elsewhere.data();
  if (shape.wire == Wire::kPull) {
    in_buffer = in_buffer && num_tokens <= kMaxTokens;
    p.buffer_idx = turn.next;
    turn.next = 1 - turn.next;
    p.copies_to_buffer = !in_buffer;
    p.buffer_offset = shape.buffer_offset();
    p.buffer_bytes = shape.buffer_bytes();
    if (in_buffer) {
      if (DCP_NS::acquire_buffer(p.symm, p.control, p.wait, 0, p.buffer_idx) != Status::kOk) return false;
      partial = reinterpret_cast<float*>(bases[rank] + p.buffer_offset + p.buffer_idx * p.buffer_bytes);
    }
  }
  for (int t = 0; t < num_tokens; ++t) {
    for (int h = 0; h < num_heads; ++h) {
      const size_t row = size_t(t) * num_heads + h;
      lse[row] = lse_of(call, rank, t, h);
      std::fill_n(&partial[row * kHeadDim], kHeadDim, value_of(call, rank, t, h));
    }
  }
  uint64_t num_nonfinite = 0;
  p.partial_out = partial;
  p.partial_lse = lse.data();
  p.out = out.data();
  p.partial_out_token_stride = num_heads * kHeadDim;
  p.partial_out_head_stride = kHeadDim;
  p.partial_lse_token_stride = num_heads;
  p.partial_lse_head_stride = 1;
  p.out_token_stride = kLocalHeads * kHeadDim;
  p.out_head_stride = kHeadDim;
  p.num_tokens = num_tokens;
  p.lse_base = LseBase::k2;
  p.num_nonfinite_lse = &num_nonfinite;
  p.wire = shape.wire;
  p.num_local_heads = kLocalHeads;
  p.head_dim = kHeadDim;
  p.max_round_rows = kMaxTokens;
  p.staging = {shape.staging_offset(), kRowBytes, kMaxTokens};
  p.unpacked = {shape.unpacked_offset(), kRowBytes, kMaxTokens};
  p.lse_in_row = shape.wire == Wire::kPull ? 0 : kLseInRow;
  if (run_channels(p, channels) != Status::kOk) {
    std::fprintf(stderr, "rank %d call %d: faulted\n", rank, call);
    return false;
  }
  for (int t = 0; t < num_tokens; ++t) {
    for (int h = 0; h < kLocalHeads; ++h) {
      const int head = rank * kLocalHeads + h;
      double sum = 0, expected = 0;
      for (int r = 0; r < shape.num_ranks; ++r) sum += std::exp2(lse_of(call, r, t, head));
      for (int r = 0; r < shape.num_ranks; ++r) {
        expected += std::exp2(lse_of(call, r, t, head)) / sum * value_of(call, r, t, head);
      }
      for (int d = 0; d < kHeadDim; ++d) {
        const float got = out[(size_t(t) * kLocalHeads + h) * kHeadDim + d];
        if (!(std::fabs(got - expected) <= 1e-4)) {
          std::fprintf(stderr, "rank %d call %d token %d head %d: got %g, expected %g\n", rank, call, t, head,
                       got, expected);
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  const Shape shape = {std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]),
                       unsigned(std::atoi(argv[4])), dcp::Wire(std::atoi(argv[5]))};
  dcp_mutation = std::atoi(argv[6]);
  std::vector<std::vector<char>> regions(shape.num_ranks);
  std::vector<uint64_t> bases;
  for (auto& region : regions) {
    region.resize(shape.num_bytes() + 64);
    bases.push_back((reinterpret_cast<uint64_t>(region.data()) + 63) & ~uint64_t(63));
    // The wrap of the epoch's low half comes soon: it is part of what is raced.
    dcp::DCP_NS::init_region(bases.back(), shape.control(), shape.num_ranks, 0xfffffff8u);
  }
  std::atomic<bool> good{true};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      std::mt19937 random(shape.seed + rank);
      Turn turn;
      Threads channels(shape.num_channels > 1 ? shape.num_channels : 0);
      for (int call = 0; call < shape.num_calls && good; ++call) {
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        if (!run_call(shape, bases.data(), rank, call, turn, random() % 3 != 0, channels)) good = false;
      }
    });
  }
  for (auto& thread : ranks) thread.join();
  return good ? 0 : 1;
}
