// Row arithmetic, by the lanes of one group: the weighted sum of an output row over the live shards.
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS {

template <class T, class Lanes>
DCP_FN void fill_row(const Lanes& lanes, T* row, int64_t num_elements, float value) {
  for (int64_t d = lanes.rank(); d < num_elements; d += lanes.size()) row[d] = arch::from_float<T>(value);
}

// kNumVecs neighbouring vectors at once: independent sums hide the latency of the fma chain over the shards.
template <int kNumVecs, bool kStream, class T>
DCP_FN void weighted_sum_block(T* out, const T* const* sources, const float* weights, int num_sources,
                               int64_t offset) {
  using Vec = arch::RowVec<T>;
  Vec sum[kNumVecs];
  for (int v = 0; v < kNumVecs; ++v) sum[v] = Vec::broadcast(0.0f);
  for (int s = 0; s < num_sources; ++s) {
    const Vec weight = Vec::broadcast(weights[s]);
    const T* source = sources[s] + offset;
    for (int v = 0; v < kNumVecs; ++v)
      sum[v] = arch::fma(weight, Vec::load(source + v * Vec::kElements), sum[v]);
  }
  for (int v = 0; v < kNumVecs; ++v) {
    T* to = out + offset + v * Vec::kElements;
    kStream ? sum[v].stream(to) : sum[v].store(to);
  }
}

// out[d] = sum_s weights[s] * sources[s][d], in the order of s, in fp32, rounded once to T. An element goes
// through the same operations whether it is computed in a block, in a vector or alone: hence the same bits.
// `streams`: the output is large, and goes past the caches where its address allows that.
template <class T, class Lanes>
DCP_FN void weighted_sum_row(const Lanes& lanes, T* out, const T* const* sources, const float* weights,
                             int num_sources, int64_t num_elements, bool streams) {
  constexpr int64_t kVec = arch::RowVec<T>::kElements, kBlock = arch::kRowBlock * kVec;
  const int64_t blocks_end = num_elements - num_elements % kBlock,
                vecs_end = num_elements - num_elements % kVec;
  if (streams && reinterpret_cast<uint64_t>(out) % arch::kStreamAlignment == 0) {
    for (int64_t d = lanes.rank() * kBlock; d < blocks_end; d += lanes.size() * kBlock) {
      weighted_sum_block<arch::kRowBlock, true>(out, sources, weights, num_sources, d);
    }
  } else {
    for (int64_t d = lanes.rank() * kBlock; d < blocks_end; d += lanes.size() * kBlock) {
      weighted_sum_block<arch::kRowBlock, false>(out, sources, weights, num_sources, d);
    }
  }
  for (int64_t d = blocks_end + lanes.rank() * kVec; d < vecs_end; d += lanes.size() * kVec) {
    weighted_sum_block<1, false>(out, sources, weights, num_sources, d);
  }
  for (int64_t d = vecs_end + lanes.rank(); d < num_elements; d += lanes.size()) {
    float sum = 0.0f;
    for (int s = 0; s < num_sources; ++s) sum = arch::fma(weights[s], arch::to_float(sources[s][d]), sum);
    out[d] = arch::from_float<T>(sum);
  }
}

}  // namespace dcp::DCP_NS
