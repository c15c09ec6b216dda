// Stands in front of the CUDA runtime in a test build of _C_cuda (`ld --wrap`): there is a device, and a
// launch is counted instead of done.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/query_gather.h"

namespace {
struct Launched {
  const void* kernel;
  unsigned num_blocks, num_threads;
  void* stream;
  bool is_cooperative;
};
std::vector<Launched> launched;
std::vector<const void*> loaded;
uint64_t (*look)(const void*) = nullptr;
uint64_t seen = 0;
int num_not_loaded = 0, device = 0, fails = 0;
}  // namespace

extern "C" {

cudaError_t __wrap_cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t __wrap_cudaGetDeviceCount(int* count) {
  *count = 8;
  return cudaSuccess;
}
cudaError_t __wrap_cudaGetDevice(int* current) {
  *current = device;
  return cudaSuccess;
}
cudaError_t __wrap_cudaSetDevice(int to) {
  device = to;
  return cudaSuccess;
}
cudaError_t __wrap_cudaGetLastError() { return cudaSuccess; }
cudaError_t __wrap_cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  std::memset(static_cast<void*>(attributes), 0, sizeof(*attributes));
  loaded.push_back(kernel);
  return cudaSuccess;
}
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments) {
  if (look != nullptr) seen = look(arguments[0]);
  if (fails > 0 && fails-- > 0) return cudaErrorLaunchOutOfResources;
  num_not_loaded += std::find(loaded.begin(), loaded.end(), kernel) == loaded.end();
  launched.push_back({kernel, config->gridDim.x * config->gridDim.y * config->gridDim.z,
                      config->blockDim.x * config->blockDim.y * config->blockDim.z, config->stream,
                      config->numAttrs != 0});
  return cudaSuccess;
}
// What kernel<<<...>>> would come to.
cudaError_t __wrap___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t,
                                      cudaStream_t stream) {
  launched.push_back({kernel, grid.x * grid.y * grid.z, block.x * block.y * block.z, stream, false});
  return cudaSuccess;
}

// For the test, by ctypes.
__attribute__((visibility("default"))) int shim_num_launches() { return int(launched.size()); }
// Launches of kernels that nobody had loaded.
__attribute__((visibility("default"))) int shim_num_not_loaded() { return num_not_loaded; }
__attribute__((visibility("default"))) unsigned shim_num_blocks() { return launched.back().num_blocks; }
__attribute__((visibility("default"))) unsigned shim_num_threads() { return launched.back().num_threads; }
__attribute__((visibility("default"))) void* shim_stream() { return launched.back().stream; }
__attribute__((visibility("default"))) bool shim_is_cooperative() { return launched.back().is_cooperative; }
__attribute__((visibility("default"))) int shim_device() { return device; }
__attribute__((visibility("default"))) void shim_fail_next() { fails = 1; }
__attribute__((visibility("default"))) void shim_reset() { launched.clear(); }
// Of the last launch, all of which were of query_gather: where it stores to all ranks at once, 0 = nowhere.
__attribute__((visibility("default"))) void shim_look_at_queries() {
  look = [](const void* params) {
    return static_cast<const dcp::QueryGatherParams*>(params)->publish_to.multicast;
  };
}
__attribute__((visibility("default"))) uint64_t shim_seen() {
  look = nullptr;
  return seen;
}
}
