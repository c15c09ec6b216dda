// What a workspace looks like from C++: addresses and numbers that Python owns.
#pragma once

#include <pybind11/pybind11.h>

#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "host/call.h"
#include "host/region.h"
#include "arch/test_build.h"
#include "host/variant.h"

namespace dcp {

namespace py = pybind11;

// What a call of an op or of the host comes to, beside dcp::Status.
inline constexpr int kOverlap = 100, kNoMemory = 101, kClosed = 102, kStaleBuffer = 103,
                     kChannelsMissing = 104, kNotStarted = 105, kNotWaited = 106;

struct Bytes {
  uint64_t begin;
  int64_t size;
};

inline bool overlap(const Bytes& a, const Bytes& b) {
  return a.size > 0 && b.size > 0 && a.begin < b.begin + uint64_t(b.size) &&
         b.begin < a.begin + uint64_t(a.size);
}

// Raises dcpkernels.errors.DcpUnsupported, with the cause, where the device cannot run kernels of this build.
inline void require_device(const Variant& variant, int device) {
  char fault[512];
  variant.device_fault(device, fault, sizeof(fault));
  if (fault[0] == '\0') return;
  const py::object error = py::module_::import("dcpkernels.errors").attr("DcpUnsupported");
  PyErr_SetObject(error.ptr(), error("target " + std::string(variant.name) + ": " + fault).ptr());
  throw py::error_already_set();
}

// The two buffers of one lane in pull mode, as the host sees them.
struct BufferPair {
  int last_used = 0;    // which one peers were to read last; it is the one that may still be in a cache
  int handed_out = -1;  // which one the caller may write, until the call that takes it
};

// One rank's end of a workspace. The regions stay mapped as long as it is used: dcpkernels/_direct.py sees
// to that.
class Endpoint {
 public:
  // `gather_bases`: where the buffers of the gathers lie, of each rank; `multicast` as in SymmView, of these
  // buffers. `reserved`: (address, bytes) of what the gathers hand out: no call's tensors may lie there.
  // Of a device whose memory the host cannot read: `bases_table`, its copy of `bases`, which the gathers
  // share; `host_control`, memory that both can read, which looks like the control words of a region: where
  // the host marks calls and kernels leave a fault. 0: the host does all that in the region.
  Endpoint(int rank, std::vector<uint64_t> bases, std::vector<uint64_t> gather_bases, uint64_t multicast,
           uint64_t bases_table, uint64_t host_control, int device,
           const std::vector<std::pair<uint64_t, int64_t>>& reserved, std::vector<int> socket_fds,
           const ControlLayout& control, int64_t timeout_ns, int64_t first_timeout_ns, int num_spins,
           int num_yields, const std::string& isa)
      : bases_(std::move(bases)),
        gather_bases_(std::move(gather_bases)),
        host_bases_(bases_.size(), host_control),
        socket_fds_(std::move(socket_fds)),
        control_(control),
        device_(device) {
    const int num_ranks = int(bases_.size());
    DCP_CHECK(num_ranks >= 1 && num_ranks <= kMaxRanks, num_ranks);
    DCP_CHECK(rank >= 0 && rank < num_ranks, rank);
    DCP_CHECK(socket_fds_.size() == bases_.size(), socket_fds_.size());
    DCP_CHECK(control.num_channels >= 1 && control.num_streams >= 1, control.num_channels);
    variant_ = find_variant(isa.c_str());
    if (variant_ == nullptr) throw py::value_error("this processor or build has no variant " + isa);
    require_device(*variant_, device);
    DCP_CHECK(gather_bases_.size() == bases_.size(), gather_bases_.size());
    DCP_CHECK((bases_table == 0) == (host_control == 0), host_control);
    const uint64_t* table = reinterpret_cast<const uint64_t*>(bases_table);
    symm_ = {table != nullptr ? table : bases_.data(), rank, num_ranks};
    gather_buffers_ = {table != nullptr ? table : gather_bases_.data(), rank, num_ranks, multicast};
    host_symm_ = {table != nullptr ? host_bases_.data() : bases_.data(), rank, num_ranks};
    for (const auto& [address, num_bytes] : reserved) reserved_.push_back({address, num_bytes});
    buffers_.resize(size_t(control.num_streams));
    wait_ = {timeout_ns, first_timeout_ns, num_spins, num_yields, nullptr, nullptr, nullptr};
    if (table == nullptr) {
      wait_.poll_host = &Endpoint::poll_host;
      wait_.poll_context = this;
    } else {
      wait_.host_fault = DCP_NS::symm_own<FaultRecord>(host_symm_, control.fault_offset);
    }
  }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // For kernels; the host reads control words of `host_symm` and asks `base` for addresses.
  const SymmView& symm() const { return symm_; }
  const SymmView& host_symm() const { return host_symm_; }
  uint64_t base() const { return bases_[size_t(symm_.rank)]; }
  // Whether kernels run after the call that enqueues them has returned.
  bool is_asynchronous() const { return wait_.host_fault != nullptr; }
  int device() const { return device_; }
  const SymmView& gather_buffers() const { return gather_buffers_; }
  bool is_reserved(const Bytes& bytes) const {
    for (const Bytes& reserved : reserved_) {
      if (overlap(bytes, reserved)) return true;
    }
    return false;
  }
  const ControlLayout& control() const { return control_; }
  const WaitPolicy& wait() const { return wait_; }
  const Variant& variant() const { return *variant_; }

  // Hands out a buffer of this stream: a Status or one of the codes above, and its index. Waits only when
  // peers still read in both.
  std::pair<int, int> hand_out_buffer(int stream_idx) {
    BufferPair& pair = buffers(stream_idx);
    if (!begin_call()) return {kClosed, -1};
    Status status = Status::kBusy;
    int buffer_idx = -1;
    if (DCP_NS::claim_call(host_symm_, control_, stream_idx)) {
      buffer_idx = free_buffer(stream_idx);
      {
        py::gil_scoped_release no_gil;
        status = DCP_NS::acquire_buffer(host_symm_, control_, wait_, stream_idx, buffer_idx);
      }
      DCP_NS::release_call(host_symm_, control_, stream_idx);
    }
    end_call();
    if (status != Status::kOk) {
      if (PyErr_Occurred() != nullptr) throw py::error_already_set();
      return {int(status), -1};
    }
    pair.handed_out = buffer_idx;
    return {0, buffer_idx};
  }
  // The buffer to write next: never the one that the caller still has; else the one used last if peers have
  // read it, as it is in the cache, else the other one.
  int free_buffer(int stream_idx) {
    const BufferPair& pair = buffers(stream_idx);
    if (pair.handed_out >= 0) return 1 - pair.handed_out;
    return DCP_NS::is_released(host_symm_, control_, stream_idx, pair.last_used) ? pair.last_used
                                                                                 : 1 - pair.last_used;
  }
  BufferPair& buffers(int stream_idx) {
    DCP_CHECK(stream_idx >= 0 && stream_idx < control_.num_streams, stream_idx);
    return buffers_[size_t(stream_idx)];
  }

  bool is_poisoned() const {
    require_open();
    return DCP_NS::is_poisoned(host_symm_, control_);
  }

  // Brings what the host reads up to date from `words`, a copy of the region's control words, and `record`,
  // one of the fault record of the rank that reported what they say, or "". A fault stays what it was; the
  // marks of calls are the host's own.
  void refresh(const std::string& words, const std::string& record) const {
    require_open();
    if (!is_asynchronous()) return;
    const uint64_t copy = reinterpret_cast<uint64_t>(words.data());
    const SymmView from = {&copy, 0, 1};
    DCP_CHECK(words.size() >= control_.flags_offset, words.size());
    for (int i = 0; i < control_.num_streams; ++i) {
      const StreamState* theirs = DCP_NS::stream_state(from, control_, 0, i);
      StreamState* mine = DCP_NS::stream_state(host_symm_, control_, symm_.rank, i);
      mine->epoch = theirs->epoch;
      mine->num_calls = theirs->num_calls;
      mine->nonfinite_lse = theirs->nonfinite_lse;
    }
    FaultRecord found = *DCP_NS::symm_own<FaultRecord>(from, control_.fault_offset);
    if (found.poison == 0 || DCP_NS::is_poisoned(host_symm_, control_)) return;
    if (record.size() == sizeof(found)) {
      const uint64_t poison = found.poison;
      std::memcpy(static_cast<void*>(&found), record.data(), sizeof(found));
      found.poison = poison;
    }
    DCP_NS::take_fault(found, DCP_NS::symm_own<FaultRecord>(host_symm_, control_.fault_offset));
  }

  // All of these are called with the GIL held, which orders them: a call is counted before it lets go of the
  // GIL, and a closed endpoint starts no call. So the regions may go once close() has said yes.
  bool begin_call() {
    if (!closed_) ++num_active_calls_;
    return !closed_;
  }
  void end_call() { --num_active_calls_; }
  bool close() {
    if (num_active_calls_ == 0) closed_ = true;
    return closed_;
  }
  void require_open() const { DCP_CHECK(!closed_, symm_.rank); }

 private:
  // Called by a waiting kernel, without the GIL. Only the main thread can be interrupted: elsewhere Python
  // would not run the handler anyway.
  static void poll_host(void* context, HostEvents* events) {
    const Endpoint& self = *static_cast<const Endpoint*>(context);
    events->lost_peers = DCP_NS::closed_sockets(self.socket_fds_.data(), self.symm_.num_ranks);
    if (getpid() == gettid()) {
      py::gil_scoped_acquire gil;
      events->interrupted = PyErr_CheckSignals() != 0;  // the exception stays set: the binding raises it
    }
  }

  std::vector<uint64_t> bases_, gather_bases_, host_bases_;
  std::vector<int> socket_fds_;
  ControlLayout control_;
  int device_;
  SymmView symm_, host_symm_, gather_buffers_;
  std::vector<Bytes> reserved_;
  WaitPolicy wait_;
  const Variant* variant_;
  std::vector<BufferPair> buffers_;
  int num_active_calls_ = 0;
  bool closed_ = false;
};

void bind_a2a_lse_reduce(py::module_& module);
void bind_query_gather(py::module_& module);
void bind_kv_gather(py::module_& module);
void bind_link_check(py::module_& module);

}  // namespace dcp
