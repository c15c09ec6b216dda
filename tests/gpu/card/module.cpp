// The Python module of one_card.py: parameters of the ops by the names of their fields, steps, graphs, times.
// Any C++ compiler compiles it: what needs nvcc is in the other files.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "steps.h"

namespace one_card {
namespace {

namespace py = pybind11;

// Addresses and enums are numbers in Python; what the ops add to a struct later stays as it is made.
template <auto kField, class Class>
void field(Class& cls, const char* name) {
  using Params = typename Class::type;
  using T = std::remove_cvref_t<decltype(std::declval<Params&>().*kField)>;
  using Plain =
      std::conditional_t<std::is_pointer_v<T>, uint64_t, std::conditional_t<std::is_enum_v<T>, int, T>>;
  if constexpr (std::is_same_v<T, Plain>) {
    cls.def_readwrite(name, kField);
  } else if constexpr (std::is_pointer_v<T>) {
    cls.def_property(
        name, [](const Params& p) { return reinterpret_cast<uint64_t>(p.*kField); },
        [](Params& p, uint64_t value) { p.*kField = reinterpret_cast<T>(value); });
  } else {
    cls.def_property(
        name, [](const Params& p) { return Plain(p.*kField); },
        [](Params& p, Plain value) { p.*kField = T(value); });
  }
}
template <auto... kFields, class Class, class... Names>
void fields(Class& cls, Names... names) {
  static_assert(sizeof...(kFields) == sizeof...(Names));
  (field<kFields>(cls, names), ...);
}

template <class Params>
py::class_<Params> params(py::module_& module, const char* name) {
  py::class_<Params> cls(module, name, py::module_local());  // dcpkernels may be in this process too
  cls.def(py::init([] { return Params{}; }));
  cls.def("copy", [](const Params& p) { return Params(p); });
  return cls;
}

// Fills the control words of a region, in host memory, as host/region.h does; that header is for targets
// whose kernels run on the host.
void init_region(uint64_t base, const dcp::ControlLayout& control, int num_ranks, uint64_t start_epoch) {
  char* region = reinterpret_cast<char*>(base);
  std::memset(region + control.fault_offset, 0, sizeof(dcp::FaultRecord));
  const uint64_t previous = uint32_t(start_epoch) == 2 ? start_epoch - 3 : start_epoch - 1;
  for (int stream = 0; stream < control.num_streams; ++stream) {
    char* words = region + control.streams_offset + control.stream_bytes * uint64_t(stream);
    std::memset(words, 0, control.stream_bytes);
    dcp::StreamState* state = reinterpret_cast<dcp::StreamState*>(words);
    state->epoch = state->waited_epoch = start_epoch;
    dcp::Flag* flags =
        reinterpret_cast<dcp::Flag*>(region + control.flags_offset + control.flags_bytes * uint64_t(stream));
    const int num_flags = control.num_channels * num_ranks;
    for (uint64_t epoch : {start_epoch, previous}) {
      for (int i = 0; i < num_flags; ++i) {
        dcp::Flag& flag = flags[int(epoch & 1) * num_flags + i];
        flag = dcp::Flag{};
        flag.value = uint32_t(epoch);  // digest 0
      }
    }
  }
}

void bind_layouts(py::module_& module) {
  using dcp::ControlLayout, dcp::StagingLayout, dcp::SymmView, dcp::WaitPolicy;
  auto control = params<ControlLayout>(module, "ControlLayout");
  fields<&ControlLayout::fault_offset, &ControlLayout::streams_offset, &ControlLayout::stream_bytes,
         &ControlLayout::flags_offset, &ControlLayout::flags_bytes, &ControlLayout::num_streams,
         &ControlLayout::num_channels>(control, "fault_offset", "streams_offset", "stream_bytes",
                                       "flags_offset", "flags_bytes", "num_streams", "num_channels");
  auto staging = params<StagingLayout>(module, "StagingLayout");
  fields<&StagingLayout::offset, &StagingLayout::row_bytes, &StagingLayout::num_rows>(
      staging, "offset", "row_bytes", "num_rows");
  auto symm = params<SymmView>(module, "SymmView");
  fields<&SymmView::bases, &SymmView::rank, &SymmView::num_ranks>(symm, "bases", "rank", "num_ranks");
  auto wait = params<WaitPolicy>(module, "WaitPolicy");
  fields<&WaitPolicy::timeout_ns, &WaitPolicy::first_timeout_ns, &WaitPolicy::num_spins,
         &WaitPolicy::num_yields>(wait, "timeout_ns", "first_timeout_ns", "num_spins", "num_yields");
}

void bind_a2a(py::module_& module) {
  using P = dcp::A2aLseReduceParams;
  auto cls = params<P>(module, "A2aParams");
  fields<&P::partial_out, &P::partial_lse, &P::out, &P::out_lse, &P::seq_lens, &P::query_start_loc>(
      cls, "partial_out", "partial_lse", "out", "out_lse", "seq_lens", "query_start_loc");
  fields<&P::partial_out_token_stride, &P::partial_out_head_stride, &P::partial_lse_token_stride,
         &P::partial_lse_head_stride, &P::out_token_stride, &P::out_head_stride, &P::out_lse_token_stride,
         &P::out_lse_head_stride>(cls, "partial_out_token_stride", "partial_out_head_stride",
                                  "partial_lse_token_stride", "partial_lse_head_stride", "out_token_stride",
                                  "out_head_stride", "out_lse_token_stride", "out_lse_head_stride");
  fields<&P::num_tokens, &P::num_seqs, &P::lse_dtype, &P::lse_base, &P::lane, &P::num_nonfinite_lse>(
      cls, "num_tokens", "num_seqs", "lse_dtype", "lse_base", "lane", "num_nonfinite_lse");
  fields<&P::buffer_idx, &P::copies_to_buffer, &P::buffer_offset, &P::buffer_bytes>(
      cls, "buffer_idx", "copies_to_buffer", "buffer_offset", "buffer_bytes");
  fields<&P::wire, &P::dtype, &P::num_local_heads, &P::head_dim, &P::max_round_rows, &P::staging,
         &P::lse_in_row, &P::unpacked, &P::stream_idx, &P::query_stream_idx, &P::symm, &P::control, &P::wait,
         &P::first_row, &P::num_rows>(cls, "wire", "dtype", "num_local_heads", "head_dim", "max_round_rows",
                                      "staging", "lse_in_row", "unpacked", "stream_idx", "query_stream_idx",
                                      "symm", "control", "wait", "first_row", "num_rows");
  module.def("a2a_step", &a2a_step);
  module.def("merge_step", &merge_step);
}

void bind_query(py::module_& module) {
  using P = dcp::QueryGatherParams;
  auto cls = params<P>(module, "QueryParams");
  fields<&P::num_parts, &P::releases, &P::quantises, &P::has_units, &P::source_dtype, &P::scale, &P::dtype,
         &P::num_tokens, &P::head_bytes, &P::out, &P::out_token_stride, &P::out_head_stride>(
      cls, "num_parts", "releases", "quantises", "has_units", "source_dtype", "scale", "dtype", "num_tokens",
      "head_bytes", "out", "out_token_stride", "out_head_stride");
  fields<&P::lane, &P::num_local_heads, &P::max_round_rows, &P::buffer_offset, &P::stream_idx, &P::symm,
         &P::buffers, &P::publish_to, &P::control, &P::wait>(cls, "lane", "num_local_heads", "max_round_rows",
                                                             "buffer_offset", "stream_idx", "symm", "buffers",
                                                             "publish_to", "control", "wait");
  cls.def("set_part", [](P& p, int index, uint64_t data, int64_t token_stride, int64_t head_stride,
                         int64_t num_bytes, int64_t offset) {
    if (index < 0 || index >= dcp::kMaxQueryParts) throw std::out_of_range("set_part");
    dcp::QueryPart part = {};
    part.data = reinterpret_cast<const void*>(data);
    part.token_stride = token_stride;
    part.head_stride = head_stride;
    part.num_bytes = num_bytes;
    part.offset = offset;
    p.parts[index] = part;
  });
  module.def("query_step", &query_step);
}

void bind_kv(py::module_& module) {
  using P = dcp::KvGatherParams;
  auto cls = params<P>(module, "KvParams");
  fields<&P::cache, &P::block_size, &P::block_stride, &P::row_stride, &P::source_rows, &P::final_rows,
         &P::num_source_rows, &P::out, &P::out_stride, &P::num_rows, &P::scale>(
      cls, "cache", "block_size", "block_stride", "row_stride", "source_rows", "final_rows",
      "num_source_rows", "out", "out_stride", "num_rows", "scale");
  fields<&P::dtype, &P::row_bytes, &P::call, &P::buffer_idx, &P::buffer_offset, &P::buffer_bytes,
         &P::stream_idx, &P::symm, &P::buffers, &P::control, &P::wait>(
      cls, "dtype", "row_bytes", "call", "buffer_idx", "buffer_offset", "buffer_bytes", "stream_idx", "symm",
      "buffers", "control", "wait");
  module.def("kv_start_step", &kv_start_step);
  module.def("kv_wait_step", &kv_wait_step);
}

void bind_steps(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Step, StepPtr>(module, "Step", py::module_local())
      .def_property_readonly("num_ranks", &Step::num_ranks)
      .def("run_one_grid", [](Step& step, Stream stream) { return int(step.run_one_grid(stream)); });
  auto cls = params<Pattern>(module, "Pattern");
  fields<&Pattern::partial_out, &Pattern::partial_lse, &Pattern::out, &Pattern::out_lse, &Pattern::epoch,
         &Pattern::errors, &Pattern::num_tokens, &Pattern::num_heads, &Pattern::head_dim, &Pattern::rank,
         &Pattern::num_ranks>(cls, "partial_out", "partial_lse", "out", "out_lse", "epoch", "errors",
                              "num_tokens", "num_heads", "head_dim", "rank", "num_ranks");
  module.def("fill_step", &fill_step);
  module.def("check_step", &check_step);
  using Triples = std::vector<std::tuple<uint64_t, uint64_t, int64_t>>;  // to, from, bytes
  const auto bytes = [](const Triples& triples) {
    std::vector<Bytes> ranks;
    for (const auto& [to, from, num_bytes] : triples) ranks.push_back({to, from, num_bytes});
    return ranks;
  };
  module.def("copy_step", [bytes](const Triples& ranks) { return copy_step(bytes(ranks)); });
  module.def("compare_step", [bytes](const Triples& ranks, std::vector<uint64_t> errors) {
    return compare_step(bytes(ranks), std::move(errors));
  });
  module.def("empty_step", &empty_step);
  module.def("repeat", &repeat, py::arg("steps"), py::arg("streams"), py::arg("num_rounds") = 1, NoGil());
  py::class_<Graph, GraphPtr>(module, "Graph", py::module_local())
      .def_property_readonly("num_nodes", &Graph::num_nodes)
      .def("launch", &Graph::launch);
  module.def("capture", &capture, py::arg("steps"), py::arg("rank"), py::arg("stream"),
             py::arg("num_rounds") = 1);
  module.def("synchronize", &synchronize, NoGil());
  module.def("time_graphs", &time_graphs, NoGil());
  module.def("time_eager", &time_eager, NoGil());
}

}  // namespace
}  // namespace one_card

PYBIND11_MODULE(one_card_module, module) {
  using namespace one_card;
  module.attr("has_device") = kHasDevice;
  module.attr("EPOCH_OFFSET") = offsetof(dcp::StreamState, epoch);
  module.attr("WAITED_EPOCH_OFFSET") = offsetof(dcp::StreamState, waited_epoch);
  module.attr("NONFINITE_OFFSET") = offsetof(dcp::StreamState, nonfinite_lse);
  module.attr("STATUS_LAUNCH_FAILED") = int(dcp::Status::kLaunchFailed);
  module.def("init_region", &init_region);
  bind_layouts(module);
  bind_a2a(module);
  bind_query(module);
  bind_kv(module);
  bind_steps(module);
}
