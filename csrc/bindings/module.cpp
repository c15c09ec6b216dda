// The module dcpkernels._C_cpu, or of another target: the only code that sees pybind11, together with its
// neighbours in this folder. The same object for all targets: what differs is in variants.cpp.
#include <pybind11/stl.h>

#include "bindings/handle.h"

namespace dcp {
namespace {

py::dict fault_dict(const Endpoint& endpoint) {
  endpoint.require_open();
  const DCP_NS::Fault fault = DCP_NS::read_fault(endpoint.host_symm(), endpoint.control());
  py::dict out;
  out["kind"] = int(fault.kind);
  out["reporter"] = fault.reporter;
  out["op"] = int(fault.op);
  out["has_record"] = fault.has_record;
  out["ranks"] = fault.record.ranks;
  out["lane"] = fault.record.lane;
  out["epoch"] = fault.record.epoch;
  out["my_call"] = fault.record.my_call;
  out["peer_call"] = fault.record.peer_call;
  out["waited_ns"] = fault.record.waited_ns;
  return out;
}

// (epoch, completed calls, LSEs that were not finite on non-empty shards)
std::tuple<uint64_t, uint64_t, uint64_t> stream_counters(const Endpoint& endpoint, int stream_idx) {
  endpoint.require_open();
  DCP_CHECK(stream_idx >= 0 && stream_idx < endpoint.control().num_streams, stream_idx);
  const StreamState* state =
      DCP_NS::stream_state(endpoint.host_symm(), endpoint.control(), endpoint.symm().rank, stream_idx);
  namespace arch = DCP_NS::arch;
  return {arch::load_acquire_sys(&state->epoch), arch::load_relaxed_sys(&state->num_calls),
          arch::load_relaxed_sys(&state->nonfinite_lse)};
}

// Loads all kernels that calls of a workspace may need. To load one later, while a kernel of this process
// waits for a peer, could wait for that one.
bool load_kernels(int wire, int dtype, int device, const std::string& isa) {
  const Variant* variant = find_variant(isa.c_str());
  DCP_CHECK(variant != nullptr, device);
  require_device(*variant, device);
  const Launch none = {0, 0, nullptr, device};
  A2aLseReduceParams reduce = {};
  reduce.wire = Wire(wire);
  reduce.dtype = DType(dtype);
  QueryGatherParams gather = {};
  bool is_loaded = variant->a2a_lse_reduce().run(reduce, none) == Status::kOk;
  is_loaded = is_loaded && variant->query_gather().run(gather, none) == Status::kOk;
  gather.quantises = true;
  for (DType source : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    gather.source_dtype = source;
    is_loaded = is_loaded && variant->query_gather().run(gather, none) == Status::kOk;
  }
  return is_loaded && variant->kv_gather().start({}, none) == Status::kOk &&
         variant->kv_gather().wait({}, none) == Status::kOk &&
         variant->kv_gather().whole({}, none) == Status::kOk &&
         variant->link_check().run({}, none) == Status::kOk;
}

std::vector<std::string> variants(bool runs_here) {
  std::vector<std::string> names;
  for (const Variant& variant : all_variants()) {
    if (!runs_here || variant.runs_here()) names.push_back(variant.name);
  }
  return names;
}

}  // namespace
}  // namespace dcp

PYBIND11_MODULE(_C, module) {
  using namespace dcp;
  module.doc() = std::string("Target ") + module_name() + " of dcpkernels";
  module.attr("BUILD_ID") = build_id();
  module.attr("SANITIZERS") = sanitizers();  // "address,undefined"; "" in all but a test build
  module.attr("PROTOCOL_VERSION") = kProtocolVersion;
  module.attr("MAX_RANKS") = kMaxRanks;
  // Sizes that dcpkernels/region_layout.py lays out regions with.
  module.attr("FLAG_BYTES") = sizeof(Flag);
  module.attr("FAULT_BYTES") = sizeof(FaultRecord);
  module.attr("STREAM_BYTES") = sizeof(StreamState);
  module.attr("CHANNEL_BYTES") = sizeof(ChannelState) + sizeof(Doorbell);
  module.attr("STATUS_FAULTED") = int(Status::kFaulted);
  module.attr("STATUS_BUSY") = int(Status::kBusy);
  module.attr("STATUS_LAUNCH_FAILED") = int(Status::kLaunchFailed);
  module.attr("STATUS_OVERLAP") = kOverlap;
  module.attr("STATUS_NO_MEMORY") = kNoMemory;
  module.attr("STATUS_CLOSED") = kClosed;
  module.attr("STATUS_STALE_BUFFER") = kStaleBuffer;
  module.attr("STATUS_CHANNELS_MISSING") = kChannelsMissing;
  module.attr("STATUS_NOT_STARTED") = kNotStarted;
  module.attr("STATUS_NOT_WAITED") = kNotWaited;
  module.attr("built_variants") = variants(false);
  module.attr("runnable_variants") = variants(true);

  py::class_<ControlLayout>(module, "ControlLayout", py::module_local())
      .def(py::init<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, int32_t, int32_t>(), py::kw_only(),
           py::arg("fault_offset"), py::arg("streams_offset"), py::arg("stream_bytes"),
           py::arg("flags_offset"), py::arg("flags_bytes"), py::arg("num_streams"), py::arg("num_channels"));

  py::class_<StagingLayout>(module, "StagingLayout", py::module_local())
      .def(py::init<uint64_t, uint64_t, int64_t>(), py::kw_only(), py::arg("offset"), py::arg("row_bytes"),
           py::arg("num_rows"));

  py::class_<Endpoint>(module, "Endpoint", py::module_local())
      .def(py::init<int, std::vector<uint64_t>, std::vector<uint64_t>, uint64_t, uint64_t, uint64_t, int,
                    const std::vector<std::pair<uint64_t, int64_t>>&, std::vector<int>, const ControlLayout&,
                    int64_t, int64_t, int, int, const std::string&>(),
           py::kw_only(), py::arg("rank"), py::arg("bases"), py::arg("gather_bases"), py::arg("multicast"),
           py::arg("bases_table") = 0, py::arg("host_control") = 0, py::arg("device") = 0,
           py::arg("reserved"), py::arg("socket_fds"), py::arg("control"), py::arg("timeout_ns"),
           py::arg("first_timeout_ns"), py::arg("num_spins"), py::arg("num_yields"), py::arg("isa"))
      .def_property_readonly("isa", [](const Endpoint& endpoint) { return endpoint.variant().name; })
      .def("is_poisoned", &Endpoint::is_poisoned)
      .def(
          "is_reserved",
          [](const Endpoint& endpoint, uint64_t address, int64_t num_bytes) {
            return endpoint.is_reserved({address, num_bytes});
          },
          py::arg("address"), py::arg("num_bytes"))
      .def("fault", &fault_dict)
      .def(
          "refresh",
          [](const Endpoint& endpoint, const py::bytes& words, const py::bytes& record) {
            endpoint.refresh(words, record);
          },
          py::arg("control_words"), py::arg("record"))
      .def("close", &Endpoint::close)
      .def("hand_out_buffer", &Endpoint::hand_out_buffer, py::arg("stream_idx"))
      .def("stream_counters", &stream_counters, py::arg("stream_idx"));

  module.def("load_kernels", &load_kernels, py::kw_only(), py::arg("wire"), py::arg("dtype"),
             py::arg("device"), py::arg("isa") = "auto");
  module.def(
      "launch_fault",
      [](const std::string& isa) {
        const Variant* variant = find_variant(isa.c_str());
        DCP_CHECK(variant != nullptr, 0);
        char text[512];
        variant->launch_fault(text, sizeof(text));
        return std::string(text);
      },
      py::arg("isa") = "auto");
  module.def(
      "require_device",
      [](int device, const std::string& isa) {
        const Variant* variant = find_variant(isa.c_str());
        DCP_CHECK(variant != nullptr, device);
        require_device(*variant, device);
      },
      py::arg("device") = 0, py::arg("isa") = "auto");
  module.def(
      "call_descriptor",
      [](int op, int lane, int dtype, int lse_base, int64_t num_tokens) {
        return DCP_NS::call_descriptor(Op(op), lane, DType(dtype), LseBase(lse_base), num_tokens);
      },
      py::kw_only(), py::arg("op"), py::arg("lane"), py::arg("dtype"), py::arg("lse_base"),
      py::arg("num_tokens"));
  module.def(
      "query_descriptor",
      [](int lane, int dtype, bool has_out, int64_t num_tokens) {
        return DCP_NS::query_descriptor(lane, DType(dtype), has_out, num_tokens);
      },
      py::kw_only(), py::arg("lane"), py::arg("dtype"), py::arg("has_out"), py::arg("num_tokens"));
  module.def("call_digest", &DCP_NS::call_digest, py::arg("descriptor"));
  module.def("release_descriptor", &DCP_NS::release_descriptor, py::kw_only(), py::arg("lane"));
  module.def(
      "chunk_descriptor",
      [](int lane, int dtype, int buffer_idx, int64_t chunk_idx, uint32_t plan_digest) {
        return DCP_NS::chunk_descriptor(lane, DType(dtype), buffer_idx, chunk_idx, plan_digest);
      },
      py::kw_only(), py::arg("lane"), py::arg("dtype"), py::arg("buffer_idx"), py::arg("chunk_idx"),
      py::arg("plan_digest"));
  module.def("init_region", &DCP_NS::init_region, py::arg("base"), py::arg("control"), py::arg("num_ranks"),
             py::arg("start_epoch"));
  bind_a2a_lse_reduce(module);
  bind_query_gather(module);
  bind_kv_gather(module);
  bind_link_check(module);
}
