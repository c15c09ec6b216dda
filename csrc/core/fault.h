// Faults: who reports, how every rank learns of it, and who is to blame.
#pragma once

#include "arch/target.h"
#include "core/symm.h"

namespace dcp::DCP_NS {

DCP_FN uint64_t poison_word(FaultKind kind, int reporter, int peer, Op op, uint64_t epoch) {
  return uint64_t(kind) << 56 | uint64_t(reporter & 0xff) << 48 | uint64_t(peer & 0xff) << 40 |
         uint64_t(op) << 32 | (epoch & 0xffffffffu);
}

struct FaultReport {
  FaultKind kind;
  Op op;
  int lane;
  uint64_t ranks;  // at fault
  uint64_t epoch;
  uint64_t my_call;
  uint64_t peer_call;
  uint64_t waited_ns;
};

DCP_FN uint64_t* own_poison(const SymmView& symm, const ControlLayout& control) {
  return &symm_own<FaultRecord>(symm, control.fault_offset)->poison;
}
DCP_FN bool is_poisoned(const SymmView& symm, const ControlLayout& control) {
  return arch::load_acquire_if_sys(own_poison(symm, control), [](uint64_t v) { return v != 0; }) != 0;
}

// Poisons every peer with the cause that this rank knows. A rank that only adopts a cause forwards it too:
// the reporter may have died half-way through its peers, and this rank will not signal any more
// (tests/protocol finds the hang).
DCP_OUTLINE void forward_fault(const SymmView& symm, const ControlLayout& control) {
  const uint64_t word = arch::load_acquire_sys(own_poison(symm, control));
  DCP_NO_UNROLL
  for (int i = 1; i < symm.num_ranks; ++i) {
    FaultRecord* theirs = symm_at<FaultRecord>(symm, peer_order(symm, i), control.fault_offset);
    arch::compare_exchange_sys(&theirs->poison, uint64_t(0), word);
  }
}

// Reports a fault unless one is known already: the first cause stays. This rank is poisoned first, so that it
// publishes nothing more; the record is complete before any peer can see the word; every peer is poisoned
// before the kernel returns.
DCP_OUTLINE void report_fault(const SymmView& symm, const ControlLayout& control, const FaultReport& report) {
  FaultRecord* record = symm_own<FaultRecord>(symm, control.fault_offset);
  int peer = 0;
  while (peer < symm.num_ranks - 1 && (report.ranks & rank_bit(peer)) == 0) ++peer;
  const uint64_t word = poison_word(report.kind, symm.rank, peer, report.op, report.epoch);
  if (!arch::compare_exchange_sys(&record->poison, uint64_t(0), word)) return;
  arch::store_relaxed_sys(&record->ranks, report.ranks);
  arch::store_relaxed_sys(&record->lane, uint64_t(report.lane));
  arch::store_relaxed_sys(&record->epoch, report.epoch);
  arch::store_relaxed_sys(&record->my_call, report.my_call);
  arch::store_relaxed_sys(&record->peer_call, report.peer_call);
  arch::store_relaxed_sys(&record->waited_ns, report.waited_ns);
  arch::store_release_sys(&record->ready, uint64_t(1));
  forward_fault(symm, control);
}

// Copies the cause to where this rank's host can read it, the poison word last. Several channels may do so at
// once: all write the same.
DCP_OUTLINE void show_fault(const SymmView& symm, const ControlLayout& control, FaultRecord* host_fault) {
  const uint64_t word = arch::load_acquire_sys(own_poison(symm, control));
  const int reporter = int(word >> 48 & 0xff);
  if (word == 0 || reporter >= symm.num_ranks) return;
  const FaultRecord* record = symm_at<FaultRecord>(symm, reporter, control.fault_offset);
  const uint64_t ready = arch::load_acquire_sys(&record->ready);
  arch::store_relaxed_sys(&host_fault->ranks, arch::load_relaxed_sys(&record->ranks));
  arch::store_relaxed_sys(&host_fault->lane, arch::load_relaxed_sys(&record->lane));
  arch::store_relaxed_sys(&host_fault->epoch, arch::load_relaxed_sys(&record->epoch));
  arch::store_relaxed_sys(&host_fault->my_call, arch::load_relaxed_sys(&record->my_call));
  arch::store_relaxed_sys(&host_fault->peer_call, arch::load_relaxed_sys(&record->peer_call));
  arch::store_relaxed_sys(&host_fault->waited_ns, arch::load_relaxed_sys(&record->waited_ns));
  arch::store_relaxed_sys(&host_fault->ready, ready);
  arch::store_release_sys(&host_fault->poison, word);
}

}  // namespace dcp::DCP_NS
