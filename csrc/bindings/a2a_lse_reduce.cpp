// Binding of a2a_lse_reduce. A plan holds all that a call's shapes decide; a call then passes six addresses.
#include <pybind11/stl.h>

#include <array>

#include "bindings/plan.h"
#include "core/layout.h"

namespace dcp {
namespace {

// An output that is wanted, and whose tensor has no memory; 0 would mean that it is not wanted.
constexpr uint64_t kNoAddress = 1;

// What all ranks of a workspace have alike, of one lane.
struct Geometry {
  Geometry(int wire, int dtype, int lane, int stream_idx, int num_ranks, int num_local_heads, int head_dim,
           int64_t max_round_rows, const StagingLayout& staging, uint64_t lse_in_row,
           const StagingLayout& unpacked, uint64_t buffer_offset, uint64_t buffer_bytes,
           uint64_t all_buffers_offset, uint64_t all_buffers_bytes, int query_stream_idx)
      : num_ranks(num_ranks), all_buffers_offset(all_buffers_offset), all_buffers_bytes(all_buffers_bytes) {
    DCP_CHECK(max_round_rows >= 1, max_round_rows);
    p.wire = Wire(wire);
    p.dtype = DType(dtype);
    p.lane = lane;
    p.stream_idx = stream_idx;
    p.num_local_heads = num_local_heads;
    p.head_dim = head_dim;
    p.max_round_rows = max_round_rows;
    p.staging = staging;
    p.lse_in_row = lse_in_row;
    p.unpacked = unpacked;
    p.buffer_offset = buffer_offset;
    p.buffer_bytes = buffer_bytes;
    p.query_stream_idx = query_stream_idx;
  }
  A2aLseReduceParams p = {};
  int num_ranks;
  uint64_t all_buffers_offset, all_buffers_bytes;  // of all lanes: no output may lie there
};

// What one call's tensors look like, and where they lie.
class Call {
 public:
  Call(const Geometry& geometry, int lse_dtype, int lse_base, int64_t num_tokens, int num_seqs,
       std::array<int64_t, 8> strides)
      : p_(geometry.p) {
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
    p_.lse_dtype = DType(lse_dtype);
    p_.lse_base = LseBase(lse_base);
    const int64_t num_heads = int64_t(p_.num_local_heads) * geometry.num_ranks;
    const int64_t size = p_.dtype == DType::kFloat32 ? 4 : 2, dim = p_.head_dim;
    partial_out_bytes_ = span_bytes(num_tokens, strides[0], num_heads, strides[1], dim, size);
    partial_lse_bytes_ = span_bytes(num_tokens, strides[2], num_heads, strides[3], 1, lse_dtype == 0 ? 4 : 2);
    out_bytes_ = span_bytes(num_tokens, strides[4], p_.num_local_heads, strides[5], dim, size);
    out_lse_bytes_ = span_bytes(num_tokens, strides[6], p_.num_local_heads, strides[7], 1, 4);
  }

 protected:
  // Puts the addresses into `p`; 0, kOverlap or kNoMemory. `reserved`: memory that no output may touch.
  int place(A2aLseReduceParams& p, uint64_t partial_out, uint64_t partial_lse, uint64_t out, uint64_t out_lse,
            uint64_t seq_lens, uint64_t query_start_loc, const Bytes& reserved) const {
    const Bytes outputs[] = {{out, out_bytes_}, {out_lse, out_lse == 0 ? 0 : out_lse_bytes_}};
    const Bytes inputs[] = {{partial_out, partial_out_bytes_},
                            {partial_lse, partial_lse_bytes_},
                            {seq_lens, p.num_seqs > 0 ? int64_t(p.num_seqs) * 4 : 0},
                            {query_start_loc, (int64_t(p.num_seqs) + 1) * 4}};
    // Tensors without memory of their own (wrapper subclasses, freed storage) have address 0.
    for (const Bytes& bytes : outputs) {
      if (bytes.size > 0 && bytes.begin <= kNoAddress) return kNoMemory;
    }
    for (const Bytes& bytes : inputs) {
      if (bytes.size > 0 && bytes.begin == 0) return kNoMemory;
    }
    if (overlap(outputs[0], outputs[1])) return kOverlap;
    for (const Bytes& output : outputs) {
      if (overlap(output, reserved)) return kOverlap;
      for (const Bytes& input : inputs) {
        if (overlap(output, input)) return kOverlap;
      }
    }
    p.partial_out = reinterpret_cast<const void*>(partial_out);
    p.partial_lse = reinterpret_cast<const void*>(partial_lse);
    p.out = reinterpret_cast<void*>(out);
    p.out_lse = reinterpret_cast<float*>(out_lse);
    p.seq_lens = reinterpret_cast<const int32_t*>(seq_lens);
    p.query_start_loc = reinterpret_cast<const int32_t*>(query_start_loc);
    return 0;
  }

  A2aLseReduceParams p_;
  int64_t partial_out_bytes_, partial_lse_bytes_, out_bytes_, out_lse_bytes_;
};

// Over the workspace's regions.
class A2aLseReducePlan : Call, public Plan {
 public:
  A2aLseReducePlan(Endpoint& endpoint, const Geometry& geometry, int lse_dtype, int lse_base,
                   int64_t num_tokens, int num_seqs, std::array<int64_t, 8> strides)
      : Call(geometry, lse_dtype, lse_base, num_tokens, num_seqs, strides),
        Plan(endpoint, geometry.p.stream_idx),
        fns_(endpoint.variant().a2a_lse_reduce()) {
    p_.symm = endpoint.symm();
    p_.control = endpoint.control();
    p_.wait = endpoint.wait();
    const uint64_t base = endpoint.base();
    const SymmView own = {&base, 0, 1};
    p_.num_nonfinite_lse = &DCP_NS::stream_state(own, p_.control, 0, p_.stream_idx)->nonfinite_lse;
    if (p_.wire == Wire::kPull) {
      buffers_ = {base + p_.buffer_offset, int64_t(2 * p_.buffer_bytes)};
      all_buffers_ = {base + geometry.all_buffers_offset, int64_t(geometry.all_buffers_bytes)};
    }
  }

  int operator()(uint64_t partial_out, uint64_t partial_lse, uint64_t out, uint64_t out_lse,
                 uint64_t seq_lens, uint64_t query_start_loc, uint64_t stream) {
    return run(stream,
               [&] { return prepare(partial_out, partial_lse, out, out_lse, seq_lens, query_start_loc); });
  }
  static int in_threads(const py::object& self, const py::function& parallel_for, uint64_t partial_out,
                        uint64_t partial_lse, uint64_t out, uint64_t out_lse, uint64_t seq_lens,
                        uint64_t query_start_loc) {
    A2aLseReducePlan& plan = self.cast<A2aLseReducePlan&>();
    return run_in_threads(self, plan, parallel_for, [&] {
      return plan.prepare(partial_out, partial_lse, out, out_lse, seq_lens, query_start_loc);
    });
  }

 private:
  int prepare(uint64_t partial_out, uint64_t partial_lse, uint64_t out, uint64_t out_lse, uint64_t seq_lens,
              uint64_t query_start_loc) {
    if (endpoint_.is_reserved({out, out_bytes_}) || endpoint_.is_reserved({out_lse, out_lse_bytes_})) {
      return kOverlap;
    }
    const int code =
        place(p_, partial_out, partial_lse, out, out_lse, seq_lens, query_start_loc, all_buffers_);
    return code == 0 && p_.wire == Wire::kPull ? choose_buffer(partial_out) : code;
  }
  Status launch(const Launch& channels) override { return fns_.run(p_, channels); }
  uint64_t call() const override {
    return DCP_NS::call_descriptor(Op::kA2aLseReduce, p_.lane, p_.dtype, p_.lse_base, p_.num_tokens);
  }
  void finish(int status, bool is_whole) override {
    // A part of a result is no result. The last channel sees to that, if it comes.
    if (!is_whole) fns_.discard(p_, {0, num_channels(), nullptr, endpoint_.device()});
    if (p_.wire == Wire::kPull) take_buffer(status);
  }

  // Either the caller wrote into the buffer that it was handed out, or the call copies into one that it was
  // not.
  int choose_buffer(uint64_t partial_out) {
    const BufferPair& pair = endpoint_.buffers(p_.stream_idx);
    p_.copies_to_buffer = !overlap(buffers_, {partial_out, partial_out_bytes_});
    if (p_.copies_to_buffer) {
      p_.buffer_idx = endpoint_.free_buffer(p_.stream_idx);
      return 0;
    }
    p_.buffer_idx = partial_out - buffers_.begin < p_.buffer_bytes ? 0 : 1;
    const Bytes buffer = {buffers_.begin + p_.buffer_idx * p_.buffer_bytes, int64_t(p_.buffer_bytes)};
    const bool is_inside = partial_out >= buffer.begin &&
                           partial_out + uint64_t(partial_out_bytes_) <= buffer.begin + p_.buffer_bytes;
    return is_inside && p_.buffer_idx == pair.handed_out ? 0 : kStaleBuffer;
  }
  void take_buffer(int status) {
    BufferPair& pair = endpoint_.buffers(p_.stream_idx);
    pair.last_used = p_.buffer_idx;
    if (!p_.copies_to_buffer && status == 0) pair.handed_out = -1;
  }

  const A2aLseReduceFns fns_;
  Bytes buffers_ = {0, 0}, all_buffers_ = {0, 0};  // of this lane, of all lanes
};

// Over buffers that somebody else exchanges (dcpkernels/collective.py). A chunk is num_rows plain rows; the
// chunks of the other ranks lie one after the other in `send` and `receive`, in rank order without the own
// one.
class A2aLseReduceExchange : Call {
 public:
  A2aLseReduceExchange(const std::string& isa, int rank, const Geometry& geometry, int lse_dtype,
                       int lse_base, int64_t num_tokens, int num_seqs, std::array<int64_t, 8> strides)
      : Call(geometry, lse_dtype, lse_base, num_tokens, num_seqs, strides),
        bases_(size_t(geometry.num_ranks)) {
    const Variant* variant = find_variant(isa.c_str());
    DCP_CHECK(variant != nullptr, 0);
    DCP_CHECK(rank >= 0 && rank < geometry.num_ranks, rank);
    require_device(*variant, 0);
    fns_ = variant->a2a_lse_reduce();
    DCP_CHECK(fns_.pack != nullptr, rank);
    p_.symm = {bases_.data(), rank, geometry.num_ranks};
    p_.control.num_channels = 1;
    p_.num_nonfinite_lse = &num_nonfinite_lse_;
  }

  int begin(uint64_t partial_out, uint64_t partial_lse, uint64_t out, uint64_t out_lse, uint64_t seq_lens,
            uint64_t query_start_loc) {
    num_nonfinite_lse_ = 0;
    return place(p_, partial_out, partial_lse, out, out_lse, seq_lens, query_start_loc, {0, 0});
  }
  void pack(uint64_t send, int64_t first_row, int64_t num_rows) {
    const int rank = p_.symm.rank;
    set_rows(first_row, num_rows);
    for (int peer = 0; peer < p_.symm.num_ranks; ++peer) {
      if (peer == rank) continue;
      // The kernel writes to slot staging_slot(rank, peer) of the peer's staging.
      bases_[size_t(peer)] =
          send + chunk(DCP_NS::staging_slot(peer, rank)) - chunk(DCP_NS::staging_slot(rank, peer));
    }
    py::gil_scoped_release no_gil;
    fns_.pack(p_, {0, 1, nullptr, 0});
  }
  void merge(uint64_t receive, int64_t first_row, int64_t num_rows) {
    set_rows(first_row, num_rows);
    bases_[size_t(p_.symm.rank)] = receive;
    py::gil_scoped_release no_gil;
    fns_.merge(p_, {0, 1, nullptr, 0});
  }
  void discard() {
    py::gil_scoped_release no_gil;
    fns_.discard(p_, {0, 1, nullptr, 0});
  }
  uint64_t num_nonfinite_lse() const { return num_nonfinite_lse_; }

 private:
  void set_rows(int64_t first_row, int64_t num_rows) {
    p_.first_row = first_row;
    p_.num_rows = num_rows;
    p_.staging.offset = 0;
    p_.staging.num_rows = num_rows;
  }
  uint64_t chunk(int slot) const { return uint64_t(slot) * p_.staging.num_rows * p_.staging.row_bytes; }

  A2aLseReduceFns fns_;
  std::vector<uint64_t> bases_;
  uint64_t num_nonfinite_lse_ = 0;
};

}  // namespace

void bind_a2a_lse_reduce(py::module_& module) {
  module.attr("NO_ADDRESS") = kNoAddress;
  py::class_<Geometry>(module, "A2aLseReduceGeometry", py::module_local())
      .def(py::init<int, int, int, int, int, int, int, int64_t, const StagingLayout&, uint64_t,
                    const StagingLayout&, uint64_t, uint64_t, uint64_t, uint64_t, int>(),
           py::kw_only(), py::arg("wire"), py::arg("dtype"), py::arg("lane"), py::arg("stream_idx"),
           py::arg("num_ranks"), py::arg("num_local_heads"), py::arg("head_dim"), py::arg("max_round_rows"),
           py::arg("staging"), py::arg("lse_in_row"), py::arg("unpacked"), py::arg("buffer_offset"),
           py::arg("buffer_bytes"), py::arg("all_buffers_offset"), py::arg("all_buffers_bytes"),
           py::arg("query_stream_idx"));
  const auto addresses = [](auto&& define) {
    define(py::arg("partial_out"), py::arg("partial_lse"), py::arg("out"), py::arg("out_lse"),
           py::arg("seq_lens"), py::arg("query_start_loc"));
  };
  py::class_<A2aLseReducePlan> plan(module, "A2aLseReducePlan", py::module_local());
  plan.def(py::init<Endpoint&, const Geometry&, int, int, int64_t, int, std::array<int64_t, 8>>(),
           py::keep_alive<1, 2>(), py::kw_only(), py::arg("endpoint"), py::arg("geometry"),
           py::arg("lse_dtype"), py::arg("lse_base"), py::arg("num_tokens"), py::arg("num_seqs"),
           py::arg("strides"));
  addresses([&](auto... args) {
    plan.def("__call__", &A2aLseReducePlan::operator(), args..., py::arg("stream") = 0)
        .def("run_in_threads", &A2aLseReducePlan::in_threads, py::arg("parallel_for"), args...);
  });
  py::class_<A2aLseReduceExchange> exchange(module, "A2aLseReduceExchange", py::module_local());
  exchange
      .def(py::init<const std::string&, int, const Geometry&, int, int, int64_t, int,
                    std::array<int64_t, 8>>(),
           py::kw_only(), py::arg("isa"), py::arg("rank"), py::arg("geometry"), py::arg("lse_dtype"),
           py::arg("lse_base"), py::arg("num_tokens"), py::arg("num_seqs"), py::arg("strides"))
      .def("pack", &A2aLseReduceExchange::pack, py::arg("send"), py::arg("first_row"), py::arg("num_rows"))
      .def("merge", &A2aLseReduceExchange::merge, py::arg("receive"), py::arg("first_row"),
           py::arg("num_rows"))
      .def("discard", &A2aLseReduceExchange::discard)
      .def_property_readonly("num_nonfinite_lse", &A2aLseReduceExchange::num_nonfinite_lse);
  addresses([&](auto... args) { exchange.def("begin", &A2aLseReduceExchange::begin, args...); });
}

}  // namespace dcp
