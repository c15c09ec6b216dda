// Which compilations of the ops this module carries, and what it is called; the one file that differs between
// targets. So it is kept away from pybind11, which takes long to compile.
#include <Python.h>

#include <cstring>

#include "host/dispatch.h"

namespace dcp {

std::span<const Variant> all_variants() { return kVariants; }

const Variant* find_variant(const char* name) {
  for (const Variant& variant : kVariants) {
    if (variant.runs_here() && (std::strcmp(name, "auto") == 0 || std::strcmp(name, variant.name) == 0)) {
      return &variant;
    }
  }
  return nullptr;
}

#define DCP_STRING_OF(name) #name
#define DCP_STRING(name) DCP_STRING_OF(name)

const char* module_name() { return DCP_STRING(DCP_MODULE); }

const char* build_id() { return DCP_BUILD_ID; }

const char* sanitizers() { return DCP_SANITIZERS; }

}  // namespace dcp

#define DCP_INIT_OF(module) PyInit_##module
#define DCP_INIT(module) DCP_INIT_OF(module)

extern "C" PyObject* PyInit__C();  // module.cpp

// What Python calls when it imports a module of this name.
extern "C" __attribute__((visibility("default"))) PyObject* DCP_INIT(DCP_MODULE)() { return PyInit__C(); }
