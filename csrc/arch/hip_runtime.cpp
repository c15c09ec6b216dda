// See hip_runtime.h. The compiler has put into every object of an op a fat binary with its code objects, and
// code that tells a HIP runtime at start-up which kernels are in there, by the functions at the end of this
// file. Here they only take notes: nothing of ROCm is linked, and a code object is loaded when a device first
// needs it.
#include "arch/hip_runtime.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

namespace dcp::hip_runtime {
namespace {

// Of the HIP runtime's C interface, what is called here; its types are opaque or plain numbers.
using Error = int;  // hipError_t; 0 is hipSuccess

struct Api {
  Error (*hipGetDeviceCount)(int*);
  Error (*hipGetDevice)(int*);
  Error (*hipSetDevice)(int);
  Error (*hipDeviceGetName)(char*, int, int);
  Error (*hipModuleLoadData)(void**, const void*);
  Error (*hipModuleGetFunction)(void**, void*, const char*);
  Error (*hipModuleLaunchKernel)(void* function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                                 unsigned threads_x, unsigned threads_y, unsigned threads_z,
                                 unsigned shared_bytes, void* stream, void** params, void** extra);
  Error (*hipGetLastError)();
  const char* (*hipGetErrorName)(Error);
  const char* (*hipGetErrorString)(Error);
};

constexpr int kMaxDevices = 64;

// The code objects of one source: modules are made of it, one for a device.
struct Binary {
  const void* image;
  void* modules[kMaxDevices];
};
struct Kernel {
  std::string name;
  Binary* binary;
  std::atomic<void*> functions[kMaxDevices];
};

struct Registry {
  std::unordered_map<const void*, Kernel>
      kernels;              // by the host's name; complete once the module is imported
  std::atomic<int> pid{0};  // of the process that has looked for the library
  std::mutex loading;       // the rest, and Binary::modules
  Api api;
  bool has_api = false;
};
Registry& registry() {
  // Made by the first object that registers, in no stated order; and never gone, for a thread may launch
  // while the process ends.
  static Registry& the_registry = *new Registry;
  return the_registry;
}

// Of the last call that failed on this thread.
struct Failure {
  const char* call = "";
  std::string fault;
};
thread_local Failure last_failure;

// ---- the library

// A process may have one HIP runtime: the one that PyTorch has loaded, from wherever, is it.
int find_loaded(dl_phdr_info* info, size_t, void* found) {
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* base = slash != nullptr ? slash + 1 : info->dlpi_name;
  if (std::strncmp(base, "libamdhip64.so", 14) != 0) return 0;
  *static_cast<std::string*>(found) = info->dlpi_name;
  return 1;
}

void* open_library(std::string& fault) {
  std::string loaded;
  dl_iterate_phdr(find_loaded, &loaded);
  if (!loaded.empty()) {
    if (void* library = dlopen(loaded.c_str(), RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}) {
    if (void* library = dlopen(name, RTLD_NOW)) return library;
    const char* error = dlerror();
    const std::string text = error != nullptr ? error : name;
    // One that is there, and lacks another library, says more than those that are not.
    if (fault.empty() || text.compare(0, std::strlen(name), name) != 0) fault = text;
  }
  return nullptr;
}

template <class Function>
bool find(void* library, const char* name, Function& function, std::string& fault) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) fault = std::string("it has no ") + name;
  return function != nullptr;
}

// With `loading` held. A failure is not remembered: the library may be installed, or loaded by PyTorch,
// later.
bool load_api(Registry& all, std::string& fault) {
  if (all.has_api) return true;
  all.pid = getpid();
  void* library = open_library(fault);
  if (library == nullptr) return false;
#define DCP_FIND(name) find(library, #name, all.api.name, fault)
  all.has_api = DCP_FIND(hipGetDeviceCount) && DCP_FIND(hipGetDevice) && DCP_FIND(hipSetDevice) &&
                DCP_FIND(hipDeviceGetName) && DCP_FIND(hipModuleLoadData) && DCP_FIND(hipModuleGetFunction) &&
                DCP_FIND(hipModuleLaunchKernel) && DCP_FIND(hipGetLastError) && DCP_FIND(hipGetErrorName) &&
                DCP_FIND(hipGetErrorString);
#undef DCP_FIND
  if (!all.has_api) dlclose(library);
  return all.has_api;
}

// ---- devices and kernels

// Notes what a call has returned, unless that is success.
Error noted(const Api& api, const char* call, Error error) {
  if (error != 0) {
    last_failure = {call, std::string(api.hipGetErrorName(error)) + ", error " + std::to_string(error) +
                              ": " + api.hipGetErrorString(error)};
  }
  return error;
}
#define DCP_CALL(api, name, ...) noted(api, #name, (api).name(__VA_ARGS__))

// Makes a device this thread's current one, if it is not. Who calls sees to what was current before.
bool use_device(const Api& api, int device) {
  int current = -1;
  if (DCP_CALL(api, hipGetDevice, &current) != 0) return false;
  return current == device || DCP_CALL(api, hipSetDevice, device) == 0;
}

// With `loading` held and the device current.
bool load_module(const Api& api, Binary& binary, int device) {
  return binary.modules[device] != nullptr ||
         DCP_CALL(api, hipModuleLoadData, &binary.modules[device], binary.image) == 0;
}

// Functions stay loaded for as long as the process lives; the device is current when this returns.
void* load_function(Registry& all, Kernel& kernel, int device) {
  const std::lock_guard<std::mutex> lock(all.loading);
  std::string fault;
  if (!load_api(all, fault)) {
    last_failure = {"dlopen", fault};
    return nullptr;
  }
  const Api& api = all.api;
  if (!use_device(api, device) || !load_module(api, *kernel.binary, device)) return nullptr;
  void *function = nullptr, *module = kernel.binary->modules[device];
  if (DCP_CALL(api, hipModuleGetFunction, &function, module, kernel.name.c_str()) != 0) return nullptr;
  kernel.functions[device].store(function, std::memory_order_release);
  return function;
}

bool enqueue(Registry& all, Kernel& kernel, const Launch& launch, int num_threads, const void* params) {
  void* function = kernel.functions[launch.device].load(std::memory_order_acquire);
  if (function != nullptr ? !use_device(all.api, launch.device)
                          : (function = load_function(all, kernel, launch.device)) == nullptr) {
    return false;
  }
  const int num_blocks = launch.end_channel - launch.first_channel;
  if (num_blocks <= 0) return true;
  int first_channel = launch.first_channel;
  void* arguments[] = {const_cast<void*>(params), &first_channel};
  return DCP_CALL(all.api, hipModuleLaunchKernel, function, unsigned(num_blocks), 1, 1, unsigned(num_threads),
                  1, 1, 0, launch.stream, arguments, nullptr) == 0;
}

}  // namespace

Status launch(const void* kernel_name, const Launch& launch, int num_threads, const void* params) {
  Registry& all = registry();
  const auto found = all.kernels.find(kernel_name);
  if (found == all.kernels.end() || launch.device < 0 || launch.device >= kMaxDevices) {
    last_failure = {"launch", "no such kernel or device"};
    return Status::kLaunchFailed;
  }
  if (enqueue(all, found->second, launch, num_threads, params)) return Status::kOk;
  if (all.has_api) all.api.hipGetLastError();  // forgets it: else the caller's next call would report it
  return Status::kLaunchFailed;
}

void launch_fault(char* text, size_t size) {
  std::snprintf(text, size, "%s: %s", last_failure.call, last_failure.fault.c_str());
}

void device_fault(int device, char* text, size_t size) {
  Registry& all = registry();
  if (all.pid != 0 && all.pid != getpid()) {
    std::snprintf(text, size,
                  "a process that was forked after the ROCm runtime was loaded cannot use it (start "
                  "method spawn)");
    return;
  }
  const std::lock_guard<std::mutex> lock(all.loading);
  const Api& api = all.api;
  text[0] = '\0';
  std::string fault;
  int num_devices = 0;
  if (!load_api(all, fault)) {
    std::snprintf(text, size, "a ROCm runtime must be installed (no ROCm runtime: %s)", fault.c_str());
    return;
  }
  if (DCP_CALL(api, hipGetDeviceCount, &num_devices) != 0 || num_devices == 0) {
    std::snprintf(
        text, size,
        "the ROCm runtime must find a device (no device: %s; see `rocminfo`, HIP_VISIBLE_DEVICES, and "
        "whether this user may open /dev/kfd)",
        last_failure.fault.c_str());
  } else if (device < 0 || device >= num_devices || device >= kMaxDevices) {
    std::snprintf(text, size, "device must be below the number of devices, %d (got %d)", num_devices, device);
  } else if (!all.kernels.empty() && use_device(api, device) &&
             load_module(api, *all.kernels.begin()->second.binary, device)) {
    return;
  } else {
    char name[256] = "";
    api.hipDeviceGetName(name, int(sizeof(name)), device);
    std::snprintf(text, size,
                  "device %d must run this module's code (%s: %s; setup.py says what it was built for)",
                  device, name, last_failure.fault.c_str());
  }
  api.hipGetLastError();
}

}  // namespace dcp::hip_runtime

// ---- what clang's code calls at start-up, of which libamdhip64 has the usual definitions. Hidden: an op's
// object finds these, and nobody else does.

#define DCP_HIDDEN extern "C" __attribute__((visibility("hidden")))

using dcp::hip_runtime::Binary;
using dcp::hip_runtime::registry;

// As clang lays it out: HIPF, version 1, the fat binary.
struct FatBinaryWrapper {
  uint32_t magic, version;
  const void* binary;
  const void* unused;
};

DCP_HIDDEN void** __hipRegisterFatBinary(const FatBinaryWrapper* wrapper) {
  return reinterpret_cast<void**>(new Binary{wrapper->binary, {}});
}

// Kernels are there for as long as the module is.
DCP_HIDDEN void __hipUnregisterFatBinary(void**) {}

DCP_HIDDEN void __hipRegisterFunction(void** binary, const void* host_name, char*, const char* device_name,
                                      unsigned, void*, void*, void*, void*, int*) {
  dcp::hip_runtime::Kernel& kernel = registry().kernels[host_name];
  kernel.name = device_name;
  kernel.binary = reinterpret_cast<Binary*>(binary);
}

// A kernel<<<>>> would call these; there is none.
DCP_HIDDEN int hipSetupArgument(const void*, size_t, size_t) { return 1; }
DCP_HIDDEN int hipLaunchByPtr(const void*) { return 1; }
