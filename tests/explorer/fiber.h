// Threads of the program as fibers of one thread of the machine. A fiber is its stack, which always lies at
// the same addresses: to save a fiber is to copy the part of the stack that is in use, to restore it is to
// copy it back.
#pragma once

#include <cstddef>

namespace explorer {

inline constexpr size_t kStackBytes = 128 << 10;

struct Fiber {
  char* stack = nullptr;          // of kStackBytes
  char* stack_pointer = nullptr;  // while it does not run

  char* top() const { return stack + kStackBytes; }
  size_t bytes_in_use() const { return size_t(top() - stack_pointer); }

  // Makes a stack at the first call. The fiber begins in `entry`, which must not return.
  void prepare(void (*entry)());
  // From the scheduler to the fiber, until that calls `leave`.
  void enter();
  void leave();
  // What lies below the part in use is what earlier calls left there. Calls to come may take such bytes into
  // their frames without writing them, and states would differ that are the same.
  void forget_below();
};

}  // namespace explorer
