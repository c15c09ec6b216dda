// What every target supplies, in namespace dcp::DCP_NS::arch. A kernel uses nothing else of the hardware; a
// target that lacks a line of this page does not compile. Adding a target is writing one such header
// (csrc/README.md).
//
//   code      DCP_FN: inlined into kernels. DCP_OUTLINE: code that seldom runs (a CPU calls it; a GPU
//             inlines it too, because a reference to a local would need local memory). DCP_DECL: a
//             declaration of either. DCP_NO_UNROLL: before a loop that seldom runs more than once a thread.
//             DCP_UNROLL_LOADS: before one whose loads are better in flight together
//   memory    pointer_to<T>(address), pointer_to(p): into global memory, where the compiler may have lost
//             sight of that: the address was a number, or has been in memory
//             load_constant(p): of what nobody writes while a kernel runs
//   threads   Cta {index, thread_rank, size, sync, broadcast, shared<S>}
//             Lanes<N> {rank, size, group, num_groups, sync, broadcast, kMaxGroups}: groups of up to N
//             threads; Lanes<1>: each thread by itself
//   launch    launch<Kernel>(params, launch): every channel of it runs Kernel::run(cta, params), maybe all at
//             once, with a Kernel::Shared. On the host: device_fault(device, text, size): "", or why that
//             device runs no kernel of this build; launch_fault(text, size): what the last launch of this
//             thread that failed has met with, "" where that is not known. kIsSynchronous: whether a launch
//             returns when its kernel has run; only there a host can look at what it did, and have the next
//             kernel take it from there
//   order     load_acquire_sys, load_relaxed_sys, store_release_sys, store_relaxed_sys (u32, u64, i64)
//             load_acquire_if_sys(word, is): an acquire load when is(value) holds. Another look may order
//             nothing, where that costs less
//             load_after_reads_sys: for an own word; not before earlier loads of this thread
//             store_behind_sys: comes after what this thread has loaded, and stored by *_sys; of its other
//             stores it may say nothing, where that costs less than a release
//             fetch_add, compare_exchange_sys
//             kSignalsTogether: whether a release waits for all stores in flight, so that flags of several
//             peers are better raised side by side, after the stores to all, than each behind its own
//             publish_done(cta): all stores of the CTA to peers are complete before a flag that follows.
//             stores_done(cta): and those to anywhere, before what another CTA of the rank does behind a
//             fetch_add that comes after this one's
//             signal_flag(flag, value, doorbell): a release store that also wakes a sleeping owner
//             signal_flag_behind: the same by store_behind_sys
//   pull      kHasPull: whether payload may stay in its source's memory, for its owner to load it there
//   multicast kHasMulticast: false where no store reaches several ranks; then nothing else of it is called
//             store_multicast(to, words): 16 bytes, at a multiple of 16; multicast_flag(flag, value): a
//             release broadcast_done(cta, uses_multicast): publish_done for stores to the buffers of all
//             ranks broadcast_arrived(uses_multicast): by every thread, after the flag that announces them
//   packets   Packet<8 | 16 | 128>: payload and flag arrive together. Up to kMaxPacketBytes. A packet carries
//             kPayload bytes: parts of 4 words, the last (or only) one of fewer
//             Lanes: the threads that make a call together, with the same arguments. How they share its
//             packets is the target's business; up to kPerCall, side by side
//             store(lanes, packets, num, flag, part): part(k, j) gives part j of packet k as Words16
//             try_load(lanes, packets, num, flag, put): one look. True in all lanes, when all packets bear
//             `flag`: then put(k, j, words) has been called for every part, by one of them
//             bear(packets, num, flag): the same question by one thread alone, which learns no payload
//   time      now_ns, spin_pause, Backoff {is_slow, pause}, kHostPollNs, poll_host
//   bytes     PeerStores(hint, num_bytes) {copy, copy_multicast (threads, to, from, num_bytes),
//             copy_to_all(threads, bases, rank, num_ranks, offset, from, num_bytes), finish(cta)}, where
//             threads are a Cta or Lanes; by multicast, `to` and num_bytes are multiples of 16
//             Words16, store_16(to, words), store_1(to, byte)
//             load_words<1 | 2 | 4>(from), store_words<kNum>(to, words): at once; where
//             at_once<kNum>(address) load_elements(from, array), map_elements(lanes, to, from, num_elements,
//             f): 16 or multiples of it
//   numbers   fma, exp2 (x <= 0), log2, abs; to_float, from_float<T>, rounding to nearest even; bit_cast
//   vectors   RowVec<T> {kElements, broadcast, load, store, stream} for float, Half, BFloat16; fma
//             kRowBlock, kHeadTile
//             prefetch<kBytes>(from, offset): so many bytes at from + offset are read soon, if they exist.
//             heads_ahead(head_bytes): how many heads before that it pays. It may do nothing
//             streams_output(num_bytes), kStreamAlignment, streams_done(): for large outputs
//
// Every number is the result of correctly rounded IEEE operations in a stated order, so that the variants of
// one target agree in every bit. Kernels have no fence: order comes from the flags, and ThreadSanitizer can
// follow it. What a target's hardware needs beside them lies inside publish_done, broadcast_done,
// broadcast_arrived and signal_flag.
#pragma once

#include "core/types.h"

namespace dcp::DCP_NS {

static_assert(arch::RowVec<float>::kElements >= 1 && arch::kRowBlock >= 1 && arch::kHeadTile >= 1);
static_assert(arch::Lanes<32>::kMaxGroups >= 1);
static_assert(noexcept(noexcept(arch::publish_done(*static_cast<const arch::Cta*>(nullptr)))));
static_assert(noexcept(noexcept(arch::broadcast_done(*static_cast<const arch::Cta*>(nullptr), true))));
static_assert(sizeof(arch::Words16) == 16);
static_assert(sizeof(decltype(arch::exp2(0.0f))) == 4 && sizeof(decltype(arch::log2(1.0f))) == 4);
static_assert(sizeof(arch::from_float<BFloat16>(0.0f)) == 2 && sizeof(arch::from_float<Half>(0.0f)) == 2);
static_assert(arch::kHostPollNs > 0);
static_assert(arch::Packet<8>::kPayload == 4 && arch::Packet<16>::kPayload == 12);
static_assert(arch::kMaxPacketBytes >= 16 && arch::Lanes<1>::kMaxGroups >= 1);

// The symmetric region is shared by processes that may come from different compilations: its words have one
// size.
static_assert(sizeof(Flag) == 64 && sizeof(FaultRecord) == 64 && sizeof(StreamState) == 64 &&
              sizeof(ChannelState) == 64 && sizeof(Doorbell) == 64);

}  // namespace dcp::DCP_NS
