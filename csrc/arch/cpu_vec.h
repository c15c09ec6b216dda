// CPU target: arithmetic. Every variant gives the same bits: each operation here is one correctly rounded
// IEEE operation (fma, conversion to nearest even), whatever the instruction set; exp2 is built of them.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstring>

#include "core/types.h"

namespace dcp::DCP_NS::arch {

// ---- scalars

template <class To, class From>
DCP_FN To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

DCP_FN float abs(float x) { return __builtin_fabsf(x); }

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
DCP_FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// The product of two floats is exact in a double. Their sum with c is rounded to odd (Boldo and Melquiond,
// "Emulation of FMA and correctly rounded sums", 2008), so that the second rounding, to float, sees on which
// side of a tie it is.
DCP_FN float fma(float a, float b, float c) {
  const double product = double(a) * double(b), addend = double(c);
  const double sum = product + addend;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (addend - back);
  uint64_t bits = bit_cast<uint64_t>(sum);
  const bool finite = (bits & 0x7ff0000000000000u) != 0x7ff0000000000000u;
  if (finite && error != 0.0 && (bits & 1) == 0) bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
  return float(bit_cast<double>(bits));
}
#endif

// 2^x for x <= 0, relative error below 1.35 x 2^-24 down to 2^-126, and gradual underflow below. x = n + f
// with |f| <= 1/2; 2^f by a minimax polynomial (relative error 2^-28.9).
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

DCP_FN float log2(float x) { return float(__builtin_log2(double(x))); }

DCP_FN float bfloat16_to_float(uint16_t bits) { return bit_cast<float>(uint32_t(bits) << 16); }

// Exact. Subnormals are made from the integer, so that a host thread that flushes fp32 subnormals changes
// nothing.
DCP_FN float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
  if (exponent == 0) return bit_cast<float>(bit_cast<uint32_t>(float(fraction) * 0x1p-24f) | sign);
  const uint32_t biased = exponent == 31 ? 255 : exponent + 112;
  return bit_cast<float>(sign | biased << 23 | fraction << 13);
}

DCP_FN uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

DCP_FN uint16_t float_to_half(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));  // NaN, quiet
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);                             // 65520 and up
  if (magnitude < 0x38800000) {
    // Subnormal: the sum with 0.5 has the half's last bit as its own last bit, and rounds to nearest even
    // there.
    const float sum = bit_cast<float>(magnitude) + 0.5f;
    return uint16_t(sign | (bit_cast<uint32_t>(sum) - 0x3f000000));
  }
  return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

DCP_FN float to_float(float x) { return x; }
DCP_FN float to_float(BFloat16 x) { return bfloat16_to_float(x.bits); }
DCP_FN float to_float(Half x) { return half_to_float(x.bits); }

template <class T>
DCP_FN T from_float(float x);
template <>
DCP_FN float from_float<float>(float x) {
  return x;
}
template <>
DCP_FN BFloat16 from_float<BFloat16>(float x) {
  return {float_to_bfloat16(x)};
}
template <>
DCP_FN Half from_float<Half>(float x) {
  return {float_to_half(x)};
}

// ---- vectors
//
// RowVec<T> holds kElements consecutive elements of a row as floats. Only load and store know in which order
// they lie: 16-bit formats keep the even and the odd elements apart, which costs a shift and a mask where
// widening in order would cost two shuffles.

#if defined(__AVX512F__) && defined(__AVX512BW__)

struct FloatVec {
  static constexpr int kLanes = 16;
  __m512 v;

  static DCP_FN FloatVec broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static DCP_FN FloatVec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  DCP_FN void store(float* p) const { _mm512_storeu_ps(p, v); }
};
DCP_FN FloatVec fma(FloatVec a, FloatVec b, FloatVec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

template <bool kStream>
DCP_FN void store_bytes(void* p, __m512i bytes) {
  kStream ? _mm512_stream_si512(static_cast<__m512i*>(p), bytes) : _mm512_storeu_si512(p, bytes);
}

DCP_FN void load_pair(const BFloat16* p, FloatVec& even, FloatVec& odd) {
  const __m512i bits = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000))));
}
DCP_FN __m512i round_to_high_half(FloatVec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
}
DCP_FN __m512i round_pair(FloatVec even, FloatVec odd) {
  __m512i low = round_to_high_half(even), high = round_to_high_half(odd);
  if (__builtin_expect(_mm512_cmp_ps_mask(even.v, odd.v, _CMP_UNORD_Q) != 0, 0)) {
    const __m512i nan = _mm512_set1_epi32(0x7fc00000);
    low = _mm512_mask_mov_epi32(low, _mm512_cmp_ps_mask(even.v, even.v, _CMP_UNORD_Q), nan);
    high = _mm512_mask_mov_epi32(high, _mm512_cmp_ps_mask(odd.v, odd.v, _CMP_UNORD_Q), nan);
  }
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
}
#if defined(__AVX512BF16__)
// The instruction rounds as above, but takes subnormals for 0 and keeps payloads of NaNs: a vector with one
// of these goes the long way. Zeros do not: they are right, and common.
template <bool kStream = false>
DCP_FN void store_pair(BFloat16* p, FloatVec even, FloatVec odd) {
  constexpr int kQuietNan = 0x01, kSubnormal = 0x20, kSignallingNan = 0x80;
  constexpr int kHard = kQuietNan | kSubnormal | kSignallingNan;
  const __mmask16 hard_even = _mm512_fpclass_ps_mask(even.v, kHard);
  const __mmask16 hard_odd = _mm512_fpclass_ps_mask(odd.v, kHard);
  if (__builtin_expect(!_mm512_kortestz(hard_even, hard_odd), 0)) {
    return store_bytes<kStream>(p, round_pair(even, odd));
  }
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v);  // all the even ones, then all the odd
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  store_bytes<kStream>(p, _mm512_permutexvar_epi16(order, halves));
}
#else
template <bool kStream = false>
DCP_FN void store_pair(BFloat16* p, FloatVec even, FloatVec odd) {
  store_bytes<kStream>(p, round_pair(even, odd));
}
#endif

DCP_FN void load_pair(const Half* p, FloatVec& first, FloatVec& second) {
  first.v = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  second.v = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + 1));
}
template <bool kStream = false>
DCP_FN void store_pair(Half* p, FloatVec first, FloatVec second) {
  const __m256i low = _mm512_cvtps_ph(first.v, _MM_FROUND_TO_NEAREST_INT);
  const __m256i high = _mm512_cvtps_ph(second.v, _MM_FROUND_TO_NEAREST_INT);
  store_bytes<kStream>(p, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct FloatVec {
  static constexpr int kLanes = 8;
  __m256 v;

  static DCP_FN FloatVec broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static DCP_FN FloatVec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  DCP_FN void store(float* p) const { _mm256_storeu_ps(p, v); }
};
DCP_FN FloatVec fma(FloatVec a, FloatVec b, FloatVec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }

template <bool kStream>
DCP_FN void store_bytes(void* p, __m256i bytes) {
  __m256i* to = static_cast<__m256i*>(p);
  kStream ? _mm256_stream_si256(to, bytes) : _mm256_storeu_si256(to, bytes);
}

DCP_FN void load_pair(const BFloat16* p, FloatVec& even, FloatVec& odd) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even.v = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  odd.v = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0xffff0000))));
}
DCP_FN __m256i round_to_high_half(FloatVec x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
}
template <bool kStream = false>
DCP_FN void store_pair(BFloat16* p, FloatVec even, FloatVec odd) {
  __m256i low = round_to_high_half(even), high = round_to_high_half(odd);
  if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(even.v, odd.v, _CMP_UNORD_Q)) != 0, 0)) {
    const __m256i nan = _mm256_set1_epi32(0x7fc00000);
    low = _mm256_blendv_epi8(low, nan, _mm256_castps_si256(_mm256_cmp_ps(even.v, even.v, _CMP_UNORD_Q)));
    high = _mm256_blendv_epi8(high, nan, _mm256_castps_si256(_mm256_cmp_ps(odd.v, odd.v, _CMP_UNORD_Q)));
  }
  const __m256i both = _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, 0xaa);
  store_bytes<kStream>(p, both);
}

DCP_FN void load_pair(const Half* p, FloatVec& first, FloatVec& second) {
  first.v = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  second.v = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + 1));
}
template <bool kStream = false>
DCP_FN void store_pair(Half* p, FloatVec first, FloatVec second) {
  const __m128i low = _mm256_cvtps_ph(first.v, _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm256_cvtps_ph(second.v, _MM_FROUND_TO_NEAREST_INT);
  store_bytes<kStream>(p, _mm256_set_m128i(high, low));
}

#else  // any other CPU: four scalars, which the compiler may turn into one vector

struct FloatVec {
  static constexpr int kLanes = 4;
  float v[kLanes];

  static DCP_FN FloatVec broadcast(float x) { return {{x, x, x, x}}; }
  static DCP_FN FloatVec load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  DCP_FN void store(float* p) const { memcpy(p, v, sizeof(v)); }
};
DCP_FN FloatVec fma(FloatVec a, FloatVec b, FloatVec c) {
  FloatVec out;
  for (int i = 0; i < FloatVec::kLanes; ++i) out.v[i] = fma(a.v[i], b.v[i], c.v[i]);
  return out;
}

template <class T>
DCP_FN void load_pair(const T* p, FloatVec& first, FloatVec& second) {
  for (int i = 0; i < FloatVec::kLanes; ++i) first.v[i] = to_float(p[i]);
  for (int i = 0; i < FloatVec::kLanes; ++i) second.v[i] = to_float(p[FloatVec::kLanes + i]);
}
template <bool kStream = false, class T>
DCP_FN void store_pair(T* p, FloatVec first, FloatVec second) {
  for (int i = 0; i < FloatVec::kLanes; ++i) p[i] = from_float<T>(first.v[i]);
  for (int i = 0; i < FloatVec::kLanes; ++i) p[FloatVec::kLanes + i] = from_float<T>(second.v[i]);
}

#endif

DCP_FN void load_pair(const float* p, FloatVec& first, FloatVec& second) {
  first = FloatVec::load(p);
  second = FloatVec::load(p + FloatVec::kLanes);
}
template <bool kStream = false>
DCP_FN void store_pair(float* p, FloatVec first, FloatVec second) {
  first.store(p);
  second.store(p + FloatVec::kLanes);
}

template <class T>
struct RowVec {
  static constexpr int kElements = 2 * FloatVec::kLanes;
  FloatVec first, second;

  static DCP_FN RowVec broadcast(float x) { return {FloatVec::broadcast(x), FloatVec::broadcast(x)}; }
  static DCP_FN RowVec load(const T* p) {
    RowVec out;
    load_pair(p, out.first, out.second);
    return out;
  }
  DCP_FN void store(T* p) const { store_pair(p, first, second); }
  // Past the caches, to a multiple of kStreamAlignment; complete after streams_done().
  DCP_FN void stream(T* p) const { store_pair<true>(p, first, second); }
};

inline constexpr int kStreamAlignment = 64;

// Whether an output of so many bytes goes past the caches: one that is larger than half an L2 would first be
// read into it, line by line, only to be overwritten, and push the inputs out. (T = 64: a fifth of the time
// of 2 ranks, a tenth of 8 ranks with zero copy.)
DCP_FN bool streams_output([[maybe_unused]] int64_t num_bytes) {
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__SANITIZE_THREAD__)
  return num_bytes > int64_t(1) << 19;
#else
  return false;
#endif
}
DCP_FN void streams_done() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}
template <class T>
DCP_FN RowVec<T> fma(RowVec<T> a, RowVec<T> b, RowVec<T> c) {
  return {fma(a.first, b.first, c.first), fma(a.second, b.second, c.second)};
}

// Vectors of a row that are summed side by side: enough independent fma chains to fill the pipeline.
inline constexpr int kRowBlock = 2;

// The rows of a sum are streams in the memory of as many ranks, which jump from head to head and from row to
// row: a processor's own prefetcher follows few of them. A prefetch of what does not exist never faults.
// (8 ranks on 2 cores: a tenth of the time of the sums.)
template <int kBytes>
DCP_FN void prefetch(const void* from, int64_t offset) {
  constexpr uint64_t kLine = 64;
  const uint64_t first = reinterpret_cast<uint64_t>(from) + uint64_t(offset);
  for (uint64_t i = 0; i < kBytes; i += kLine) __builtin_prefetch(reinterpret_cast<const void*>(first + i));
}
// At least a KiB of each source: of less the memory's latency is longer than the sum.
DCP_FN int heads_ahead(int64_t head_bytes) { return head_bytes >= 1024 ? 1 : int(1024 / head_bytes); }

// Heads whose weights are computed side by side: a constant that the compiler turns into vectors.
#if !defined(DCP_HEAD_TILE)  // a test build has another one, for the way that GPUs go
#define DCP_HEAD_TILE 16
#endif
inline constexpr int kHeadTile = DCP_HEAD_TILE;

}  // namespace dcp::DCP_NS::arch
