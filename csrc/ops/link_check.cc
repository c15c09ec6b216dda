// Kernel and launch of link_check; the specification is in the header.
#include "ops/link_check.h"

#include "arch/target.h"
#include "core/symm.h"

namespace dcp::DCP_NS {
namespace {

constexpr int kUnitBytes = 16, kUnitWords = kUnitBytes / 4;
constexpr int kNumUnits = kLinkPatternBytes / kUnitBytes;
constexpr int kToAll = kMaxRanks;  // the destination in a pattern that goes to all

// A bijective mix of 32 bits (the finaliser of MurmurHash3).
DCP_FN uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}
DCP_FN uint32_t pattern_seed(uint64_t nonce, int source, int destination) {
  const uint32_t pair = uint32_t(source) << 8 | uint32_t(destination);
  return mixed(mixed(mixed(uint32_t(nonce)) + uint32_t(nonce >> 32)) + pair);
}
DCP_FN arch::Words16 pattern_unit(uint32_t seed, int unit) {
  const uint32_t first = seed + uint32_t(unit) * kUnitWords;
  return {{mixed(first), mixed(first + 1), mixed(first + 2), mixed(first + 3)}};
}

// The slot of `source` in the region at `base`.
DCP_FN LinkSlot* slot_at(const LinkCheckParams& p, uint64_t base, int source) {
  return reinterpret_cast<LinkSlot*>(base + p.offset) + source;
}
DCP_FN LinkSlot* multicast_slot_at(const LinkCheckParams& p, uint64_t base, int source) {
  return slot_at(p, base, source) + p.symm.num_ranks;
}
DCP_FN bool is_raised(const uint64_t* word, uint64_t nonce) {
  return arch::load_acquire_if_sys(word, [&](uint64_t v) { return v == nonce; }) == nonce;
}

// By the one thread that has seen the flag.
DCP_FN bool has_pattern(const LinkSlot& slot, uint32_t seed) {
  uint32_t differences = 0;
  DCP_NO_UNROLL
  for (int unit = 0; unit < kNumUnits; ++unit) {
    const arch::Words16 expected = pattern_unit(seed, unit);
    uint32_t got[kUnitWords];
    arch::load_elements(slot.words + unit * kUnitWords, got);
    for (int i = 0; i < kUnitWords; ++i) differences |= got[i] ^ expected.word[i];
  }
  return differences == 0;
}

// Steps `publish` and `signal`, to one rank after the other.
DCP_FN void publish(const arch::Cta& cta, const LinkCheckParams& p) {
  DCP_NO_UNROLL
  for (int i = 0; i < p.symm.num_ranks; ++i) {
    const int peer = peer_order(p.symm, i);
    const uint32_t seed = pattern_seed(p.nonce, p.symm.rank, peer);
    LinkSlot* slot = slot_at(p, p.symm.bases[peer], p.symm.rank);
    DCP_NO_UNROLL
    for (int unit = cta.thread_rank(); unit < kNumUnits; unit += cta.size()) {
      arch::store_16(slot->words + unit * kUnitWords, pattern_unit(seed, unit));
    }
  }
  arch::publish_done(cta);
  DCP_NO_UNROLL
  for (int i = cta.thread_rank(); i < p.symm.num_ranks; i += cta.size()) {
    LinkSlot* slot = slot_at(p, p.symm.bases[peer_order(p.symm, i)], p.symm.rank);
    arch::store_release_sys(&slot->line.value, p.nonce);
  }
}

// The same to all at once.
DCP_FN void publish_to_all(const arch::Cta& cta, const LinkCheckParams& p) {
  const uint32_t seed = pattern_seed(p.nonce, p.symm.rank, kToAll);
  LinkSlot* slot = multicast_slot_at(p, p.symm.multicast, p.symm.rank);
  DCP_NO_UNROLL
  for (int unit = cta.thread_rank(); unit < kNumUnits; unit += cta.size()) {
    arch::store_multicast(slot->words + unit * kUnitWords, pattern_unit(seed, unit));
  }
  arch::broadcast_done(cta, true);
  if (cta.thread_rank() == 0) arch::multicast_flag(&slot->line, p.nonce);
}

// Steps `wait`, `compare` and `echo`, by one thread for its share of the ranks. What is missing is looked for
// rank by rank until all is there or the deadline has passed.
class Watch {
 public:
  DCP_FN Watch(const arch::Cta& cta, const LinkCheckParams& p) : p_(p) {
    for (int i = cta.thread_rank(); i < p.symm.num_ranks; i += cta.size()) {
      ranks_ |= rank_bit(peer_order(p.symm, i));
    }
    found_ = {ranks_, 0, ranks_, has_multicast(p.symm) ? ranks_ : 0, 0, 0};
  }

  DCP_FN LinkResult run() {
    Doorbell nobody_rings = {};  // a CPU then sleeps for a millisecond at a time
    arch::Backoff backoff(p_.wait, &nobody_rings, 1);
    Flag not_awaited = {};
    int64_t start_ns = 0;
    for (bool is_over = false;;) {
      look();
      if ((found_.no_flag | found_.no_echo | found_.no_multicast_flag) == 0 || is_over) return found_;
      if (backoff.is_slow()) {
        const int64_t now_ns = arch::now_ns();
        if (start_ns == 0) start_ns = now_ns;
        // All may have come between the look at the flags and the one at the clock: so one more look.
        is_over = now_ns - start_ns > p_.wait.timeout_ns;
      }
      if (!is_over) backoff.pause(&not_awaited, 0);
    }
  }

 private:
  DCP_FN void look() {
    DCP_NO_UNROLL
    for (int i = 0; i < p_.symm.num_ranks; ++i) {
      const int peer = peer_order(p_.symm, i);
      if ((ranks_ & rank_bit(peer)) != 0) look_at(peer, rank_bit(peer));
    }
  }

  DCP_FN void look_at(int peer, uint64_t bit) {
    const LinkSlot* slot = slot_at(p_, p_.symm.bases[p_.symm.rank], peer);
    if ((found_.no_flag & bit) != 0 && is_raised(&slot->line.value, p_.nonce)) {
      found_.no_flag &= ~bit;
      if (!has_pattern(*slot, pattern_seed(p_.nonce, peer, p_.symm.rank))) found_.wrong_pattern |= bit;
      LinkSlot* mine = slot_at(p_, p_.symm.bases[peer], p_.symm.rank);
      arch::store_release_sys(&mine->line.released, p_.nonce);
    }
    if ((found_.no_echo & bit) != 0 && is_raised(&slot->line.released, p_.nonce)) found_.no_echo &= ~bit;
    if (!has_multicast(p_.symm)) return;
    const LinkSlot* to_all = multicast_slot_at(p_, p_.multicast_view, peer);
    if ((found_.no_multicast_flag & bit) != 0 && is_raised(&to_all->line.value, p_.nonce)) {
      found_.no_multicast_flag &= ~bit;
      arch::broadcast_arrived(true);
      const bool is_right = has_pattern(*to_all, pattern_seed(p_.nonce, peer, kToAll));
      if (!is_right) found_.wrong_multicast_pattern |= bit;
    }
  }

  const LinkCheckParams& p_;
  uint64_t ranks_ = 0;  // this thread's share
  LinkResult found_;
};

struct LinkKernel {
  using Params = LinkCheckParams;
  struct Shared {
    LinkResult of_thread[kMaxRanks];  // of the threads that have ranks
  };

  static DCP_FN Status run(const arch::Cta& cta, const LinkCheckParams& p) {
    publish(cta, p);
    if (has_multicast(p.symm)) publish_to_all(cta, p);
    Shared& shared = cta.shared<Shared>();
    const LinkResult found = Watch(cta, p).run();
    const int num_threads = cta.size() < p.symm.num_ranks ? cta.size() : p.symm.num_ranks;
    if (cta.thread_rank() < num_threads) shared.of_thread[cta.thread_rank()] = found;
    cta.sync();
    if (cta.thread_rank() == 0) report(p, shared, num_threads);
    return Status::kOk;
  }

 private:
  static DCP_FN void report(const LinkCheckParams& p, const Shared& shared, int num_threads) {
    LinkResult all = {};
    DCP_NO_UNROLL
    for (int i = 0; i < num_threads; ++i) {
      const LinkResult& one = shared.of_thread[i];
      all.no_flag |= one.no_flag;
      all.wrong_pattern |= one.wrong_pattern;
      all.no_echo |= one.no_echo;
      all.no_multicast_flag |= one.no_multicast_flag;
      all.wrong_multicast_pattern |= one.wrong_multicast_pattern;
    }
    arch::store_relaxed_sys(&p.result->no_flag, all.no_flag);
    arch::store_relaxed_sys(&p.result->wrong_pattern, all.wrong_pattern);
    arch::store_relaxed_sys(&p.result->no_echo, all.no_echo);
    arch::store_relaxed_sys(&p.result->no_multicast_flag, all.no_multicast_flag);
    arch::store_relaxed_sys(&p.result->wrong_multicast_pattern, all.wrong_multicast_pattern);
    arch::store_release_sys(&p.result->nonce, p.nonce);
  }
};

Status run(const LinkCheckParams& p, const Launch& launch) { return arch::launch<LinkKernel>(p, launch); }

}  // namespace

LinkCheckFns link_check() { return {run}; }

}  // namespace dcp::DCP_NS
