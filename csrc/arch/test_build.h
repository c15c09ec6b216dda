// What a test build may ask for on the compiler's command line, and what it is in the others.
#pragma once

// 1: calls leave out their kernel, so that a test can time what is around it.
#if !defined(DCP_STUB_KERNEL)
#define DCP_STUB_KERNEL 0
#endif
