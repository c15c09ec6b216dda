// A row of packets: the row's LSEs first, then head after head; each head starts a new packet. Packets need
// no order between them: every one bears the epoch of its round.
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS {

template <class T, int kBytes>
struct PacketRow {
  using Packet = arch::Packet<kBytes>;
  static constexpr int kPerWord = 4 / sizeof(T);
  static constexpr int kPerPacket = Packet::kWords * kPerWord;

  int num_heads, head_dim;

  DCP_FN int num_lse_packets() const { return (num_heads + Packet::kWords - 1) / Packet::kWords; }
  DCP_FN int packets_per_head() const { return (head_dim + kPerPacket - 1) / kPerPacket; }
  DCP_FN int num_packets() const { return num_lse_packets() + num_heads * packets_per_head(); }

  // Which elements packet `idx` holds: LSEs from `first` on when head < 0, else elements of one head.
  struct Content {
    int head, first, num_elements;
  };
  DCP_FN Content content(int idx) const {
    if (idx < num_lse_packets()) return {-1, idx * Packet::kWords, num_heads - idx * Packet::kWords};
    const int payload_idx = idx - num_lse_packets(), head = payload_idx / packets_per_head();
    const int first = (payload_idx - head * packets_per_head()) * kPerPacket;
    return {head, first, head_dim - first};
  }

  // Stores packet `idx`. `lse(h)` and `source(h)` are the LSE and the first element of head h.
  template <class Lse, class Source>
  DCP_FN void store(char* row, int idx, uint32_t flag, const Lse& lse, const Source& source) const {
    const Content c = content(idx);
    char* packet = row + int64_t(idx) * kBytes;
    if (c.head < 0) {
      Packet::store(packet, flag, [&](int i) {
        return i < c.num_elements ? arch::bit_cast<uint32_t>(lse(c.first + i)) : 0u;
      });
    } else {
      const T* from = source(c.head) + c.first;
      Packet::store(packet, flag,
                    [&](int i) { return pack(from + i * kPerWord, c.num_elements - i * kPerWord); });
    }
  }

  // True when packet `idx` bears `flag`: its elements are then in `lse` [num_heads] or `payload` [num_heads,
  // head_dim].
  DCP_FN bool try_load(const char* row, int idx, uint32_t flag, float* lse, T* payload) const {
    const Content c = content(idx);
    const char* packet = row + int64_t(idx) * kBytes;
    if (c.head < 0) {
      return Packet::try_load(packet, flag, [&](int i, uint32_t word) {
        if (i < c.num_elements) lse[c.first + i] = arch::bit_cast<float>(word);
      });
    }
    T* to = payload + int64_t(c.head) * head_dim + c.first;
    return Packet::try_load(packet, flag, [&](int i, uint32_t word) {
      unpack(to + i * kPerWord, c.num_elements - i * kPerWord, word);
    });
  }

 private:
  static DCP_FN uint32_t pack(const T* elements, int num_left) {
    if (num_left <= 0) return 0;
    if constexpr (kPerWord == 1) {
      return arch::bit_cast<uint32_t>(elements[0]);
    } else {
      const uint32_t high = num_left > 1 ? arch::bit_cast<uint16_t>(elements[1]) : 0;
      return high << 16 | arch::bit_cast<uint16_t>(elements[0]);
    }
  }
  static DCP_FN void unpack(T* elements, int num_left, uint32_t word) {
    if (num_left <= 0) return;
    if constexpr (kPerWord == 1) {
      elements[0] = arch::bit_cast<T>(word);
    } else {
      elements[0] = arch::bit_cast<T>(uint16_t(word));
      if (num_left > 1) elements[1] = arch::bit_cast<T>(uint16_t(word >> 16));
    }
  }
};

}  // namespace dcp::DCP_NS
