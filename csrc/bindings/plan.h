// What every op's binding does around its kernel: one call at a time on a lane, channels in this thread or in
// somebody else's.
#pragma once

#include "bindings/handle.h"

namespace dcp {

// Bytes from a strided tensor's first element to its last one.
inline int64_t span_bytes(int64_t tokens, int64_t token_stride, int64_t heads, int64_t head_stride,
                          int64_t dim, int64_t size) {
  if (tokens == 0 || heads == 0 || dim == 0) return 0;
  return ((tokens - 1) * token_stride + (heads - 1) * head_stride + dim) * size;
}

// The calls of one op on one lane. While a call is in flight the plan belongs to it.
class Plan {
 public:
  Plan(Endpoint& endpoint, int stream_idx) : endpoint_(endpoint), stream_idx_(stream_idx) {
    DCP_CHECK(stream_idx >= 0 && stream_idx < endpoint.control().num_streams, stream_idx);
  }
  virtual ~Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

 protected:
  // Runs channels of the kernel, without the GIL.
  virtual Status launch(const Launch& channels) = 0;
  // The descriptor of the call in flight.
  virtual uint64_t call() const = 0;
  // No channel runs any more. `status` is the first of all channels that is not 0.
  // `is_whole`: all of them have run.
  virtual void finish(int status, bool is_whole) = 0;

  // `prepare()` takes the arguments once the lane is claimed: 0, or a code, and then nothing is run. `stream`
  // is the device's, whose order the call takes.
  template <class Prepare>
  int run(uint64_t stream, const Prepare& prepare) {
    const int code = begin(prepare);
    return code != 0 ? code : end(run_channels(0, num_channels(), stream), true);
  }

  // The same, where `parallel_for(num_channels, body)` calls body(first, end) for ranges of channels in any
  // threads. It is Python: it may raise at any point (Ctrl-C, no more threads), with channels running or not
  // yet begun, and they use the caller's tensors. So this returns when none runs, and none begins later; and
  // a call that not all channels have gone through ends on all ranks. `self` is the Python object of `plan`.
  template <class Prepare>
  static int run_in_threads(const py::object& self, Plan& plan, const py::function& parallel_for,
                            const Prepare& prepare) {
    const int code = plan.begin(prepare);
    if (code != 0) return code;
    plan.threads_ = {plan.threads_.call + 1, 0, 0, 0};
    std::exception_ptr error;
    try {
      const auto body = [self, &plan, call = plan.threads_.call](int first_channel, int end_channel) {
        plan.run_range(call, first_channel, end_channel);
      };
      parallel_for(plan.num_channels(), py::cpp_function(body));
    } catch (...) {
      error = std::current_exception();
    }
    ++plan.threads_.call;  // what begins now belongs to no call
    const bool is_whole = plan.threads_.num_begun == plan.num_channels();
    if (!is_whole || plan.threads_.num_running > 0) plan.abandon();
    while (plan.threads_.num_running > 0) {
      py::gil_scoped_release no_gil;
      usleep(100);
    }
    const int status = plan.end(is_whole ? plan.threads_.status : int(Status::kFaulted), is_whole);
    if (error) std::rethrow_exception(error);
    return is_whole ? status : kChannelsMissing;
  }

  int num_channels() const { return endpoint_.control().num_channels; }

  Endpoint& endpoint_;
  const int stream_idx_;

 private:
  template <class Prepare>
  int begin(const Prepare& prepare) {
    if (!endpoint_.begin_call()) return kClosed;
    int code = int(Status::kBusy);
    if (DCP_NS::claim_call(endpoint_.host_symm(), endpoint_.control(), stream_idx_)) {
      // A kernel that faulted has told nobody yet: its call returned before it ran.
      const bool is_faulted = endpoint_.is_asynchronous() && endpoint_.is_poisoned();
      code = is_faulted ? int(Status::kFaulted) : prepare();
      if (code != 0) DCP_NS::release_call(endpoint_.host_symm(), endpoint_.control(), stream_idx_);
    }
    if (code != 0) endpoint_.end_call();
    return code;
  }

  // Runs channels [first_channel, end_channel) in this thread, or enqueues them.
  int run_channels(int first_channel, int end_channel, uint64_t stream = 0) {
    Status status = Status::kOk;
    py::gil_scoped_release no_gil;
    if (!DCP_STUB_KERNEL) {
      status = launch({first_channel, end_channel, reinterpret_cast<void*>(stream), endpoint_.device()});
    }
    return int(status);
  }

  int end(int status, bool is_whole) {
    finish(status, is_whole);
    DCP_NS::release_call(endpoint_.host_symm(), endpoint_.control(), stream_idx_);
    endpoint_.end_call();
    if (status == int(Status::kFaulted) && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return status;
  }

  // `run_channels` for the body of call number `call`. Raises what a signal handler raised.
  void run_range(uint64_t call, int first_channel, int end_channel) {
    if (call != threads_.call) return;
    DCP_CHECK(0 <= first_channel && first_channel <= end_channel && end_channel <= num_channels(),
              end_channel);
    threads_.num_begun += end_channel - first_channel;
    ++threads_.num_running;
    const int status = run_channels(first_channel, end_channel);
    --threads_.num_running;
    if (status != 0) threads_.status = status;
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  }

  // Ends the call on all ranks, and soon in channels of this rank that still run.
  void abandon() { DCP_NS::abandon_call(endpoint_.host_symm(), endpoint_.control(), stream_idx_, call()); }

  // Of `run_in_threads`; like all of a plan, guarded by the GIL.
  struct {
    uint64_t call;
    int num_begun, num_running, status;  // channels; ranges; the first of all runs that is not 0
  } threads_ = {};
};

}  // namespace dcp
