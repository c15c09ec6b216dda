// Included ahead of everything in the files that the explorer instruments: what their code asks of the C
// library goes to the engine (runtime.cpp). The headers come first, so that the names change in the code
// alone.
#pragma once

#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <memory>

extern "C" {
void* explorer_memcpy(void* to, const void* from, size_t num_bytes);
void* explorer_memmove(void* to, const void* from, size_t num_bytes);
void* explorer_memset(void* to, int byte, size_t num_bytes);
int explorer_clock_gettime(clockid_t clock, timespec* now);
int explorer_sched_yield();
long explorer_syscall(long number, ...);
extern int explorer_mutation;
}
namespace std {
using ::explorer_memcpy;
using ::explorer_memmove;
using ::explorer_memset;
}  // namespace std

#define memcpy explorer_memcpy
#define memmove explorer_memmove
#define memset explorer_memset
#define clock_gettime explorer_clock_gettime
// A wait counts its yields (arch/cpu.h: Backoff), and never has enough of them in a scenario. The count would
// tell states apart that are the same: so each yield takes itself off again.
#define sched_yield() (--num_pauses_, explorer_sched_yield())
#define syscall explorer_syscall
