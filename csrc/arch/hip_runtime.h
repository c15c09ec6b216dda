// The host's side of the HIP target: code objects and launches, by a ROCm runtime that is looked for when it
// is first needed. So the module imports anywhere.
#pragma once

#include "core/types.h"

namespace dcp::hip_runtime {

// Enqueues `kernel`, the host's name for a kernel_entry<>, for the channels of `launch`, a block of
// `num_threads` each. Without channels it only loads the kernel.
Status launch(const void* kernel, const Launch& launch, int num_threads, const void* params);

// What the last launch of this thread that failed has met with.
void launch_fault(char* text, size_t size);

// "", or why `device` runs no kernel of this module.
void device_fault(int device, char* text, size_t size);

}  // namespace dcp::hip_runtime
