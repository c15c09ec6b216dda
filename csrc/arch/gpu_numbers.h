// Both GPU targets: arithmetic. All of it is IEEE operations in a stated order, with no approximate function
// and no library: the same bits on both, and tests/isa runs it on the host. The target's header comes first
// and brings half_to_float, pack_half, pack_bfloat16, load_16 and store_16, and kUnaligned16.
#pragma once

namespace dcp::DCP_NS::arch {

// ---- scalars

template <class To, class From>
DCP_FN To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

DCP_FN float abs(float x) { return __builtin_fabsf(x); }
DCP_FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// The bits of the nearest bfloat16, ties to even, in the low half, for a target that has no instruction for
// it. A NaN stays one: its significand may be all in the half that goes.
DCP_FN uint32_t round_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
  return (x == x ? rounded : quiet) >> 16;
}

// 2^x for x <= 0: the CPU's algorithm and its bits (cpu_vec.h has the derivation). Relative error below
// 1.35 x 2^-24 down to 2^-126, and gradual underflow below.
DCP_FN float exp2(float x) {
  const float clamped = x > -152.0f ? x : -152.0f;  // -inf too: 2^-152 rounds to 0
  const float shifted = clamped + 0x1.8p23f;        // the integer is in the low bits of the significand
  const float n = shifted - 0x1.8p23f;
  const float f = clamped - n;
  float p = 0x1.41fbbcp-13f;
  p = fma(p, f, 0x1.5f3e52p-10f);
  p = fma(p, f, 0x1.3b2d4cp-7f);
  p = fma(p, f, 0x1.c6aee8p-5f);
  p = fma(p, f, 0x1.ebfbdcp-3f);
  p = fma(p, f, 0x1.62e430p-1f);
  p = fma(p, f, 1.0f);
  // Two factors of half the exponent: 2^-149 has no normal float, and the result is rounded once.
  const int32_t exponent = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(0x1.8p23f);
  const int32_t half = exponent >> 1;
  const float low = bit_cast<float>((half + 127) << 23),
              high = bit_cast<float>((exponent - half + 127) << 23);
  return (p * low) * high;
}

// log2 of a normal x > 0. x = 2^e m with m in [sqrt(1/2), sqrt(2)); log2(m) = f Q(f) with f = m - 1, which is
// exact, and a minimax Q (relative error 2^-25.6). The error is below 1.6 ulp of the result. The CPU goes
// through double instead, which a GPU has little of.
DCP_FN float log2(float x) {
  const int32_t bits = bit_cast<int32_t>(x);
  const int32_t e = (bits - 0x3f3504f3) >> 23;  // 0x3f3504f3: sqrt(1/2)
  const float f = bit_cast<float>(bits - (e << 23)) - 1.0f;
  float q = -0x1.c25a52p-4f;
  q = fma(q, f, 0x1.7d4942p-3f);
  q = fma(q, f, -0x1.874becp-3f);
  q = fma(q, f, 0x1.a305a8p-3f);
  q = fma(q, f, -0x1.eabc88p-3f);
  q = fma(q, f, 0x1.277e36p-2f);
  q = fma(q, f, -0x1.715a76p-2f);
  q = fma(q, f, 0x1.ec7096p-2f);
  q = fma(q, f, -0x1.715470p-1f);
  q = fma(q, f, 0x1.715476p+0f);
  return fma(q, f, float(e));
}

DCP_FN float to_float(float x) { return x; }
DCP_FN float to_float(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
DCP_FN float to_float(Half x) { return half_to_float(x.bits); }

template <class T>
DCP_FN T from_float(float x);
template <>
DCP_FN float from_float<float>(float x) {
  return x;
}
template <>
DCP_FN BFloat16 from_float<BFloat16>(float x) {
  return {uint16_t(pack_bfloat16(x, 0.0f))};
}
template <>
DCP_FN Half from_float<Half>(float x) {
  return {uint16_t(pack_half(x, 0.0f))};
}

// ---- vectors

DCP_FN float low_to_float(BFloat16, uint32_t word) { return bit_cast<float>(word << 16); }
DCP_FN float high_to_float(BFloat16, uint32_t word) { return bit_cast<float>(word & 0xffff0000u); }
DCP_FN float low_to_float(Half, uint32_t word) { return half_to_float(uint16_t(word)); }
DCP_FN float high_to_float(Half, uint32_t word) { return half_to_float(uint16_t(word >> 16)); }
DCP_FN uint32_t pack(BFloat16, float low, float high) { return pack_bfloat16(low, high); }
DCP_FN uint32_t pack(Half, float low, float high) { return pack_half(low, high); }

// 16 bytes of a row, as floats.
template <class T>
struct RowVec {
  static constexpr int kElements = 16 / sizeof(T);
  float v[kElements];

  static DCP_FN RowVec broadcast(float x) {
    RowVec out;
#pragma unroll
    for (int i = 0; i < kElements; ++i) out.v[i] = x;
    return out;
  }

  // A caller's tensor may start at any element, and many a GPU loads 16 bytes at a 16-byte boundary only. The
  // same for all lanes of a row, and the same bits either way.
  static DCP_FN RowVec load(const T* p) {
    RowVec out;
    if (kUnaligned16 || (reinterpret_cast<uint64_t>(p) & 15) == 0) {
      const Words16 words = load_16(p);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
          out.v[i] = bit_cast<float>(words.word[i]);
        } else {
          out.v[2 * i] = low_to_float(T{}, words.word[i]);
          out.v[2 * i + 1] = high_to_float(T{}, words.word[i]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) out.v[i] = to_float(load_global(p + i));
    }
    return out;
  }

  DCP_FN void store(T* p) const {
    if (kUnaligned16 || (reinterpret_cast<uint64_t>(p) & 15) == 0) {
      Words16 words;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
          words.word[i] = bit_cast<uint32_t>(v[i]);
        } else {
          words.word[i] = pack(T{}, v[2 * i], v[2 * i + 1]);
        }
      }
      store_16(p, words);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) store_global(p + i, from_float<T>(v[i]));
    }
  }
  DCP_FN void stream(T* p) const { store(p); }
};
template <class T>
DCP_FN RowVec<T> fma(const RowVec<T>& a, const RowVec<T>& b, const RowVec<T>& c) {
  RowVec<T> out;
#pragma unroll
  for (int i = 0; i < RowVec<T>::kElements; ++i) out.v[i] = fma(a.v[i], b.v[i], c.v[i]);
  return out;
}

// One vector a lane: neighbouring lanes then touch neighbouring 16 bytes, and other groups hide the latency.
inline constexpr int kRowBlock = 1;
template <int kBytes>
DCP_FN void prefetch(const void*, int64_t) {}
DCP_FN int heads_ahead(int64_t) { return 1; }

// One head a work item: a decode step has few rows, so their heads must spread over the groups of the CTA.
inline constexpr int kHeadTile = 1;

}  // namespace dcp::DCP_NS::arch
