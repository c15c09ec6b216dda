// Whether this processor runs the code of a variant; one function for each, by its name. Asked on the host,
// before any of that code has run. What a GPU module lacks, its device_fault says.
#pragma once

namespace dcp::runs_here {

inline bool cuda() { return true; }
inline bool hip() { return true; }
inline bool baseline() { return true; }

#if defined(__x86_64__)
// The x86-64 psABI levels; __builtin_cpu_supports also asks the OS whether it saves the wide registers.
inline bool v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("lzcnt") && __builtin_cpu_supports("movbe");
}
inline bool v4() {
  return v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
inline bool v4_bf16() { return v4() && __builtin_cpu_supports("avx512bf16"); }
#endif

}  // namespace dcp::runs_here
