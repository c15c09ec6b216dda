// A row of packets: a plain row (core/types.h, A2aLseReduceParams::lse_in_row), payload and then LSEs, cut
// into what packets carry. No head and no LSE starts a packet of its own: K3's row of 12 heads is 103 lines
// and not 109. Packets need no order between them: every one bears the epoch of its round.
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS {

// Heads in the caller's tensor, `head_stride` elements apart.
template <class T>
struct Heads {
  const T* first;
  int64_t head_stride;
};

template <class T, int kBytes>
struct PacketRow {
  using Packet = arch::Packet<kBytes>;
  using Lanes = typename Packet::Lanes;

  int num_heads, head_dim;
  int lse_in_row;  // a multiple of 16

  DCP_FN int num_bytes() const { return lse_in_row + num_heads * 4; }
  DCP_FN int num_packets() const { return (num_bytes() + Packet::kPayload - 1) / Packet::kPayload; }
  DCP_FN int num_calls() const { return (num_packets() + Packet::kPerCall - 1) / Packet::kPerCall; }

  // Stores a row. A row is a few calls, and they are dealt out to the groups of the CTA in turn, from one row
  // to the next: `call` is the next one of this group, in this row or, when it returns, in the one after it.
  // `lse(h)` is called once for every head.
  template <class Lse>
  DCP_FN void store(const Lanes& lanes, char* row, int& call, uint32_t flag, const Heads<T>& heads,
                    const Lse& lse) const {
    for (; call < num_calls(); call += lanes.num_groups()) {
      const int first = call * Packet::kPerCall;
      Packet::store(lanes, row + int64_t(first) * kBytes, num_at(first), flag,
                    [&](int k, int j) { return part(place(first + k, j), j, heads, lse); });
    }
    call -= num_calls();
  }

  // The packets of call `call` of one row, on their way into a plain row.
  struct Arriving {
    const PacketRow& packets;
    const Lanes& lanes;
    const char* row;
    int call;
    uint32_t flag;
    char* plain;

    // One look, with all lanes of the group: true when all packets were there, and their words are now in
    // `plain`.
    DCP_FN bool there() const {
      const int first = call * Packet::kPerCall, end = packets.num_bytes();
      return Packet::try_load(lanes, row + int64_t(first) * kBytes, packets.num_at(first), flag,
                              [&](int k, int j, const arch::Words16& words) {
                                const int at = place(first + k, j);
                                if constexpr (kBytes == 128) {
                                  // Plain rows are whole lines: behind the last LSE there is room.
                                  if (at >= end) return;
                                  if (j < kLast) {
                                    arch::store_words<4>(plain + at, words);
                                  } else {
                                    arch::store_words<2>(plain + at, words);
                                  }
                                } else {
                                  for (int i = 0; i < Packet::kPayload / 4; ++i) {
                                    if (at + 4 * i >= end) return;
                                    arch::store_words<1>(plain + at + 4 * i, {{words.word[i]}});
                                  }
                                }
                              });
    }
    // The same question by one lane alone, which learns no payload.
    DCP_FN bool bear_flag() const {
      const int first = call * Packet::kPerCall;
      return Packet::bear(row + int64_t(first) * kBytes, packets.num_at(first), flag);
    }
  };

 private:
  static constexpr int kLast = 7;  // of the parts of a packet of 128 bytes: 8 bytes beside the flag

  DCP_FN int num_at(int first) const {
    const int num_left = num_packets() - first;
    return num_left < Packet::kPerCall ? num_left : Packet::kPerCall;
  }

  // Where part `j` of packet `k` lies in the plain row. A packet of 128 bytes holds 120 of the row, so every
  // second one begins in the middle of 16. There the first 8 come last, beside the flag: then all other parts
  // are 16 bytes at a multiple of 16, on both sides.
  static DCP_FN int place(int k, int j) {
    if constexpr (kBytes != 128) return k * Packet::kPayload;
    const int pair = k / 2 * 240, is_second = k % 2;
    return pair + (j < kLast ? 128 * is_second + 16 * j : 112 + 8 * is_second);
  }

  // Part `j` of a packet, which begins at byte `at` of the plain row.
  template <class Lse>
  DCP_FN arch::Words16 part(int at, int j, const Heads<T>& heads, const Lse& lse) const {
    if constexpr (kBytes == 128) return words_at(at, j < kLast ? 4 : 2, heads, lse);
    arch::Words16 words = {};
    for (int i = 0; i < Packet::kPayload / 4; ++i) {  // payload may end, and LSEs begin, after each word
      words.word[i] = words_at(at + 4 * i, 1, heads, lse).word[0];
    }
    return words;
  }

  // `num_words`, 1, 2 or 4, of the plain row from byte `at` on.
  template <class Lse>
  DCP_FN arch::Words16 words_at(int at, int num_words, const Heads<T>& heads, const Lse& lse) const {
    const int first = at / int(sizeof(T)), num_elements = num_heads * head_dim;
    // Elements that lie side by side: those of all heads, or of one. What fills the row up between the last
    // head and the LSEs is in no head.
    const bool heads_touch = heads.head_stride == head_dim;
    const int run = heads_touch ? num_elements : head_dim;
    const int head = heads_touch ? 0 : first / head_dim, in_run = first - head * head_dim;
    const T* from = heads.first + head * heads.head_stride + in_run;
    if (head < num_heads && in_run + num_words * 4 / int(sizeof(T)) <= run) {
      if (num_words == 4 && arch::at_once<4>(from)) return arch::load_words<4>(from);
      if (num_words == 2 && arch::at_once<2>(from)) return arch::load_words<2>(from);
      if (num_words == 1 && arch::at_once<1>(from)) return arch::load_words<1>(from);
    }
    return words_one_by_one(at, num_words, heads, lse);
  }

  // The same, slowly: LSEs; payload that an address or the end of a head divides; zeros behind either.
  template <class Lse>
  DCP_FN arch::Words16 words_one_by_one(int at, int num_words, const Heads<T>& heads, const Lse& lse) const {
    arch::Words16 words = {};
    if (at >= lse_in_row) {
      const int first = (at - lse_in_row) / 4;
      for (int i = 0; i < 4; ++i) {
        if (i < num_words && first + i < num_heads) words.word[i] = arch::bit_cast<uint32_t>(lse(first + i));
      }
      return words;
    }
    constexpr int kPerWord = 4 / int(sizeof(T));
    const int first = at / int(sizeof(T)), num_elements = num_heads * head_dim;
    int head = first / head_dim, d = first - head * head_dim;
    for (int i = 0; i < 4 * kPerWord; ++i) {
      if (i < num_words * kPerWord && first + i < num_elements) {
        const uint32_t bits = bits_of(heads.first[head * heads.head_stride + d]);
        words.word[i / kPerWord] |= bits << 16 * (i % kPerWord);
      }
      if (++d == head_dim) {
        d = 0;
        ++head;
      }
    }
    return words;
  }
  static DCP_FN uint32_t bits_of(float x) { return arch::bit_cast<uint32_t>(x); }
  template <class T16>
  static DCP_FN uint32_t bits_of(T16 x) {
    return x.bits;
  }
};

}  // namespace dcp::DCP_NS
