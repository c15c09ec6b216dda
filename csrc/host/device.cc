// Whether a device can run the kernels of this compilation at all, asked before anything is made for it; and
// why it did not take one.
#include "arch/target.h"

namespace dcp::DCP_NS {

void device_fault(int device, char* text, size_t size) { arch::device_fault(device, text, size); }
void launch_fault(char* text, size_t size) { arch::launch_fault(text, size); }

}  // namespace dcp::DCP_NS
