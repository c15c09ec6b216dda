// Picks the one target header of this compilation. Nothing above arch/ asks which target it is.
// DCP_NS names the namespace of this compilation: each CPU variant, CUDA and HIP get their own, so that
// several compilations of one source live in one module without sharing a symbol.
#pragma once

#include "core/types.h"

#ifndef DCP_NS
#error "define DCP_NS: the namespace of this compilation (v4_bf16, v4, v3, baseline, cuda, hip, ...)"
#endif

#if defined(DCP_TARGET_CPU)
#if !defined(DCP_CPU_CTA)
#define DCP_CPU_CTA "arch/cpu_cta.h"
#endif
#include "arch/cpu.h"
#include "arch/cpu_vec.h"
#elif defined(DCP_TARGET_CUDA)
#include "arch/cuda.h"
#include "arch/gpu_numbers.h"
#include "arch/gpu_bytes.h"
#elif defined(DCP_TARGET_HIP)
#include "arch/hip.h"
#include "arch/gpu_numbers.h"
#include "arch/gpu_bytes.h"
#else
#error "no target: define DCP_TARGET_CPU, DCP_TARGET_CUDA or DCP_TARGET_HIP"
#endif

#include "arch/contract.h"
