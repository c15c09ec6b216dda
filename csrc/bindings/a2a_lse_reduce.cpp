// Binding of a2a_lse_reduce. A plan holds all that a call's shapes decide; a call then passes six addresses.
#include <pybind11/stl.h>

#include <array>

#include "bindings/handle.h"

namespace dcp {
namespace {

// [begin, end) of a strided tensor's bytes, relative to its address.
int64_t span_bytes(int64_t tokens, int64_t token_stride, int64_t heads, int64_t head_stride, int64_t dim,
                   int64_t size) {
  if (tokens == 0 || heads == 0 || dim == 0) return 0;
  return ((tokens - 1) * token_stride + (heads - 1) * head_stride + dim) * size;
}

struct Bytes {
  uint64_t begin;
  int64_t size;
};

bool overlap(const Bytes& a, const Bytes& b) {
  return a.size > 0 && b.size > 0 && a.begin < b.begin + uint64_t(b.size) &&
         b.begin < a.begin + uint64_t(a.size);
}

class A2aLseReducePlan {
 public:
  A2aLseReducePlan(Endpoint& endpoint, int dtype, int lse_dtype, int lse_base, int lane, int stream_idx,
                   int64_t num_tokens, int num_local_heads, int head_dim, int64_t max_round_rows,
                   int num_seqs, uint64_t payload_offset, uint64_t row_bytes, uint64_t lse_offset,
                   uint64_t lse_row_bytes, std::array<int64_t, 8> strides)
      : endpoint_(endpoint), run_(endpoint.variant().a2a_lse_reduce) {
    DCP_CHECK(stream_idx >= 0 && stream_idx < endpoint.control().num_streams, stream_idx);
    DCP_CHECK(max_round_rows >= 1, max_round_rows);
    DCP_CHECK(num_tokens >= 0 && num_tokens < int64_t(1) << 32, num_tokens);
    p_.partial_out_token_stride = strides[0];
    p_.partial_out_head_stride = strides[1];
    p_.partial_lse_token_stride = strides[2];
    p_.partial_lse_head_stride = strides[3];
    p_.out_token_stride = strides[4];
    p_.out_head_stride = strides[5];
    p_.out_lse_token_stride = strides[6];
    p_.out_lse_head_stride = strides[7];
    p_.num_tokens = num_tokens;
    p_.num_seqs = num_seqs;  // -1: no lengths
    p_.dtype = DType(dtype);
    p_.lse_dtype = DType(lse_dtype);
    p_.lse_base = LseBase(lse_base);
    p_.lane = lane;
    p_.num_local_heads = num_local_heads;
    p_.head_dim = head_dim;
    p_.max_round_rows = max_round_rows;
    p_.payload_offset = payload_offset;
    p_.row_bytes = row_bytes;
    p_.lse_offset = lse_offset;
    p_.lse_row_bytes = lse_row_bytes;
    p_.stream_idx = stream_idx;
    p_.symm = endpoint.symm();
    p_.control = endpoint.control();
    p_.wait = endpoint.wait();

    const int64_t num_heads = int64_t(num_local_heads) * p_.symm.num_ranks, size = dtype == 0 ? 4 : 2;
    partial_out_bytes_ = span_bytes(num_tokens, strides[0], num_heads, strides[1], head_dim, size);
    partial_lse_bytes_ = span_bytes(num_tokens, strides[2], num_heads, strides[3], 1, lse_dtype == 0 ? 4 : 2);
    out_bytes_ = span_bytes(num_tokens, strides[4], num_local_heads, strides[5], head_dim, size);
    out_lse_bytes_ = span_bytes(num_tokens, strides[6], num_local_heads, strides[7], 1, 4);
  }

  // `out_lse` is 0 when no LSE is wanted, kNoAddress when it is and the tensor has no memory. Returns a
  // Status; raises what a signal handler raised while the call waited.
  int operator()(uint64_t partial_out, uint64_t partial_lse, uint64_t out, uint64_t out_lse,
                 uint64_t seq_lens, uint64_t query_start_loc) {
    const Bytes outputs[] = {{out, out_bytes_}, {out_lse, out_lse == 0 ? 0 : out_lse_bytes_}};
    const Bytes inputs[] = {{partial_out, partial_out_bytes_},
                            {partial_lse, partial_lse_bytes_},
                            {seq_lens, p_.num_seqs > 0 ? int64_t(p_.num_seqs) * 4 : 0},
                            {query_start_loc, int64_t(p_.num_seqs + 1) * 4}};
    // Tensors without memory of their own (wrapper subclasses, freed storage) have address 0.
    for (const Bytes& bytes : outputs) {
      if (bytes.size > 0 && bytes.begin <= kNoAddress) return kNoMemory;
    }
    for (const Bytes& bytes : inputs) {
      if (bytes.size > 0 && bytes.begin == 0) return kNoMemory;
    }
    if (overlap(outputs[0], outputs[1])) return kOverlap;
    for (const Bytes& output : outputs) {
      for (const Bytes& input : inputs) {
        if (overlap(output, input)) return kOverlap;
      }
    }
    [[maybe_unused]] A2aLseReduceParams p = p_;
    p.partial_out = reinterpret_cast<const void*>(partial_out);
    p.partial_lse = reinterpret_cast<const void*>(partial_lse);
    p.out = reinterpret_cast<void*>(out);
    p.out_lse = reinterpret_cast<float*>(out_lse);
    p.seq_lens = reinterpret_cast<const int32_t*>(seq_lens);
    p.query_start_loc = reinterpret_cast<const int32_t*>(query_start_loc);
    if (!endpoint_.begin_call()) return kClosed;
    Status status = Status::kOk;
    {
      py::gil_scoped_release no_gil;
#if !defined(DCP_STUB_KERNEL)  // the test build measures what a call costs around the kernel
      status = run_(p);
#endif
    }
    endpoint_.end_call();
    if (status == Status::kFaulted && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return int(status);
  }

  static constexpr int kOverlap = 100, kNoMemory = 101, kClosed = 102;
  static constexpr uint64_t kNoAddress = 1;

 private:
  Endpoint& endpoint_;
  A2aLseReduceFn run_;
  A2aLseReduceParams p_ = {};
  int64_t partial_out_bytes_, partial_lse_bytes_, out_bytes_, out_lse_bytes_;
};

}  // namespace

void bind_a2a_lse_reduce(py::module_& module) {
  module.attr("STATUS_OVERLAP") = A2aLseReducePlan::kOverlap;
  module.attr("STATUS_NO_MEMORY") = A2aLseReducePlan::kNoMemory;
  module.attr("NO_ADDRESS") = A2aLseReducePlan::kNoAddress;
  module.attr("STATUS_CLOSED") = A2aLseReducePlan::kClosed;
  py::class_<A2aLseReducePlan>(module, "A2aLseReducePlan")
      .def(py::init<Endpoint&, int, int, int, int, int, int64_t, int, int, int64_t, int, uint64_t, uint64_t,
                    uint64_t, uint64_t, std::array<int64_t, 8>>(),
           py::keep_alive<1, 2>(), py::kw_only(), py::arg("endpoint"), py::arg("dtype"), py::arg("lse_dtype"),
           py::arg("lse_base"), py::arg("lane"), py::arg("stream_idx"), py::arg("num_tokens"),
           py::arg("num_local_heads"), py::arg("head_dim"), py::arg("max_round_rows"), py::arg("num_seqs"),
           py::arg("payload_offset"), py::arg("row_bytes"), py::arg("lse_offset"), py::arg("lse_row_bytes"),
           py::arg("strides"))
      .def("__call__", &A2aLseReducePlan::operator(), py::arg("partial_out"), py::arg("partial_lse"),
           py::arg("out"), py::arg("out_lse"), py::arg("seq_lens"), py::arg("query_start_loc"));
}

}  // namespace dcp
