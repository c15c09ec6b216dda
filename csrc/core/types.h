// Plain data that crosses the host / device line and the line between the compilations of one source.
// Only data lives here: a function would be emitted by every CPU variant under one name, and the linker would
// keep one of them, perhaps the one with instructions that this machine does not have.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dcp {

// A set of ranks is one 64-bit word (missing peers, lost peers).
inline constexpr int kMaxRanks = 64;
// Part of every digest and of the group verdict: two builds that speak different protocols never exchange
// data.
inline constexpr uint32_t kProtocolVersion = 1;

// 16-bit floating point as it lies in memory; arch/ converts.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// 8 bits, 4 of them exponent; which of the two formats, its DType says (core/fp8.h).
struct Float8E4M3 {
  uint8_t bits;
};

// Those of 8 bits: of OCP, as torch.float8_e4m3fn and e5m2; and with the bias one higher and no -0 (FNUZ).
enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat8E4M3 = 3,
  kFloat8E5M2 = 4,
  kFloat8E4M3Fnuz = 5,
  kFloat8E5M2Fnuz = 6,
};
enum class LseBase : uint8_t { kE = 0, k2 = 1 };
enum class Op : uint8_t { kA2aLseReduce = 1, kQueryGather = 2, kReleaseQuery = 3, kKvGather = 4 };

// How payload gets from a source to the owner of its heads; one for all ranks of a workspace.
enum class Wire : uint8_t {
  kPush = 0,       // the source stores it into the owner's staging, then raises a flag
  kPull = 1,       // it stays in the source's region; the owner reads it there
  kPacket8 = 2,    // pushed in packets that carry their own flag: 4 bytes of payload and 4 of flag
  kPacket16 = 3,   // 12 + 4
  kPacket128 = 4,  // 120 + 8
};

enum class Status : int {
  kOk = 0,
  kFaulted = 1,       // the fault record says what happened; output rows are NaN
  kBusy = 2,          // a call on this epoch stream is in flight; nothing was touched
  kLaunchFailed = 3,  // the device did not take the kernel
};

// Which channels of a kernel run in this launch, and where. A GPU runs all of them in one launch; a launch of
// none only loads the kernel.
struct Launch {
  int32_t first_channel, end_channel;
  void* stream;        // of the device; null on a CPU, where the calling thread runs them
  int32_t device = 0;  // the number of a GPU
};

enum class FaultKind : uint8_t {
  kNone = 0,
  kTimeout = 1,      // peers did not signal before the deadline
  kMismatch = 2,     // a peer made a different call
  kPeerLost = 3,     // a peer's process is gone
  kInterrupted = 4,  // this rank was interrupted (Ctrl-C) while it waited
  kQueryOpen = 5,    // a query_gather where the query gathered before has not been released
  kQueryRows = 6,    // an a2a_lse_reduce with another T than the query_gather before it
  kChunkTurn = 7,    // kv_gather: a start and a wait, or the two buffers, do not take turns
};

// One flag per [parity][channel][source], written by that source only. A line of its own: W writers share no
// line, and what belongs to a signal comes with it.
struct alignas(64) Flag {
  uint64_t value;  // epoch (low 32 bits) in the low half, digest of the call in the high half
  // Wire::kPull. Where the payload of this round begins in the source's region, written before `value`.
  uint64_t payload_offset;
  int64_t token_stride, head_stride;  // in elements
  // Wire::kPull, kv_gather. The last epoch of this parity in which the source has read all that it wanted.
  uint64_t released;
  uint64_t unused[3];
};

// One per [channel], for an owner that sleeps (CPU only): it is woken once, by the signal that completes its
// round, and not by each of them. Decides nothing: what has arrived, the flags alone say.
struct alignas(64) Doorbell {
  uint32_t rings;    // signals received so far; peers add
  uint32_t awaited;  // 0, or the number of rings at which the owner wants to be woken
  uint32_t unused[14];
};

// The first cause of a fault. `poison` is the only word that peers write, once, by compare-exchange from 0.
struct alignas(64) FaultRecord {
  uint64_t poison;  // 0, or PoisonWord: kind 8 | reporter 8 | peer 8 | op 8 | epoch low 32
  uint64_t ready;   // 1: the words below are complete (only in the reporter's own region)
  uint64_t ranks;   // the set of ranks at fault
  uint64_t lane;
  uint64_t epoch;
  uint64_t my_call;    // descriptor of the reporter's call
  uint64_t peer_call;  // descriptor of the peer's call (mismatch)
  uint64_t waited_ns;
};

// One epoch stream = (op, lane). Written by its own rank only; peers read it to tell who is waiting for whom.
struct alignas(64) StreamState {
  uint64_t epoch;          // of the last completed round
  uint64_t call;           // descriptor of the call in flight, or of the last one
  uint64_t num_calls;      // completed; 0 = the next call is the first and gets the longer deadline
  uint64_t nonfinite_lse;  // LSEs that are not finite on shards that the lengths call non-empty
  uint32_t channels_left;  // channels of the call in flight that are done; those with a fault, times 2^16
  uint32_t in_flight;      // 1: a call is in flight
  // query_gather. 0, or 1 + the T of a gathered query that callers may still read.
  uint64_t open_rows;
  // kv_gather. The epoch of the last round that was waited for; `epoch` is that of the last one started.
  uint64_t waited_epoch;
  uint32_t unused[2];
};

struct alignas(64) ChannelState {
  uint64_t in_flight;   // 0 = idle, else the epoch of the round that this channel is in
  uint64_t num_rounds;  // completed; each brings a ring from every peer
  uint64_t store_hint;  // arch::PeerStores: what this channel has learnt; read by nobody else
  // Wire::kPull, kv_gather. The last epoch in which peers were to read each of the two buffers.
  uint64_t buffer_epochs[2];
  uint64_t awaited_release;  // 0, or the epoch whose readers this rank waits for, in a call or before one
  uint64_t unused[2];
};

// Where the control words lie in every rank's region (byte offsets, the same on all ranks).
// Stream s: StreamState, then num_channels x ChannelState, then num_channels x Doorbell, at streams_offset +
// s * stream_bytes; its flags [2][num_channels][num_ranks] at flags_offset + s * flags_bytes.
struct ControlLayout {
  uint64_t fault_offset;
  uint64_t streams_offset;
  uint64_t stream_bytes;
  uint64_t flags_offset;
  uint64_t flags_bytes;
  int32_t num_streams;
  int32_t num_channels;
};

// Rows that peers write: [parity][slot][row], `row_bytes` apart, at `offset` of every rank's region.
struct StagingLayout {
  uint64_t offset;
  uint64_t row_bytes;
  int64_t num_rows;  // of one slot
};

// What the host can tell a waiting kernel. A GPU kernel never hears of either.
struct HostEvents {
  uint64_t lost_peers;  // processes that are gone
  bool interrupted;     // a signal handler of the host wants the call to end
};

struct WaitPolicy {
  int64_t timeout_ns;        // 0 = for ever
  int64_t first_timeout_ns;  // for the first call of a stream: peers may still load kernels
  int32_t num_spins;         // polls before the first yield; may differ between ranks, it changes no result
  int32_t num_yields;        // yields before the first sleep
  void (*poll_host)(void* context, HostEvents* events);  // called about every 50 ms of a wait; may be null
  void* poll_context;
  // Null, or where a kernel that ends with a fault leaves the cause for a host that cannot read its region.
  FaultRecord* host_fault = nullptr;
};

// This rank's view of all regions. `bases` lies in memory, not in the struct: a parameter struct that is
// indexed at run time costs a GPU thread its own copy on the stack.
struct SymmView {
  const uint64_t* bases;  // [num_ranks] addresses at which this process sees each rank's region
  int32_t rank;
  int32_t num_ranks;
  // 0, or an address at which a store reaches the regions of all ranks. Where all ranks map one physical
  // region (CPU, buffers of the gathers), it is that region, and so is every base.
  uint64_t multicast = 0;
};

}  // namespace dcp
