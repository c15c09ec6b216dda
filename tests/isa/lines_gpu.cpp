// Rows of 128-byte packets as a warp of an NVIDIA GPU makes and reads them (core/packet.h, arch/cuda_line.h),
// run on the host by 32 threads. What a row looks like on the wire is said here a second time, byte by byte.
#include "core/packet.h"

#include <cstdio>
#include <set>
#include <string>
#include <thread>
#include <vector>

using namespace dcp;
using namespace dcp::gpu;

// Of each kind of failure the first.
std::set<std::string> failures;
void check(bool ok, const char* what, const char* shape, int at) {
  if (!ok && failures.insert(what).second) std::printf("%s: %s, %d\n", what, shape, at);
}

constexpr uint8_t kUntouched = 0xee;
constexpr uint32_t kEpoch = 0x12345678;

struct Shape {
  const char* name;
  int num_heads, head_dim, head_stride, first;  // in elements
  bool by_words;                                // the payload can be loaded 16 (or 8) bytes at a time
};

template <class T>
struct Case {
  Shape shape;
  std::vector<T> source;
  std::vector<float> lses;
  std::vector<uint8_t> plain, wire, unpacked;  // what is right; what was made of it
  std::vector<int> num_lse_calls;
  int payload_bytes, lse_in_row, num_bytes, num_lines;

  explicit Case(const Shape& of) : shape(of) {
    alignas(64) static uint8_t bytes[1 << 16];
    for (size_t i = 0; i < sizeof(bytes); ++i) bytes[i] = uint8_t(i * 167 + i / 256 * 13);
    source.resize(sizeof(bytes) / sizeof(T));
    memcpy(source.data(), bytes, sizeof(bytes));
    payload_bytes = shape.num_heads * shape.head_dim * int(sizeof(T));
    lse_in_row = (payload_bytes + 15) / 16 * 16;
    num_bytes = lse_in_row + 4 * shape.num_heads;
    num_lines = (num_bytes + 119) / 120;
    for (int h = 0; h < shape.num_heads; ++h) lses.push_back(1.5f * float(h) - 7.0f);
    plain.assign(num_bytes, 0);
    for (int h = 0; h < shape.num_heads; ++h) {
      memcpy(&plain[h * shape.head_dim * sizeof(T)], head(h), shape.head_dim * sizeof(T));
    }
    memcpy(&plain[lse_in_row], lses.data(), 4 * shape.num_heads);
    plain.resize(num_lines * 120);  // zeros behind
    wire.assign(num_lines * 128 + 16 * 128, kUntouched);
    unpacked.assign((num_bytes + 63) / 64 * 64 + 16 * 128, kUntouched);
    num_lse_calls.assign(shape.num_heads, 0);
  }
  const T* head(int h) const { return source.data() + shape.first + h * shape.head_stride; }

  void check_wire() {
    for (int k = 0; k < num_lines; ++k) {
      const uint8_t *line = &wire[k * 128], *payload = &plain[k * 120];
      const int rotated = k % 2 == 0 ? 0 : 8;  // in odd lines the first 8 bytes come last
      for (int i = 0; i < 120; ++i) {
        check(line[i] == payload[(i + rotated) % 120], "payload on the wire", shape.name, k * 128 + i);
      }
      for (int i = 0; i < 2; ++i) check(!memcmp(line + 120 + 4 * i, &kEpoch, 4), "flag", shape.name, k);
    }
    for (size_t i = num_lines * 128; i < wire.size(); ++i) {
      check(wire[i] == kUntouched, "stored behind the row", shape.name, int(i));
    }
    for (int h = 0; h < shape.num_heads; ++h) check(num_lse_calls[h] == 1, "LSE read once", shape.name, h);
  }
  void check_unpacked(bool is_there) {
    const int end = (num_bytes + 15) / 16 * 16;
    for (int i = 0; i < int(unpacked.size()); ++i) {
      if (i >= num_bytes && i < end) continue;  // a plain row ends on a line
      check(unpacked[i] == (is_there && i < num_bytes ? plain[i] : kUntouched), "unpacked", shape.name, i);
    }
  }
};

// Everything below is run by all 32 threads; what lane 0 alone does is fenced by barriers.
template <class F>
void alone(const F& f) {
  arch::warp_barrier.arrive_and_wait();
  if (arch::lane_of_thread == 0) f();
  arch::warp_barrier.arrive_and_wait();
}

template <class T>
void run(const Shape& shape, int num_groups) {
  using Row = PacketRow<T, 128>;
  static Case<T>* c;
  alone([&] {
    c = new Case<T>(shape);
    arch::num_loads_16 = arch::num_loads_8 = arch::num_line_stores = arch::num_stores_16 = 0;
  });
  const Row row = {shape.num_heads, shape.head_dim, c->lse_in_row};
  alone([&] { check(row.num_packets() == c->num_lines, "lines", shape.name, row.num_packets()); });
  for (int group = 0; group < num_groups; ++group) {
    const typename Row::Lanes lanes = {group, num_groups};
    int call = group;
    row.store(lanes, reinterpret_cast<char*>(c->wire.data()), call, kEpoch,
              Heads<T>{c->head(0), shape.head_stride}, [&](int h) {
                ++c->num_lse_calls[h];
                return c->lses[h];
              });
    alone([&] { check((call + row.num_calls() - group) % num_groups == 0, "turns", shape.name, call); });
  }
  alone([&] {
    c->check_wire();
    check(arch::num_line_stores == 8 * c->num_lines, "stores of 16 bytes", shape.name, arch::num_line_stores);
    const int loaded = 16 * arch::num_loads_16 + 8 * arch::num_loads_8;
    check((loaded == c->payload_bytes) == shape.by_words, "loads of 16 and 8 bytes", shape.name, loaded);
  });

  // A look at every call; first with one line that has not come, whichever it is.
  const typename Row::Lanes lanes = {0, 1};
  const auto look = [&](int call, bool expected) {
    const typename Row::Arriving arriving = {row,  lanes,  reinterpret_cast<const char*>(c->wire.data()),
                                             call, kEpoch, reinterpret_cast<char*>(c->unpacked.data())};
    const bool is_there = arriving.there();
    static std::atomic<int> num_there;
    alone([&] { num_there = 0; });
    num_there += is_there;
    alone([&] { check(num_there == (expected ? 32 : 0), "all lanes agree", shape.name, num_there); });
    alone([&] { check(arriving.bear_flag() == expected, "one lane alone", shape.name, call); });
  };
  for (int late = 0; late < c->num_lines; late += 1 + c->num_lines / 3) {
    for (const int byte : {120, 124}) {  // half of a flag is no flag
      alone([&] { c->wire[late * 128 + byte] ^= 1; });
      look(late / 16, false);
      alone([&] {
        c->check_unpacked(false);
        c->wire[late * 128 + byte] ^= 1;
      });
    }
  }
  for (int call = 0; call < row.num_calls(); ++call) look(call, true);
  alone([&] {
    c->check_unpacked(true);
    delete c;
  });
}

// Strides, first elements and dims that 16 bytes divide, and that they do not.
constexpr Shape kShapes[] = {
    {"K3", 12, 512, 512, 0, true},
    {"K3, padded heads", 12, 512, 528, 0, true},
    {"K3, head-major", 12, 512, 4096 / 4, 64, true},
    {"one line", 1, 32, 32, 0, true},
    {"one head that ends on a line", 2, 56, 56, 0, true},
    {"an odd first element", 3, 64, 64, 1, false},
    {"padded heads, odd", 4, 40, 43, 5, false},
    {"heads of an odd length", 5, 33, 33, 0, false},
    {"heads of an odd length, padded", 5, 33, 40, 0, false},
    {"heads of 7", 9, 7, 7, 0, false},
    {"heads of 1", 3, 1, 1, 0, false},
    {"one row for all heads", 6, 96, 0, 0, true},
};

int main() {
  std::vector<std::thread> threads;
  for (int lane = 0; lane < 32; ++lane) {
    threads.emplace_back([lane] {
      arch::lane_of_thread = lane;
      for (const Shape& shape : kShapes) {
        run<BFloat16>(shape, 1);
        run<float>(shape, 3);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  check(!arch::was_misaligned, "misaligned", "", 0);
  if (failures.empty()) std::printf("lines: all as meant\n");
  return failures.empty() ? 0 : 1;
}
