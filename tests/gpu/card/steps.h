// What a virtual rank does: ops, and the steps around them that fill, check, copy and compare. A step holds
// the parameters of every rank; run(rank, stream) enqueues one rank's part. Steps run on streams of a CUDA
// device, or, in a dry run, in threads of the host: nothing here asks which.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/a2a_lse_reduce.h"
#include "ops/kv_gather.h"
#include "ops/query_gather.h"

namespace one_card {

extern const bool kHasDevice;
using Stream = uint64_t;  // a cudaStream_t; 0 in a dry run

class Step {
 public:
  virtual ~Step() = default;
  virtual int num_ranks() const = 0;
  virtual dcp::Status run(int rank, Stream stream) = 0;
  // All ranks in one grid. Throws where a step has no such kernel.
  virtual dcp::Status run_one_grid(Stream stream);
};
using StepPtr = std::shared_ptr<Step>;
using Steps = std::vector<StepPtr>;
using Streams = std::vector<Stream>;

StepPtr a2a_step(std::vector<dcp::A2aLseReduceParams> ranks);
StepPtr merge_step(std::vector<dcp::A2aLseReduceParams> ranks);
StepPtr query_step(std::vector<dcp::QueryGatherParams> ranks);
StepPtr kv_start_step(std::vector<dcp::KvGatherParams> ranks);
StepPtr kv_wait_step(std::vector<dcp::KvGatherParams> ranks);

// Payload that says which round, rank and element it belongs to, in fp32. One rank's tensors, contiguous:
// [T, H, D] and [T, H]; [T, H / W, D] and [T, H / W].
struct Pattern {
  float *partial_out, *partial_lse, *out, *out_lse;
  const uint64_t* epoch;  // of the last completed round of the op's stream, in the rank's region
  uint64_t* errors;       // count; epoch and index of the first one
  int64_t num_tokens;
  int32_t num_heads, head_dim, rank, num_ranks;
};
StepPtr fill_step(std::vector<Pattern> ranks);   // the input of the round that comes
StepPtr check_step(std::vector<Pattern> ranks);  // the result of the round that was

// Of each rank: `num_bytes` from `from` to `to`.
struct Bytes {
  uint64_t to, from;
  int64_t num_bytes;
};
StepPtr copy_step(std::vector<Bytes> ranks);
// Counts in errors[rank][0] what differs, in units of 2 bytes.
StepPtr compare_step(std::vector<Bytes> ranks, std::vector<uint64_t> errors);

// An empty kernel: what any launch costs.
StepPtr empty_step(int num_ranks);

// Makes the steps `num_rounds` times on every rank; the first status of each rank that is not 0. On a device
// the host goes from rank to rank, so that none is farther ahead of another in the queues than one round.
std::vector<int> repeat(const Steps& steps, const Streams& streams, int num_rounds);

// -- of a device only; in a dry run they throw

class Graph {
 public:
  virtual ~Graph() = default;
  virtual void launch(Stream stream) const = 0;
  virtual size_t num_nodes() const = 0;
};
using GraphPtr = std::shared_ptr<Graph>;

GraphPtr capture(const Steps& steps, int rank, Stream stream, int num_rounds);
void synchronize();
// Microseconds of each sample, of the slowest rank.
std::vector<float> time_graphs(const std::vector<GraphPtr>& graphs, const Streams& streams, Stream gate,
                               int num_samples);
std::vector<float> time_eager(const Steps& steps, const Streams& streams, int num_rounds, int num_samples);

}  // namespace one_card
