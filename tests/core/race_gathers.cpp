// Ranks are threads over one mapping, the kernel source is the shipped one: what ThreadSanitizer sees here is
// the protocol of csrc/ops/query_gather.cc and kv_gather.cc. Every rank checks what it got; exit code 1 =
// wrong bytes, 66 = a race.
//
//   race_gathers RANKS CHANNELS CALLS SEED SHARED MUTATION
//
// SHARED: 1 = the buffers lie once for all ranks, 0 = once for each. MUTATION as in arch/cpu.h and
// cta_threads.h (0 none), and kNoCredits.
//
// Channels run in threads of their own. Readers take their time now and then: peers are then ahead.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "host/call.h"
#include "host/region.h"
#include "ops/kv_gather.h"
#include "ops/query_gather.h"
#include "threads.h"

namespace dcp::DCP_NS {
QueryGatherFns query_gather();
KvGatherFns kv_gather();
}  // namespace dcp::DCP_NS

int dcp_mutation = 0;

namespace {

using namespace dcp;

// A start that waits for nobody: what the credits are for.
constexpr int kNoCredits = 100;

constexpr int kLocalHeads = 3, kMaxTokens = 4, kMaxChunkRows = 11;
constexpr int64_t kFirstPart = 24, kHeadBytes = 40, kRowBytes = 48;
enum Stream { kQueryStream, kKvStream, kNumStreams };

struct Shape {
  int num_ranks, num_channels, num_calls;
  unsigned seed;
  bool is_shared, has_credits;

  ControlLayout control() const {
    const uint64_t stream_bytes =
        sizeof(StreamState) + num_channels * (sizeof(ChannelState) + sizeof(Doorbell));
    const uint64_t flags_bytes = uint64_t(2) * num_channels * num_ranks * sizeof(Flag);
    const uint64_t flags_offset = 64 + kNumStreams * stream_bytes;
    return {0, 64, stream_bytes, flags_offset, flags_bytes, kNumStreams, num_channels};
  }
  uint64_t control_bytes() const { return control().flags_offset + kNumStreams * control().flags_bytes; }
  uint64_t query_bytes() const { return uint64_t(kMaxTokens) * num_ranks * kLocalHeads * kHeadBytes; }
  uint64_t kv_bytes() const { return kMaxChunkRows * kRowBytes; }
  uint64_t buffers_bytes() const { return query_bytes() + 2 * kv_bytes(); }
};

struct Memory {
  explicit Memory(uint64_t num_bytes) : bytes(num_bytes + 64) {}
  uint64_t base() { return (reinterpret_cast<uint64_t>(bytes.data()) + 63) & ~uint64_t(63); }
  std::vector<char> bytes;
};

uint8_t byte_of(int call, int rank, int row, int column) {
  return uint8_t(call * 29 + rank * 67 + row * 13 + column * 3 + 1);
}

class Rank {
 public:
  Rank(const Shape& shape, const uint64_t* bases, const uint64_t* buffers, int rank)
      : shape_(shape),
        symm_{bases, rank, shape.num_ranks},
        buffers_{buffers, rank, shape.num_ranks, shape.is_shared ? buffers[rank] : 0},
        random_(shape.seed + unsigned(rank)),
        channels_(shape.num_channels > 1 ? shape.num_channels : 0) {}

  bool run() {
    for (int call = 0; call < shape_.num_calls; ++call) {
      if (!query(call) || !chunks(call)) return false;
    }
    return true;
  }

 private:
  void dawdle() {
    if (random_() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
  }

  // All channels, each in a thread when there are several.
  bool in_channels(const std::function<Status(const Launch&)>& run) {
    const int num_channels = shape_.num_channels;
    if (num_channels == 1) return run({0, 1, nullptr}) == Status::kOk;
    std::atomic<bool> good{true};
    channels_.run([&](int c) {
      if (run({c, c + 1, nullptr}) != Status::kOk) good = false;
    });
    return good;
  }

  template <class Params>
  void place(Params& p, Stream stream) {
    p.stream_idx = stream;
    p.symm = symm_;
    p.buffers = buffers_;
    if constexpr (requires { p.publish_to; }) p.publish_to = buffers_;
    p.control = shape_.control();
    p.wait = {60000000000, 60000000000, 20, 20, nullptr, nullptr};
  }

  bool wrong(const char* what, int call, int row, int column) {
    std::fprintf(stderr, "rank %d call %d: wrong %s at row %d column %d\n", symm_.rank, call, what, row,
                 column);
    return false;
  }

  // A view and its release, or a copy in rounds; T and which one are the same on all ranks.
  bool query(int call) {
    std::mt19937 same(shape_.seed * 7919 + unsigned(call));
    const bool has_out = same() % 3 == 0;
    const int num_tokens = int(same() % (has_out ? 2 * kMaxTokens + 2 : kMaxTokens + 1));
    const int num_heads = kLocalHeads * shape_.num_ranks;
    std::vector<uint8_t> first(size_t(num_tokens) * kLocalHeads * kFirstPart);
    std::vector<uint8_t> second(size_t(num_tokens) * kLocalHeads * (kHeadBytes - kFirstPart));
    for (int row = 0; row < num_tokens * kLocalHeads; ++row) {
      for (int i = 0; i < kHeadBytes; ++i) {
        uint8_t* to = i < kFirstPart ? &first[size_t(row * kFirstPart + i)]
                                     : &second[size_t(row * (kHeadBytes - kFirstPart) + i - kFirstPart)];
        *to = byte_of(call, symm_.rank, row, i);
      }
    }
    std::vector<uint8_t> out(size_t(num_tokens) * num_heads * kHeadBytes + 1);
    QueryGatherParams p = {};
    place(p, kQueryStream);
    const int64_t second_bytes = kHeadBytes - kFirstPart;
    p.parts[0] = {first.data(), kLocalHeads * kFirstPart, kFirstPart, kFirstPart, 0};
    p.parts[1] = {second.data(), kLocalHeads * second_bytes, second_bytes, second_bytes, kFirstPart};
    p.num_parts = 2;
    p.num_tokens = num_tokens;
    p.head_bytes = kHeadBytes;
    p.out = has_out ? out.data() : nullptr;
    p.out_token_stride = num_heads * kHeadBytes;
    p.out_head_stride = kHeadBytes;
    p.num_local_heads = kLocalHeads;
    p.max_round_rows = kMaxTokens;
    const auto run = [&](const Launch& launch) { return DCP_NS::query_gather().run(p, launch); };
    if (!in_channels(run)) return false;
    dawdle();
    const uint8_t* got = has_out ? out.data() : reinterpret_cast<const uint8_t*>(buffers_.bases[symm_.rank]);
    for (int row = 0; row < num_tokens; ++row) {
      for (int head = 0; head < num_heads; ++head, got += kHeadBytes) {
        const int source = head / kLocalHeads, source_row = row * kLocalHeads + head % kLocalHeads;
        for (int i = 0; i < kHeadBytes; ++i) {
          if (got[i] != byte_of(call, source, source_row, i)) return wrong("query", call, row, i);
        }
      }
    }
    if (has_out) return true;
    p.releases = true;
    p.num_tokens = p.num_parts = 0;
    return in_channels(run);
  }

  // Three chunks, each started while the one before is in use. Ranks own different numbers of rows.
  bool chunks(int call) {
    constexpr int kNumChunks = 3;
    if (!start(call * kNumChunks)) return false;
    for (int i = 0; i < kNumChunks; ++i) {
      const int chunk = call * kNumChunks + i;
      KvGatherParams p = chunk_params(chunk);
      if (!in_channels([&](const Launch& launch) { return DCP_NS::kv_gather().wait(p, launch); }))
        return false;
      if (i + 1 < kNumChunks && !start(chunk + 1)) return false;
      dawdle();
      if (!shape_.has_credits) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 500));
      const auto* got = reinterpret_cast<const uint8_t*>(buffers_.bases[symm_.rank] + shape_.query_bytes() +
                                                         uint64_t(chunk % 2) * shape_.kv_bytes());
      for (int row = 0; row < rows_of(chunk); ++row, got += kRowBytes) {
        for (int k = 0; k < kRowBytes; ++k) {
          if (got[k] != byte_of(chunk, owner_of(chunk, row), row, k)) return wrong("chunk", call, row, k);
        }
      }
    }
    return true;
  }

  int rows_of(int chunk) const { return int((shape_.seed + unsigned(chunk) * 5) % (kMaxChunkRows + 1)); }
  int owner_of(int chunk, int row) const { return (row * row + chunk) % shape_.num_ranks; }

  KvGatherParams chunk_params(int chunk) {
    KvGatherParams p = {};
    place(p, kKvStream);
    p.block_size = 2;
    p.block_stride = 2 * kRowBytes;
    p.row_stride = p.row_bytes = kRowBytes;
    p.buffer_idx = chunk % 2;
    p.call = DCP_NS::chunk_descriptor(0, p.dtype, p.buffer_idx, chunk, 0);
    p.buffer_offset = shape_.query_bytes();
    p.buffer_bytes = shape_.kv_bytes();
    return p;
  }

  bool start(int chunk) {
    std::vector<uint8_t> cache((kMaxChunkRows + 1) * kRowBytes);
    std::vector<int64_t> sources, finals;
    for (int row = 0; row < rows_of(chunk); ++row) {
      if (owner_of(chunk, row) != symm_.rank) continue;
      const int64_t source = kMaxChunkRows - 1 - row;
      for (int k = 0; k < kRowBytes; ++k) {
        cache[size_t(source * kRowBytes + k)] = byte_of(chunk, symm_.rank, row, k);
      }
      sources.push_back(source);
      finals.push_back(row);
    }
    KvGatherParams p = chunk_params(chunk);
    p.cache = cache.data();
    p.source_rows = sources.data();
    p.final_rows = finals.data();
    p.num_source_rows = int64_t(sources.size());
    for (int c = 0; !shape_.has_credits && c < shape_.num_channels; ++c) {
      DCP_NS::channel_state(symm_, p.control, symm_.rank, kKvStream, c)->buffer_epochs[p.buffer_idx] = 0;
    }
    return in_channels([&](const Launch& launch) { return DCP_NS::kv_gather().start(p, launch); });
  }

  const Shape& shape_;
  const SymmView symm_, buffers_;
  std::mt19937 random_;
  Threads channels_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  const int mutation = std::atoi(argv[6]);
  const Shape shape = {std::atoi(argv[1]),           std::atoi(argv[2]),      std::atoi(argv[3]),
                       unsigned(std::atoi(argv[4])), std::atoi(argv[5]) != 0, mutation != kNoCredits};
  dcp_mutation = mutation == kNoCredits ? 0 : mutation;
  std::vector<Memory> regions, buffers;
  std::vector<uint64_t> bases, buffer_bases;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    regions.emplace_back(shape.control_bytes());
    if (rank == 0 || !shape.is_shared) buffers.emplace_back(shape.buffers_bytes());
  }
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    bases.push_back(regions[size_t(rank)].base());
    buffer_bases.push_back(buffers[shape.is_shared ? 0 : size_t(rank)].base());
    // The wrap of the epoch's low half comes soon: it is part of what is raced.
    DCP_NS::init_region(bases.back(), shape.control(), shape.num_ranks, 0xfffffff8u);
  }
  std::atomic<bool> good{true};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      if (!Rank(shape, bases.data(), buffer_bases.data(), rank).run()) {
        good = false;
        if (!shape.has_credits) std::_Exit(1);  // the others wait for this rank
      }
    });
  }
  for (auto& thread : ranks) thread.join();
  return good ? 0 : 1;
}
