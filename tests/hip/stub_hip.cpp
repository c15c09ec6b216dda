// A libamdhip64 without a device, or with devices that take kernels and run none: what _C_hip finds when it
// looks for a ROCm runtime. Launches are noted; tests ask about them by ctypes. A module
// is of the device that was current when it was loaded, and its functions run there only.
//
//   STUB_HIP_DEVICES=n   how many devices there are (default 8); with 0, hipGetDeviceCount is an error
//   STUB_HIP_LOAD=n      what hipModuleLoadData returns (default 0)
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "ops/query_gather.h"

namespace {
struct Module {
  const void* image;
  int device;
};
struct Function {
  std::string name;
  int device;
};
struct Launched {
  const Function* function;
  unsigned num_blocks, num_threads;
  void* stream;
};
std::vector<Launched> launched;
std::set<std::string> names;         // of kernels that somebody looked up
std::set<const void*> modules;       // that somebody loaded
uint64_t (*look)(const void*) = nullptr;
uint64_t seen = 0;
int fails = 0, num_loads = 0, num_errors_forgotten = 0;
thread_local int device = 0;

int number_of(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}
}  // namespace

extern "C" {

// ---- of HIP. 100: hipErrorNoDevice, 101: hipErrorInvalidDevice, 209: hipErrorNoBinaryForGpu

int hipGetDeviceCount(int* count) {
  *count = number_of("STUB_HIP_DEVICES", 8);
  return *count == 0 ? 100 : 0;
}
int hipGetDevice(int* current) {
  *current = device;
  return 0;
}
int hipSetDevice(int to) {
  if (to < 0 || to >= number_of("STUB_HIP_DEVICES", 8)) return 101;
  device = to;
  return 0;
}
int hipDeviceGetName(char* name, int length, int of) {
  std::snprintf(name, size_t(length), "Stub %d", of);
  return 0;
}
int hipModuleLoadData(void** module, const void* image) {
  const int error = number_of("STUB_HIP_LOAD", 0);
  if (error != 0) return error;
  if (std::memcmp(image, "__CLANG_OFFLOAD_BUNDLE__", 24) != 0) return 209;
  ++num_loads;
  *module = new Module{image, device};
  modules.insert(*module);
  return 0;
}
int hipModuleGetFunction(void** function, void* module, const char* name) {
  if (modules.count(module) == 0) return 400;  // hipErrorInvalidHandle
  if (static_cast<const Module*>(module)->device != device) return 201;
  names.insert(name);
  *function = new Function{name, device};
  return 0;
}
int hipModuleLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                          unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void* stream,
                          void** params, void** extra) {
  if (shared_bytes != 0 || extra != nullptr) return 1;
  if (static_cast<const Function*>(function)->device != device) return 201;  // hipErrorInvalidContext
  if (look != nullptr) seen = look(params[0]);
  if (*static_cast<const int*>(params[1]) != 0) return 1;  // first_channel: the second parameter
  if (fails > 0 && fails-- > 0) return 701;                // hipErrorLaunchOutOfResources
  launched.push_back({static_cast<const Function*>(function), x * y * z, threads_x * threads_y * threads_z, stream});
  return 0;
}
int hipGetLastError() {
  ++num_errors_forgotten;
  return 0;
}
const char* hipGetErrorName(int error) {
  switch (error) {
    case 100:
      return "hipErrorNoDevice";
    case 209:
      return "hipErrorNoBinaryForGpu";
    case 701:
      return "hipErrorLaunchOutOfResources";
    default:
      return "hipErrorUnknown";
  }
}
const char* hipGetErrorString(int error) { return error == 100 ? "no ROCm-capable device is detected" : "an error"; }

// ---- for tests, with the names of tests/cuda/launch_shim.cpp

int shim_num_launches() { return int(launched.size()); }
// Modules that were loaded since the last reset: a load may wait for kernels that run.
int shim_num_not_loaded() { return num_loads; }
unsigned shim_num_blocks() { return launched.back().num_blocks; }
unsigned shim_num_threads() { return launched.back().num_threads; }
void* shim_stream() { return launched.back().stream; }
bool shim_is_cooperative() { return false; }
const char* shim_name() { return launched.back().function->name.c_str(); }
int shim_device() { return device; }
int shim_num_errors_forgotten() { return num_errors_forgotten; }
void shim_fail_next() { fails = 1; }
void shim_reset() {
  launched.clear();
  num_loads = 0;
}
// All names that were looked up, a line each.
const char* shim_names() {
  static std::string all;
  all.clear();
  for (const std::string& name : names) all += name + "\n";
  return all.c_str();
}
void shim_look_at_queries() {
  look = [](const void* params) {
    return static_cast<const dcp::QueryGatherParams*>(params)->publish_to.multicast;
  };
}
uint64_t shim_seen() {
  look = nullptr;
  return seen;
}
}
