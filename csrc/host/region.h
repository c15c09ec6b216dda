// A rank's region from the host: its first contents, and what its fault record says.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <cstring>

#include "core/channel.h"
#include "host/error.h"

namespace dcp::DCP_NS {

// Fills the control words of a region that nobody else can see yet. `start_epoch` counts as the last
// completed round of every stream; all flags, of both parities, say that the rounds before the first one were
// signalled.
inline void init_region(uint64_t base, const ControlLayout& control, int num_ranks, uint64_t start_epoch) {
  DCP_CHECK(uint32_t(start_epoch) > 1, start_epoch);
  const SymmView symm = {&base, 0, 1};
  std::memset(symm_own<char>(symm, control.fault_offset), 0, sizeof(FaultRecord));
  for (int stream_idx = 0; stream_idx < control.num_streams; ++stream_idx) {
    StreamState* state = stream_state(symm, control, 0, stream_idx);
    std::memset(static_cast<void*>(state), 0, control.stream_bytes);
    state->epoch = state->waited_epoch = start_epoch;
    Flag* flags = symm_own<Flag>(symm, control.flags_offset + control.flags_bytes * stream_idx);
    for (uint64_t epoch : {start_epoch, previous_epoch(start_epoch)}) {
      for (int i = 0; i < control.num_channels * num_ranks; ++i) {
        flags[(epoch & 1) * control.num_channels * num_ranks + i] =
            Flag{flag_value(epoch, 0), 0, 0, 0, 0, {}};
      }
    }
  }
}

struct Fault {
  bool has_record;  // false: the reporter did not live to write it
  FaultKind kind;
  int reporter;
  Op op;
  FaultRecord record;
};

// The cause that all ranks name. Where several ranks find a fault at the same moment each has its own cause
// in its poison word. That of rank 0 decides: it is written once, and whoever has a cause passes it on to
// rank 0 before he reads there. 0: no fault.
inline uint64_t common_cause(const SymmView& symm, const ControlLayout& control) {
  const uint64_t mine = arch::load_acquire_sys(own_poison(symm, control));
  if (mine == 0) return 0;
  uint64_t* first = &symm_at<FaultRecord>(symm, 0, control.fault_offset)->poison;
  arch::compare_exchange_sys(first, uint64_t(0), mine);
  return arch::load_acquire_sys(first);
}

// What the poison word and the reporter's record say. kNone: no fault.
inline Fault read_fault(const SymmView& symm, const ControlLayout& control) {
  Fault fault = {};
  const uint64_t word = common_cause(symm, control);
  if (word == 0) return fault;
  fault.kind = FaultKind(word >> 56);
  fault.reporter = int(word >> 48 & 0xff);
  fault.op = Op(word >> 32 & 0xff);
  const FaultRecord* record = symm_at<FaultRecord>(symm, fault.reporter, control.fault_offset);
  // A moment after rank 0 has marked its own fault; never, where the reporter died in between.
  for (int i = 0; i < 1000 && arch::load_acquire_sys(&record->ready) == 0; ++i) usleep(100);
  fault.has_record = arch::load_acquire_sys(&record->ready) != 0;
  fault.record = {
      word,
      fault.has_record,
      fault.has_record ? arch::load_relaxed_sys(&record->ranks) : rank_bit(int(word >> 40 & 0xff)),
      arch::load_relaxed_sys(&record->lane),
      fault.has_record ? arch::load_relaxed_sys(&record->epoch) : (word & 0xffffffffu),
      arch::load_relaxed_sys(&record->my_call),
      arch::load_relaxed_sys(&record->peer_call),
      arch::load_relaxed_sys(&record->waited_ns)};
  return fault;
}

// Puts a fault, of which the host has heard otherwise than from a kernel, where it looks; the poison word
// last.
inline void take_fault(const FaultRecord& fault, FaultRecord* record) {
  FaultRecord unseen = fault;
  unseen.poison = record->poison;
  *record = unseen;
  arch::store_release_sys(&record->poison, fault.poison);
}

// The ranks whose socket is at its end. `socket_fds` holds -1 where there is none.
inline uint64_t closed_sockets(const int* socket_fds, int num_ranks) {
  pollfd polls[kMaxRanks];
  for (int rank = 0; rank < num_ranks; ++rank) polls[rank] = {socket_fds[rank], POLLRDHUP, 0};
  uint64_t closed = 0;
  if (poll(polls, nfds_t(num_ranks), 0) <= 0) return closed;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (polls[rank].revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) closed |= rank_bit(rank);
  }
  return closed;
}

}  // namespace dcp::DCP_NS
