#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// Saves what a call has to keep, and the stack pointer at *save; goes on where `to` was saved.
extern "C" void explorer_switch(char** save, char* to);

#if defined(__x86_64__)
__asm__(R"(
.text
.globl explorer_switch
.type explorer_switch, @function
explorer_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size explorer_switch, .-explorer_switch
)");
namespace {
constexpr size_t kReturnWord = 6, kFrameWords = 8;  // `ret` leaves the stack as a call does: 8 bytes off 16
}  // namespace
#elif defined(__aarch64__)
__asm__(R"(
.text
.globl explorer_switch
.type explorer_switch, %function
explorer_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size explorer_switch, .-explorer_switch
)");
namespace {
constexpr size_t kReturnWord = 11, kFrameWords = 20;
}  // namespace
#else
#error "fiber.cpp: no switch for this architecture"
#endif

namespace explorer {
namespace {
char* scheduler = nullptr;
}

void Fiber::prepare(void (*entry)()) {
  if (stack == nullptr) {
    void* memory =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("explorer: mmap of a stack");
      std::abort();
    }
    stack = static_cast<char*>(memory);
  }
  stack_pointer = top() - kFrameWords * sizeof(uint64_t);
  std::memset(stack_pointer, 0, kFrameWords * sizeof(uint64_t));
  reinterpret_cast<uint64_t*>(stack_pointer)[kReturnWord] = reinterpret_cast<uint64_t>(entry);
  forget_below();
}

void Fiber::enter() { explorer_switch(&scheduler, stack_pointer); }
void Fiber::leave() { explorer_switch(&stack_pointer, scheduler); }

void Fiber::forget_below() {
  constexpr size_t kMostBytes = 12 << 10;  // a kernel goes no deeper in one call
  const size_t below = size_t(stack_pointer - stack);
  const size_t num_bytes = below < kMostBytes ? below : kMostBytes;
  std::memset(stack_pointer - num_bytes, 0, num_bytes);
}

}  // namespace explorer
