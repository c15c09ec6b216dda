// Binding of query_gather and release_query. A plan holds all that a call's shapes decide; a call then passes
// addresses.
#include <pybind11/stl.h>

#include <array>
#include <optional>

#include "bindings/plan.h"
#include "core/layout.h"

namespace dcp {
namespace {

constexpr int64_t kUnitBytes = 16;  // of core/broadcast.h
constexpr uint64_t kNoAddress = 1;  // of an `out` without memory: null would mean that there is none

// Of one part: strides of token and head, bytes of a head, offset in the gathered head; all in bytes.
using PartShape = std::array<int64_t, 4>;

class QueryGatherPlan : public Plan {
 public:
  // source_dtype: of parts that are quantised, -1 where bytes are copied. `out`: token and head stride in
  // bytes of a tensor that the result is copied to.
  QueryGatherPlan(Endpoint& endpoint, int lane, int stream_idx, int num_local_heads, int64_t max_round_rows,
                  uint64_t buffer_offset, uint64_t buffer_bytes, int dtype, int source_dtype,
                  int64_t num_tokens, int64_t head_bytes, const std::vector<PartShape>& parts,
                  std::optional<std::array<int64_t, 2>> out, bool releases)
      : Plan(endpoint, stream_idx), fns_(endpoint.variant().query_gather()), has_out_(out.has_value()) {
    DCP_CHECK(parts.size() <= kMaxQueryParts, parts.size());
    DCP_CHECK(num_tokens >= 0 && num_tokens < int64_t(1) << 32, num_tokens);
    DCP_CHECK(has_out_ || num_tokens <= max_round_rows, num_tokens);
    const int64_t num_heads = int64_t(num_local_heads) * endpoint.symm().num_ranks;
    DCP_CHECK(uint64_t(max_round_rows * num_heads * head_bytes) <= buffer_bytes, head_bytes);
    p_.num_parts = int(parts.size());
    p_.has_units = head_bytes % kUnitBytes == 0;
    p_.quantises = source_dtype >= 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto [token_stride, head_stride, num_bytes, offset] = parts[i];
      p_.parts[i] = {nullptr, token_stride, head_stride, num_bytes, offset};
      part_bytes_[i] = span_bytes(num_tokens, token_stride, num_local_heads, head_stride, num_bytes, 1);
      p_.has_units = p_.has_units && offset % kUnitBytes == 0;
    }
    p_.releases = releases;
    p_.source_dtype = DType(p_.quantises ? source_dtype : 0);
    p_.dtype = DType(dtype);
    p_.num_tokens = num_tokens;
    p_.head_bytes = head_bytes;
    if (has_out_) {
      p_.out_token_stride = (*out)[0];
      p_.out_head_stride = (*out)[1];
      out_bytes_ = span_bytes(num_tokens, (*out)[0], num_heads, (*out)[1], head_bytes, 1);
    }
    p_.lane = lane;
    p_.num_local_heads = num_local_heads;
    p_.max_round_rows = max_round_rows;
    p_.buffer_offset = buffer_offset;
    p_.stream_idx = stream_idx;
    p_.symm = endpoint.symm();
    p_.buffers = p_.publish_to = endpoint.gather_buffers();
    // On a CPU, whose multicast is a plain store, every byte is a unit.
    if (endpoint.is_asynchronous() && !p_.has_units) p_.publish_to.multicast = 0;
    p_.control = endpoint.control();
    p_.wait = endpoint.wait();
  }

  // `scale`: address of an fp32 number, or 0: then it is `scale_value`.
  using Addresses = std::array<uint64_t, kMaxQueryParts>;
  int operator()(const Addresses& parts, uint64_t out, uint64_t scale, float scale_value, uint64_t stream) {
    return run(stream, [&] { return prepare(parts, out, scale, scale_value); });
  }
  static int in_threads(const py::object& self, const py::function& parallel_for, const Addresses& parts,
                        uint64_t out, uint64_t scale, float scale_value) {
    QueryGatherPlan& plan = self.cast<QueryGatherPlan&>();
    return run_in_threads(self, plan, parallel_for,
                          [&] { return plan.prepare(parts, out, scale, scale_value); });
  }

 private:
  int prepare(const Addresses& parts, uint64_t out, uint64_t scale, float scale_value) {
    const Bytes output = {out, out_bytes_};
    if (output.size > 0 && out == 0) return kNoMemory;
    if (endpoint_.is_reserved(output)) return kOverlap;
    for (int i = 0; i < p_.num_parts; ++i) {
      const Bytes part = {parts[size_t(i)], part_bytes_[i]};
      if (part.size > 0 && part.begin == 0) return kNoMemory;
      if (overlap(part, output) || endpoint_.is_reserved(part)) return kOverlap;
      p_.parts[i].data = reinterpret_cast<const void*>(part.begin);
    }
    // An `out` without rows has no memory, and is wanted all the same: it decides how many rounds there are.
    p_.out = has_out_ ? reinterpret_cast<void*>(out != 0 ? out : kNoAddress) : nullptr;
    p_.scale = reinterpret_cast<const float*>(scale);
    p_.scale_value = scale_value;
    return 0;
  }
  Status launch(const Launch& channels) override { return fns_.run(p_, channels); }
  void finish(int, bool) override {}
  uint64_t call() const override {
    if (p_.releases) return DCP_NS::release_descriptor(p_.lane);
    return DCP_NS::query_descriptor(p_.lane, p_.dtype, has_out_, p_.num_tokens);
  }

  QueryGatherParams p_ = {};
  const QueryGatherFns fns_;
  const bool has_out_;
  int64_t part_bytes_[kMaxQueryParts] = {};
  int64_t out_bytes_ = 0;
};

}  // namespace

void bind_query_gather(py::module_& module) {
  module.attr("MAX_QUERY_PARTS") = kMaxQueryParts;
  py::class_<QueryGatherPlan>(module, "QueryGatherPlan", py::module_local())
      .def(py::init<Endpoint&, int, int, int, int64_t, uint64_t, uint64_t, int, int, int64_t, int64_t,
                    const std::vector<PartShape>&, std::optional<std::array<int64_t, 2>>, bool>(),
           py::keep_alive<1, 2>(), py::kw_only(), py::arg("endpoint"), py::arg("lane"), py::arg("stream_idx"),
           py::arg("num_local_heads"), py::arg("max_round_rows"), py::arg("buffer_offset"),
           py::arg("buffer_bytes"), py::arg("dtype"), py::arg("source_dtype"), py::arg("num_tokens"),
           py::arg("head_bytes"), py::arg("parts"), py::arg("out"), py::arg("releases"))
      .def("__call__", &QueryGatherPlan::operator(), py::arg("parts"), py::arg("out"), py::arg("scale"),
           py::arg("scale_value"), py::arg("stream") = 0)
      .def("run_in_threads", &QueryGatherPlan::in_threads, py::arg("parallel_for"), py::arg("parts"),
           py::arg("out"), py::arg("scale"), py::arg("scale_value"));
}

}  // namespace dcp
