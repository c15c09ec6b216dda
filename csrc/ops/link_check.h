// link_check: whether every rank reaches every other one's region. It runs once, when a workspace is made, on
// memory that a driver has just mapped: a mapping that ends in the wrong region, or a switch that drops
// stores, shows here by name, and not later as a timeout or as wrong numbers of some op.
//
// It is no op: no epoch stream, no poison, no fault record. It checks what channels rest on, so it brings its
// own flags, in a part of the region that is zero when the region is made:
//   LinkSlot[num_ranks]  by source: what it stored to this rank alone
//   LinkSlot[num_ranks]  by source: what it stored to all ranks at once (multicast)
// Slot s of a region is written by rank s, and read by the region's owner. The nonce of a check is the same
// on all ranks, is not 0, and no earlier check of these regions had it: so nothing that lies there counts.
//
// Steps; one CTA, one launch:
//   publish  a pattern of (source, destination, word, nonce) -> slot of this rank at every rank, itself too
//   signal   flag of that slot := nonce, after all of it
//   the same by one store for all, where there is multicast; the pattern knows no destination then
//   wait     for the flags of all ranks, in any order, under one deadline. As soon as one is there:
//            compare  every word of its pattern
//            echo     `released` in the line of the own slot at that rank := nonce
//            and, for the echo of every rank: its store came as an answer to one of this rank
//   report   who did not signal, whose pattern was wrong, who did not echo, the first two of multicast
// A rank that is missing delays nobody's echo: no wait is for one rank alone.
//
// When a slot may be written again: after the echo, and of multicast when all ranks have ended the check. So
// the caller lets no rank begin the next check before: the exchange of the results does that.
#pragma once

#include "core/types.h"

namespace dcp {

inline constexpr int kLinkPatternBytes = 1024;

struct alignas(64) LinkSlot {
  uint32_t words[kLinkPatternBytes / 4];
  Flag line;  // `value`: the flag; `released`: the echo
};

// What a check found out, as sets of ranks, for the caller's memory.
struct LinkResult {
  uint64_t no_flag, wrong_pattern, no_echo;
  uint64_t no_multicast_flag, wrong_multicast_pattern;
  uint64_t nonce;  // written last: the words before are those of this check
};

struct LinkCheckParams {
  SymmView symm;  // where there is multicast, it reaches the regions of all ranks
  // Base of the region in which this rank finds what was stored by multicast: its own, but for a CPU, where
  // that is a region of its own.
  uint64_t multicast_view;
  uint64_t offset;  // of the slots in every region
  uint64_t nonce;
  WaitPolicy wait;     // timeout_ns is not 0: this wait always ends
  LinkResult* result;  // ordinary memory on a CPU, else what the device can write
};

struct LinkCheckFns {
  Status (*run)(const LinkCheckParams& params, const Launch& launch);
};

}  // namespace dcp
