// Ranks are threads over one mapping, the kernel source is the shipped one: what ThreadSanitizer sees here is
// the order of csrc/ops/link_check.cc. Exit code 1 = a wrong result, 66 = a race.
//
//   race_link_check RANKS CHECKS MULTICAST MUTATION
//
// MULTICAST: 1 = there is one region more, which all ranks store into and read. MUTATION as in arch/cpu.h and
// cta_threads.h (0 none), and kNoExchange: ranks begin the next check without waiting for each other.
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "arch/target.h"
#include "ops/link_check.h"
#include "threads.h"

namespace dcp::DCP_NS {
LinkCheckFns link_check();
}  // namespace dcp::DCP_NS

int dcp_mutation = 0;

namespace {
constexpr int kNoExchange = 100;
constexpr uint64_t kOffset = 64;
}  // namespace

int main(int argc, char** argv) {
  using namespace dcp;
  if (argc != 5) return 2;
  const int num_ranks = std::atoi(argv[1]), num_checks = std::atoi(argv[2]), mutation = std::atoi(argv[4]);
  const bool has_multicast = std::atoi(argv[3]) != 0, has_exchange = mutation != kNoExchange;
  dcp_mutation = has_exchange ? mutation : 0;
  const size_t num_slots = 2 * size_t(num_ranks);
  std::vector<std::vector<LinkSlot>> regions(size_t(num_ranks) + 1, std::vector<LinkSlot>(num_slots));
  std::vector<uint64_t> bases;
  for (auto& region : regions) bases.push_back(reinterpret_cast<uint64_t>(region.data()) - kOffset);
  std::atomic<bool> good{true};
  std::barrier exchange(num_ranks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      // The last rank does not come to the last check: each of the others must say so.
      const int last = num_ranks - 1;
      Threads kernel(1);
      for (int check = 0; check < num_checks + (rank != last); ++check) {
        const bool is_whole = check < num_checks;
        LinkResult result = {};
        LinkCheckParams p = {};
        p.symm = {bases.data(), rank, num_ranks, has_multicast ? bases.back() : 0};
        p.multicast_view = bases.back();
        p.offset = kOffset;
        p.nonce = uint64_t(check) + 1;
        p.wait = {is_whole ? 60000000000 : 20000000, 0, 20, 20, nullptr, nullptr};
        p.result = &result;
        // As a host does beside a device: it looks at the nonce, then reads the rest.
        const std::function<void(int)> run = [&](int) {
          if (DCP_NS::link_check().run(p, {0, 1, nullptr}) != Status::kOk) good = false;
        };
        kernel.start(run);
        while (DCP_NS::arch::load_acquire_sys(&result.nonce) != p.nonce) std::this_thread::yield();
        const uint64_t found = result.no_flag | result.wrong_pattern | result.no_echo |
                               result.no_multicast_flag | result.wrong_multicast_pattern;
        kernel.wait();
        const bool names_last = (result.no_flag & result.no_echo) >> last != 0;
        if (is_whole ? found != 0 : !names_last) {
          std::fprintf(stderr, "rank %d check %d: wrong result\n", rank, check);
          good = false;
          if (!has_exchange) std::_Exit(1);  // the others wait for this rank
        }
        if (has_exchange && is_whole) exchange.arrive_and_wait();
      }
    });
  }
  for (auto& thread : ranks) thread.join();
  return good ? 0 : 1;
}
