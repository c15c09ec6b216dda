// CUDA graphs of one rank's steps, and times by events.
#include <algorithm>

#include "device.h"

namespace one_card {

#if defined(DCP_TARGET_CUDA)

namespace {

class DeviceGraph : public Graph {
 public:
  template <class Body>
  DeviceGraph(Stream stream, const Body& body) {
    check(cudaStreamBeginCapture(handle(stream), cudaStreamCaptureModeThreadLocal), "begin capture");
    try {
      body();
    } catch (...) {
      cudaStreamEndCapture(handle(stream), &graph_);
      throw;
    }
    check(cudaStreamEndCapture(handle(stream), &graph_), "end capture");
    check(cudaGraphInstantiate(&exec_, graph_, 0), "instantiate");
    check(cudaGraphUpload(exec_, handle(stream)), "upload");  // else the first launch would do it, late
  }
  ~DeviceGraph() override {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  void launch(Stream stream) const override { check(cudaGraphLaunch(exec_, handle(stream)), "graph launch"); }
  size_t num_nodes() const override {
    size_t num = 0;
    check(cudaGraphGetNodes(graph_, nullptr, &num), "nodes");
    return num;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "event"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(Stream stream) { check(cudaEventRecord(event_, handle(stream)), "record"); }
  void hold(Stream stream) { check(cudaStreamWaitEvent(handle(stream), event_, 0), "wait for event"); }
  float us_since(const Event& start) const {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start.event_, event_), "elapsed");
    return 1000 * ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Keeps a stream busy for so long.
struct Busy {
  int64_t ns;
  CARD_FN void operator()(int64_t) const {
#if defined(__CUDA_ARCH__)
    int64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
#endif
  }
};

float slowest_us(const std::vector<Event>& starts, const std::vector<Event>& ends) {
  float slowest = 0;
  for (size_t rank = 0; rank < starts.size(); ++rank) {
    slowest = std::max(slowest, ends[rank].us_since(starts[rank]));
  }
  return slowest;
}

}  // namespace

GraphPtr capture(const Steps& steps, int rank, Stream stream, int num_rounds) {
  return std::make_shared<DeviceGraph>(stream, [&] {
    for (int i = 0; i < num_rounds; ++i) {
      for (const StepPtr& step : steps) {
        if (step->run(rank, stream) != dcp::Status::kOk) throw std::runtime_error("capture: not launched");
      }
    }
  });
}

void synchronize() { check(cudaDeviceSynchronize(), "synchronize"); }

// All of it is in the queues before any of it begins: else the first rank would be charged for the time that
// the host takes to get to the last one.
std::vector<float> time_graphs(const std::vector<GraphPtr>& graphs, const Streams& streams, Stream gate,
                               int num_samples) {
  const size_t num_ranks = streams.size();
  Event opened;
  std::vector<Event> starts(num_ranks), ends(num_ranks);
  std::vector<float> samples;
  for (int i = 0; i < num_samples; ++i) {
    for_each(gate, 1, Busy{int64_t(100 + 50 * num_ranks) * 1000});
    opened.record(gate);
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      opened.hold(streams[rank]);
      starts[rank].record(streams[rank]);
      graphs.at(rank)->launch(streams[rank]);
      ends[rank].record(streams[rank]);
    }
    synchronize();
    samples.push_back(slowest_us(starts, ends));
  }
  return samples;
}

// With the host's launches in the way, as in an engine without graphs.
std::vector<float> time_eager(const Steps& steps, const Streams& streams, int num_rounds, int num_samples) {
  const size_t num_ranks = streams.size();
  std::vector<Event> starts(num_ranks), ends(num_ranks);
  std::vector<float> samples;
  for (int i = 0; i < num_samples; ++i) {
    for (size_t rank = 0; rank < num_ranks; ++rank) starts[rank].record(streams[rank]);
    repeat(steps, streams, num_rounds);
    for (size_t rank = 0; rank < num_ranks; ++rank) ends[rank].record(streams[rank]);
    synchronize();
    samples.push_back(slowest_us(starts, ends));
  }
  return samples;
}

#else

GraphPtr capture(const Steps&, int, Stream, int) { throw std::runtime_error("a dry run has no graphs"); }
void synchronize() {}
std::vector<float> time_graphs(const std::vector<GraphPtr>&, const Streams&, Stream, int) { return {}; }
std::vector<float> time_eager(const Steps&, const Streams&, int, int) { return {}; }

#endif

}  // namespace one_card
