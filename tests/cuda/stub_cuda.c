/* A libcuda.so.1 that does nothing but tell what it was called with: does cuda-python hand over what the heap means?
 * Each call appends a line to the file named by STUB_CUDA_LOG. Handles that it returns are small numbers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int type, id; } Location;
typedef struct {
  int type, handle_types;
  Location location;
  void* win32;
  unsigned char flags[8];
} MemoryProp;
typedef struct { unsigned int num_devices; size_t nbytes; unsigned long long handle_types, flags; } TeamProp;
typedef struct { Location location; int flags; } Access;
typedef unsigned long long u64;

/* Writes the line; returns what STUB_CUDA_FAIL=<call>=<number> has for the call that it begins with, else 0. */
static int say(const char* format, ...) {
  const char* fail = getenv("STUB_CUDA_FAIL");
  char line[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  FILE* file = fopen(getenv("STUB_CUDA_LOG"), "a");
  fprintf(file, "%s\n", line);
  fclose(file);
  size_t length = strcspn(line, " ");
  return fail != NULL && strncmp(fail, line, length) == 0 && fail[length] == '=' ? atoi(fail + length + 1) : 0;
}

int cuInit(unsigned flags) { return say("cuInit %u", flags); }
int cuDriverGetVersion(int* v) { *v = 13000; return say("cuDriverGetVersion"); }
int cuDeviceGetCount(int* n) { *n = 2; return say("cuDeviceGetCount"); }
int cuDeviceGet(int* d, int i) { *d = i; return say("cuDeviceGet %d", i); }
int cuDeviceGetName(char* s, int n, int d) { snprintf(s, n, "Stub %d", d); return say("cuDeviceGetName %d %d", n, d); }
int cuDeviceGetUuid_v2(char* u, int d) { memset(u, 0x10 + d, 16); return say("cuDeviceGetUuid %d", d); }
int cuDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, n, "0000:0%d:00.0", d); return say("cuDeviceGetPCIBusId %d %d", n, d); }
int cuDeviceGetAttribute(int* v, int a, int d) { *v = 1; return say("cuDeviceGetAttribute %d %d", a, d); }
int cuDeviceCanAccessPeer(int* v, int d, int p) { *v = 1; return say("cuDeviceCanAccessPeer %d %d", d, p); }
int cuDevicePrimaryCtxRetain(void** c, int d) { *c = (void*)0x77; return say("cuDevicePrimaryCtxRetain %d", d); }
int cuDevicePrimaryCtxRelease_v2(int d) { return say("cuDevicePrimaryCtxRelease %d", d); }
int cuCtxPushCurrent_v2(void* c) { return say("cuCtxPushCurrent %p", c); }
int cuCtxPopCurrent_v2(void** c) { *c = (void*)0x77; return say("cuCtxPopCurrent"); }
int cuThreadExchangeStreamCaptureMode(int* mode) {
  int given = *mode;
  *mode = 0;
  return say("cuThreadExchangeStreamCaptureMode %d", given);
}
int cuStreamCreate(void** s, unsigned f) { *s = (void*)0x88; return say("cuStreamCreate %u", f); }
int cuStreamDestroy_v2(void* s) { return say("cuStreamDestroy %p", s); }
int cuCtxSynchronize(void) { return say("cuCtxSynchronize"); }
int cuStreamSynchronize(void* s) { return say("cuStreamSynchronize %p", s); }
static int prop(const char* call, size_t n, const MemoryProp* p, u64 last) {
  return say("%s %zu type=%d handles=%d location=%d:%d %llu", call, n, p->type, p->handle_types, p->location.type, p->location.id, last);
}
int cuMemGetAllocationGranularity(size_t* g, const MemoryProp* p, int o) { *g = 2 << 20; return prop("cuMemGetAllocationGranularity", 0, p, o); }
int cuMemCreate(u64* h, size_t n, const MemoryProp* p, u64 f) { *h = 0x11; return prop("cuMemCreate", n, p, f); }
int cuMemRelease(u64 h) { return say("cuMemRelease %#llx", h); }
int cuMemExportToShareableHandle(void* out, u64 h, int type, u64 f) {
  if (type == 1) *(int*)out = 42;
  if (type == 8) memset(out, 'F', 64);
  return say("cuMemExportToShareableHandle %#llx %d %llu", h, type, f);
}
int cuMemImportFromShareableHandle(u64* h, void* in, int type) {
  *h = 0x22;
  if (type == 1) return say("cuMemImportFromShareableHandle fd=%d %d", (int)(uintptr_t)in, type);
  return say("cuMemImportFromShareableHandle %.64s %d", (const char*)in, type);
}
int cuMemAddressReserve(u64* p, size_t n, size_t a, u64 hint, u64 f) { *p = 0x700000000; return say("cuMemAddressReserve %zu %zu %llu %llu", n, a, hint, f); }
int cuMemAddressFree(u64 p, size_t n) { return say("cuMemAddressFree %#llx %zu", p, n); }
int cuMemMap(u64 p, size_t n, size_t o, u64 h, u64 f) { return say("cuMemMap %#llx %zu %zu %#llx %llu", p, n, o, h, f); }
int cuMemUnmap(u64 p, size_t n) { return say("cuMemUnmap %#llx %zu", p, n); }
int cuMemSetAccess(u64 p, size_t n, const Access* d, size_t count) {
  char text[256] = "";
  for (size_t i = 0; i < count; i++) sprintf(text + strlen(text), " %d:%d=%d", d[i].location.type, d[i].location.id, d[i].flags);
  return say("cuMemSetAccess %#llx %zu%s", p, n, text);
}
static int team(const char* call, const TeamProp* p, int last) {
  return say("%s devices=%u %zu handles=%llu flags=%llu %d", call, p->num_devices, p->nbytes, p->handle_types, p->flags, last);
}
int cuMulticastGetGranularity(size_t* g, const TeamProp* p, int o) { *g = 2 << 20; return team("cuMulticastGetGranularity", p, o); }
int cuMulticastCreate(u64* h, const TeamProp* p) { *h = 0x33; return team("cuMulticastCreate", p, 0); }
int cuMulticastAddDevice(u64 h, int d) { return say("cuMulticastAddDevice %#llx %d", h, d); }
int cuMulticastBindMem(u64 h, size_t at, u64 m, size_t o, size_t n, u64 f) { return say("cuMulticastBindMem %#llx %zu %#llx %zu %zu %llu", h, at, m, o, n, f); }
int cuMulticastUnbind(u64 h, int d, size_t at, size_t n) { return say("cuMulticastUnbind %#llx %d %zu %zu", h, d, at, n); }
int cuMemHostAlloc(void** p, size_t n, unsigned f) { *p = (void*)0x5000; return say("cuMemHostAlloc %zu %u", n, f); }
int cuMemHostGetDevicePointer_v2(u64* d, void* p, unsigned f) { *d = (u64)p; return say("cuMemHostGetDevicePointer %p %u", p, f); }
int cuMemFreeHost(void* p) { return say("cuMemFreeHost %p", p); }
int cuMemcpyHtoDAsync_v2(u64 d, const void* p, size_t n, void* s) { return say("cuMemcpyHtoDAsync %#llx %p %zu %p", d, p, n, s); }
int cuMemcpyDtoHAsync_v2(void* p, u64 d, size_t n, void* s) { return say("cuMemcpyDtoHAsync %p %#llx %zu %p", p, d, n, s); }
int cuMemsetD8Async(u64 d, unsigned char v, size_t n, void* s) { return say("cuMemsetD8Async %#llx %d %zu %p", d, v, n, s); }
int cuMemGetInfo_v2(size_t* f, size_t* t) { *f = 1000; *t = 2000; return say("cuMemGetInfo"); }

/* How cuda-python finds all others. A name means its newest version. */
int cuGetProcAddress_v2(const char* name, void** function, int version, u64 flags, int* status) {
  char versioned[128];
  (void)version; (void)flags;
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *function = dlsym(RTLD_DEFAULT, versioned);
  if (*function == NULL) *function = dlsym(RTLD_DEFAULT, name);
  if (*function == NULL) {
    void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(self, versioned);
    if (*function == NULL) *function = dlsym(self, name);
  }
  if (status != NULL) *status = *function == NULL;
  return *function == NULL ? 500 : 0;
}
int cuGetProcAddress(const char* name, void** function, int version, u64 flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
