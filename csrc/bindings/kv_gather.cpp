// Binding of kv_gather: the chunks of one lane, one after the other, each started and then waited for.
#include <pybind11/stl.h>

#include "bindings/plan.h"

namespace dcp {
namespace {

class KvGatherLane : public Plan {
 public:
  KvGatherLane(Endpoint& endpoint, int lane, int stream_idx, uint64_t buffer_offset, uint64_t buffer_bytes)
      : Plan(endpoint, stream_idx), fns_(endpoint.variant().kv_gather()), lane_(lane) {
    p_.buffer_offset = buffer_offset;
    p_.buffer_bytes = buffer_bytes;
    p_.stream_idx = stream_idx;
    p_.symm = endpoint.symm();
    p_.buffers = endpoint.gather_buffers();
    p_.control = endpoint.control();
    p_.wait = endpoint.wait();
  }

  // This rank's part of a chunk. Strides in bytes; source_rows and final_rows: addresses of int64
  // [num_source_rows].
  struct Source {
    int dtype;  // csrc/core/types.h: DType
    int64_t block_size, block_stride, row_stride, row_bytes;
    uint64_t source_rows, final_rows;
    int64_t num_source_rows;
    int64_t cache_bytes;  // from the first row to the last one
  };
  int start(uint64_t cache, const Source& source, int64_t chunk_idx, uint32_t plan_digest, uint64_t stream) {
    return run(stream, [&] { return prepare_start(cache, source, chunk_idx, plan_digest); });
  }
  static int start_in_threads(const py::object& self, const py::function& parallel_for, uint64_t cache,
                              const Source& source, int64_t chunk_idx, uint32_t plan_digest) {
    KvGatherLane& lane = self.cast<KvGatherLane&>();
    return run_in_threads(self, lane, parallel_for,
                          [&] { return lane.prepare_start(cache, source, chunk_idx, plan_digest); });
  }

  // `out`: address of the bf16 tensor to convert into, out_stride its row stride in bytes; 0: none. `scale`
  // as in QueryGatherPlan.
  int wait(int64_t chunk_idx, uint32_t plan_digest, int64_t num_rows, uint64_t out, int64_t out_stride,
           uint64_t scale, float scale_value, uint64_t stream) {
    return run(stream, [&] {
      return prepare_wait(chunk_idx, plan_digest, num_rows, out, out_stride, scale, scale_value);
    });
  }
  static int wait_in_threads(const py::object& self, const py::function& parallel_for, int64_t chunk_idx,
                             uint32_t plan_digest, int64_t num_rows, uint64_t out, int64_t out_stride,
                             uint64_t scale, float scale_value) {
    KvGatherLane& lane = self.cast<KvGatherLane&>();
    return run_in_threads(self, lane, parallel_for, [&] {
      return lane.prepare_wait(chunk_idx, plan_digest, num_rows, out, out_stride, scale, scale_value);
    });
  }

  // Both at once, of a chunk that stays in the buffer.
  int whole(uint64_t cache, const Source& source, int64_t chunk_idx, uint32_t plan_digest, int64_t num_rows,
            uint64_t stream) {
    return run(stream, [&] {
      int code = prepare_start(cache, source, chunk_idx, plan_digest);
      if (code == 0) code = prepare_result(num_rows, 0, 0, 0, 1.0f);
      part_ = Part::kWhole;
      return code;
    });
  }

  int buffer_idx() const { return p_.buffer_idx; }  // of the chunk that was started last

 private:
  int prepare_start(uint64_t cache, const Source& source, int64_t chunk_idx, uint32_t plan_digest) {
    if (is_started_) return kNotWaited;
    if (source.num_source_rows > 0 && cache == 0) return kNoMemory;
    if (endpoint_.is_reserved({cache, source.cache_bytes})) return kOverlap;
    p_.cache = reinterpret_cast<const void*>(cache);
    p_.dtype = DType(source.dtype);
    p_.block_size = source.block_size;
    p_.block_stride = source.block_stride;
    p_.row_stride = source.row_stride;
    p_.row_bytes = source.row_bytes;
    p_.source_rows = reinterpret_cast<const int64_t*>(source.source_rows);
    p_.final_rows = reinterpret_cast<const int64_t*>(source.final_rows);
    p_.num_source_rows = source.num_source_rows;
    p_.buffer_idx = int(num_started_ % 2);
    p_.call = call_of(chunk_idx, plan_digest);
    part_ = Part::kStart;
    return 0;
  }
  int prepare_wait(int64_t chunk_idx, uint32_t plan_digest, int64_t num_rows, uint64_t out,
                   int64_t out_stride, uint64_t scale, float scale_value) {
    if (!is_started_ || call_of(chunk_idx, plan_digest) != p_.call) return kNotStarted;
    part_ = Part::kWait;
    return prepare_result(num_rows, out, out_stride, scale, scale_value);
  }
  // With the dtype and the buffer of the chunk that was started last.
  uint64_t call_of(int64_t chunk_idx, uint32_t plan_digest) const {
    return DCP_NS::chunk_descriptor(lane_, p_.dtype, p_.buffer_idx, chunk_idx, plan_digest);
  }
  int prepare_result(int64_t num_rows, uint64_t out, int64_t out_stride, uint64_t scale, float scale_value) {
    const int64_t out_bytes = span_bytes(num_rows, out_stride, 1, 0, 2 * p_.row_bytes, 1);
    if (out != 0 && endpoint_.is_reserved({out, out_bytes})) return kOverlap;
    p_.out = reinterpret_cast<void*>(out);
    p_.out_stride = out_stride;
    p_.num_rows = num_rows;
    p_.scale = reinterpret_cast<const float*>(scale);
    p_.scale_value = scale_value;
    return 0;
  }
  Status launch(const Launch& channels) override {
    if (part_ == Part::kWhole) return fns_.whole(p_, channels);
    return part_ == Part::kWait ? fns_.wait(p_, channels) : fns_.start(p_, channels);
  }
  uint64_t call() const override { return p_.call; }
  void finish(int status, bool) override {
    is_started_ = part_ == Part::kStart && status == 0;
    num_started_ += part_ != Part::kWait && status == 0;
  }

  KvGatherParams p_ = {};
  const KvGatherFns fns_;
  const int lane_;
  enum class Part { kStart, kWait, kWhole } part_ = Part::kStart;
  bool is_started_ = false;
  uint64_t num_started_ = 0;
};

}  // namespace

void bind_kv_gather(py::module_& module) {
  using Lane = KvGatherLane;
  py::class_<Lane::Source>(module, "KvGatherSource", py::module_local())
      .def(py::init<int, int64_t, int64_t, int64_t, int64_t, uint64_t, uint64_t, int64_t, int64_t>(),
           py::kw_only(), py::arg("dtype"), py::arg("block_size"), py::arg("block_stride"),
           py::arg("row_stride"), py::arg("row_bytes"), py::arg("source_rows"), py::arg("final_rows"),
           py::arg("num_source_rows"), py::arg("cache_bytes"));
  py::class_<Lane> lane(module, "KvGatherLane", py::module_local());
  lane.def(py::init<Endpoint&, int, int, uint64_t, uint64_t>(), py::keep_alive<1, 2>(), py::kw_only(),
           py::arg("endpoint"), py::arg("lane"), py::arg("stream_idx"), py::arg("buffer_offset"),
           py::arg("buffer_bytes"))
      .def_property_readonly("buffer_idx", &Lane::buffer_idx);
  const py::arg parallel_for("parallel_for");
  const py::arg_v stream = py::arg("stream") = 0;
  const auto start = [&](auto&& define) {
    define(py::arg("cache"), py::arg("source"), py::arg("chunk_idx"), py::arg("plan_digest"));
  };
  const auto wait = [&](auto&& define) {
    define(py::arg("chunk_idx"), py::arg("plan_digest"), py::arg("num_rows"), py::arg("out"),
           py::arg("out_stride"), py::arg("scale"), py::arg("scale_value"));
  };
  start([&](auto... args) {
    lane.def("start", &Lane::start, args..., stream)
        .def("start_in_threads", &Lane::start_in_threads, parallel_for, args...);
  });
  wait([&](auto... args) {
    lane.def("wait", &Lane::wait, args..., stream)
        .def("wait_in_threads", &Lane::wait_in_threads, parallel_for, args...);
  });
  start([&](auto... first) { lane.def("whole", &Lane::whole, first..., py::arg("num_rows"), stream); });
}

}  // namespace dcp
