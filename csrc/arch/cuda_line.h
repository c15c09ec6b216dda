// CUDA target: packets of 128 bytes. A packet is a line, 8 neighbouring lanes of a warp store 16 bytes of it
// each, and the last 8 bytes are the flag, twice: NCCL's LL128.
//
// What it relies on is no part of the PTX memory model: that what one store instruction of a warp writes into
// a line has arrived when the last bytes of the line have. NVLink and NVSwitch between the memories of GPUs
// behave so, and NCCL builds on it there (NVIDIA/nccl #786); over PCIe a line may be split and its parts come
// in any order. So these packets are for GPUs that are joined by NVLink, and nothing here can check that.
//
// Of a line that is loaded it is not said that its 8 parts are of one moment. So a look is at the flags
// alone, and the line is loaded after the flag has been seen, as NCCL does. Nothing of a GPU loads ahead of a
// branch.
//
// A warp goes through every call as one: the lanes that hold the flags decide together for all of its lines.
// So nobody is left behind in a loop that others have ended, and 4 lines are one access of 512 bytes.
//
// Uses store_relaxed_16, load_relaxed_16, load_relaxed_sys and all_lanes of cuda.h; tests/isa runs it on the
// host with threads for lanes.
#pragma once

#include "core/types.h"

namespace dcp::DCP_NS::arch {

template <>
class Packet<128> {
 public:
  using Lanes = arch::Lanes<32>;
  // 16 lines a call: every lane then has 4 accesses in flight, and looks at the flags of as many lines cost
  // one trip.
  static constexpr int kPayload = 120, kPerCall = 16;

  template <class Part>
  static DCP_FN void store(const Lanes& lanes, void* packets, int num, uint32_t flag, const Part& part) {
    Words16 words[kNumTurns] = {};
#pragma unroll
    for (int turn = 0; turn < kNumTurns; ++turn) {
      const int k = line_of(lanes, turn), j = part_of(lanes);
      if (k < num) words[turn] = part(k, j);
    }
    lanes.sync();  // a line is stored by one instruction: whoever took longer to load is waited for
#pragma unroll
    for (int turn = 0; turn < kNumTurns; ++turn) {
      // Not above: it would wait for the load of this turn before the next one begins.
      if (part_of(lanes) == kNumParts - 1) words[turn].word[2] = words[turn].word[3] = flag;
      if (line_of(lanes, turn) < num) {
        store_relaxed_16(static_cast<char*>(packets) + place_of(lanes, turn), words[turn]);
      }
    }
  }

  template <class Put>
  static DCP_FN bool try_load(const Lanes& lanes, const void* packets, int num, uint32_t flag,
                              const Put& put) {
    bool are_there = true;
    if (part_of(lanes) == kNumParts - 1) {
#pragma unroll
      for (int turn = 0; turn < kNumTurns; ++turn) {
        const int k = line_of(lanes, turn);
        if (k < num) are_there &= flag_of(packets, k) == twice(flag);
      }
    }
    if (!all_lanes(are_there)) return false;
    Words16 words[kNumTurns] = {};
#pragma unroll
    for (int turn = 0; turn < kNumTurns; ++turn) {
      if (line_of(lanes, turn) < num) {
        words[turn] = load_relaxed_16(static_cast<const char*>(packets) + place_of(lanes, turn));
      }
    }
#pragma unroll
    for (int turn = 0; turn < kNumTurns; ++turn) {
      if (line_of(lanes, turn) < num) put(line_of(lanes, turn), part_of(lanes), words[turn]);
    }
    return true;
  }

  static DCP_FN bool bear(const void* packets, int num, uint32_t flag) {
    DCP_NO_UNROLL
    for (int k = 0; k < num; ++k) {
      if (flag_of(packets, k) != twice(flag)) return false;
    }
    return true;
  }

 private:
  static constexpr int kNumParts = 8, kLinesATurn = 32 / kNumParts, kNumTurns = kPerCall / kLinesATurn;

  static DCP_FN int part_of(const Lanes& lanes) { return lanes.rank() % kNumParts; }
  static DCP_FN int line_of(const Lanes& lanes, int turn) {
    return turn * kLinesATurn + lanes.rank() / kNumParts;
  }
  // Neighbouring lanes have neighbouring 16 bytes.
  static DCP_FN int place_of(const Lanes& lanes, int turn) {
    return turn * (kLinesATurn * 128) + lanes.rank() * 16;
  }
  static DCP_FN uint64_t twice(uint32_t flag) { return uint64_t(flag) << 32 | flag; }
  static DCP_FN uint64_t flag_of(const void* packets, int k) {
    return load_relaxed_sys(reinterpret_cast<const uint64_t*>(static_cast<const char*>(packets) + k * 128) +
                            15);
  }
};

}  // namespace dcp::DCP_NS::arch
