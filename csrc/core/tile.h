// Row arithmetic, by the lanes of one group: where the shards of a tile are, their weights, and the weighted
// sum of an output row over the live ones.
#pragma once

#include "arch/target.h"
#include "core/lse.h"

namespace dcp::DCP_NS {

// The part of a table [num_shards][kHeadTile] that a lane works on: some heads of a tile; where a tile is one
// head, some of its shards, whose loads then cost one trip to memory.
struct LanePart {
  static constexpr bool kByHead = arch::kHeadTile > 1;
  template <class Lanes>
  DCP_FN explicit LanePart(const Lanes& lanes)
      : first_shard(kByHead ? 0 : lanes.rank()),
        shard_step(kByHead ? 1 : lanes.size()),
        first_head(kByHead ? lanes.rank() : 0),
        head_step(kByHead ? lanes.size() : 1) {}
  const int first_shard, shard_step, first_head, head_step;
};

// weight[s][h] holds LSEs, each written by the lane whose part it is, -inf for an empty shard; it becomes
// exp(lse - max) / sum, 0 for an empty one. `max` and `sum` of the lane's heads come with it. Every head is
// summed over the shards in rank order. The loops over heads are the inner ones and have no branches: of such
// loops the compiler makes vectors. Not a sync at its end.
template <class Lanes>
DCP_FN void weights_of_lses(const Lanes& lanes, const LanePart& part, int num_shards, LseBase base,
                            float (*weight)[arch::kHeadTile], float (&max)[arch::kHeadTile],
                            float (&sum)[arch::kHeadTile]) {
  const float log2_of_base = base == LseBase::kE ? kLog2E : 1.0f;
  if (!LanePart::kByHead) lanes.sync();
  for (int h = part.first_head; h < arch::kHeadTile; h += part.head_step) {
    max[h] = weight[0][h];
    sum[h] = 0.0f;
  }
  for (int s = 1; s < num_shards; ++s) {
    for (int h = part.first_head; h < arch::kHeadTile; h += part.head_step) {
      max[h] = weight[s][h] > max[h] ? weight[s][h] : max[h];
    }
  }
  for (int h = part.first_head; h < arch::kHeadTile; h += part.head_step) {
    if (!is_finite(max[h])) max[h] = 0.0f;  // all empty: -inf - 0, no NaN
  }
  if (!LanePart::kByHead) lanes.sync();  // all have read what each now overwrites
  for (int s = part.first_shard; s < num_shards; s += part.shard_step) {
    for (int h = part.first_head; h < arch::kHeadTile; h += part.head_step) {
      weight[s][h] = lse_exp(weight[s][h] - max[h], log2_of_base);
    }
  }
  if (!LanePart::kByHead) lanes.sync();
  for (int s = 0; s < num_shards; ++s) {
    for (int h = part.first_head; h < arch::kHeadTile; h += part.head_step) sum[h] += weight[s][h];
  }
  if (!LanePart::kByHead) lanes.sync();
  for (int s = part.first_shard; s < num_shards; s += part.shard_step) {
    for (int h = part.first_head; h < arch::kHeadTile; h += part.head_step) {
      weight[s][h] *= sum[h] > 0.0f ? 1.0f / sum[h] : 0.0f;
    }
  }
}

// Heads [first_head, first_head + num_heads) of one row, num_heads <= kHeadTile.
struct Tile {
  int64_t row;    // of the staging
  int64_t token;  // of the tensors
  int first_head;
  int num_heads;
};

// Where a shard's rows of this rank's heads lie: row 0 of the round, first head. Strides in elements.
struct ShardRows {
  const void* first;
  int64_t row_stride, head_stride;
};

// Lists the shards of one head that have weight, in rank order. The others drop out: what they hold is never
// read, and 0 x NaN never happens.
template <class T>
DCP_FN int list_live(const ShardRows* shards, int num_ranks, const Tile& tile, int h,
                     const float (*weight)[arch::kHeadTile], float* live_weight, const void** live_source) {
  int num_live = 0;
  for (int s = 0; s < num_ranks; ++s) {
    if (weight[s][h] == 0.0f) continue;
    live_weight[num_live] = weight[s][h];
    live_source[num_live] = static_cast<const T*>(shards[s].first) + tile.row * shards[s].row_stride +
                            (tile.first_head + h) * shards[s].head_stride;
    ++num_live;
  }
  return num_live;
}

// How far behind one head of a peer's rows lies what comes a little later, in elements: another head of the
// row, or one of the next row.
template <class T>
DCP_FN int64_t next_read(const ShardRows& shard, int head, int num_heads, int64_t head_dim,
                         int64_t row_step) {
  const int num_ahead = arch::heads_ahead(head_dim * int64_t(sizeof(T)));
  const bool is_next_row = head + num_ahead >= num_heads;
  return num_ahead * shard.head_stride +
         (is_next_row ? row_step * shard.row_stride - num_heads * shard.head_stride : 0);
}

template <class T, class Lanes>
DCP_FN void fill_row(const Lanes& lanes, T* row, int64_t num_elements, float value) {
  for (int64_t d = lanes.rank(); d < num_elements; d += lanes.size()) row[d] = arch::from_float<T>(value);
}

// kNumVecs neighbouring vectors at once: independent sums hide the latency of the fma chain over the shards.
template <int kNumVecs, bool kStream, class T>
DCP_FN void weighted_sum_block(T* out, const T* const* sources, const float* weights, int num_sources,
                               int64_t offset, int64_t next_read) {
  using Vec = arch::RowVec<T>;
  Vec sum[kNumVecs];
  for (int v = 0; v < kNumVecs; ++v) sum[v] = Vec::broadcast(0.0f);
  DCP_UNROLL_LOADS
  for (int s = 0; s < num_sources; ++s) {
    const Vec weight = Vec::broadcast(weights[s]);
    const T* source = sources[s] + offset;
    arch::prefetch<kNumVecs * Vec::kElements * sizeof(T)>(source, next_read * int64_t(sizeof(T)));
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
// `next_read`: so many elements behind `sources` lies what will be read next. `streams`: the output is large,
// and goes past the caches where its address allows that.
template <class T, class Lanes>
DCP_FN void weighted_sum_row(const Lanes& lanes, T* out, const T* const* sources, const float* weights,
                             int num_sources, int64_t num_elements, int64_t next_read, bool streams) {
  constexpr int64_t kVec = arch::RowVec<T>::kElements, kBlock = arch::kRowBlock * kVec;
  const int64_t blocks_end = num_elements - num_elements % kBlock,
                vecs_end = num_elements - num_elements % kVec;
  if (streams && reinterpret_cast<uint64_t>(out) % arch::kStreamAlignment == 0) {
    for (int64_t d = lanes.rank() * kBlock; d < blocks_end; d += lanes.size() * kBlock) {
      weighted_sum_block<arch::kRowBlock, true>(out, sources, weights, num_sources, d, next_read);
    }
  } else {
    for (int64_t d = lanes.rank() * kBlock; d < blocks_end; d += lanes.size() * kBlock) {
      weighted_sum_block<arch::kRowBlock, false>(out, sources, weights, num_sources, d, next_read);
    }
  }
  for (int64_t d = blocks_end + lanes.rank() * kVec; d < vecs_end; d += lanes.size() * kVec) {
    weighted_sum_block<1, false>(out, sources, weights, num_sources, d, next_read);
  }
  for (int64_t d = vecs_end + lanes.rank(); d < num_elements; d += lanes.size()) {
    float sum = 0.0f;
    for (int s = 0; s < num_sources; ++s) {
      sum = arch::fma(weights[s], arch::to_float(arch::pointer_to(sources[s])[d]), sum);
    }
    out[d] = arch::from_float<T>(sum);
  }
}

}  // namespace dcp::DCP_NS
