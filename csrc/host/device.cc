// Whether a device can run the kernels of this compilation at all: asked before anything is made for it.
#include "arch/target.h"

namespace dcp::DCP_NS {

void device_fault(int device, char* text, size_t size) { arch::device_fault(device, text, size); }

}  // namespace dcp::DCP_NS
