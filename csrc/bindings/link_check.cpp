// Binding of link_check: one call, before there is an endpoint.
#include <pybind11/stl.h>

#include "bindings/handle.h"

namespace dcp {
namespace {

// Enqueues the kernel, or runs it on a CPU: a Status. `bases` as this process sees the regions;
// `bases_table`: address of the same numbers where the kernel can read them, 0 = the list itself.
// `multicast_view`: 0 = the own region. The wait has a deadline always; a nonce of 0 would be found in fresh
// memory.
int link_check(int rank, const std::vector<uint64_t>& bases, uint64_t bases_table, uint64_t multicast,
               uint64_t multicast_view, uint64_t offset, uint64_t nonce, int64_t timeout_ns, int num_spins,
               int num_yields, uint64_t result, const std::string& isa, uint64_t stream, int device) {
  const int num_ranks = int(bases.size());
  DCP_CHECK(num_ranks >= 1 && num_ranks <= kMaxRanks, num_ranks);
  DCP_CHECK(rank >= 0 && rank < num_ranks, rank);
  DCP_CHECK(nonce != 0, nonce);
  DCP_CHECK(timeout_ns > 0, timeout_ns);
  DCP_CHECK(offset % sizeof(Flag) == 0, offset);
  DCP_CHECK(result != 0 && result % sizeof(uint64_t) == 0, result);
  const Variant* variant = find_variant(isa.c_str());
  if (variant == nullptr) throw py::value_error("this processor or build has no variant " + isa);
  require_device(*variant, device);
  LinkCheckParams p = {};
  p.symm = {bases_table != 0 ? reinterpret_cast<const uint64_t*>(bases_table) : bases.data(), rank, num_ranks,
            multicast};
  p.multicast_view = multicast_view != 0 ? multicast_view : bases[size_t(rank)];
  p.offset = offset;
  p.nonce = nonce;
  p.wait = {timeout_ns, timeout_ns, num_spins, num_yields, nullptr, nullptr, nullptr};
  p.result = reinterpret_cast<LinkResult*>(result);
  py::gil_scoped_release no_gil;
  return int(variant->link_check().run(p, {0, 1, reinterpret_cast<void*>(stream), device}));
}

}  // namespace

void bind_link_check(py::module_& module) {
  module.attr("LINK_SLOT_BYTES") = sizeof(LinkSlot);
  module.def("link_check", &link_check, py::kw_only(), py::arg("rank"), py::arg("bases"),
             py::arg("bases_table"), py::arg("multicast"), py::arg("multicast_view"), py::arg("offset"),
             py::arg("nonce"), py::arg("timeout_ns"), py::arg("num_spins"), py::arg("num_yields"),
             py::arg("result"), py::arg("isa"), py::arg("stream") = 0, py::arg("device") = 0);
}

}  // namespace dcp
