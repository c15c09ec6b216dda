/* A libamdhip64.so that only writes down what it is called with, for tests of hip-python's side (STUB_HIP_LOG: where).
   STUB_HIP_FAIL = "function=number" has that function fail; STUB_HIP_VERSION is the version it says. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int type, handles, location, id; void* win32; unsigned char flags[4]; } Prop;
typedef struct { int location, id, flags; } Access;
typedef struct { char reserved[64]; } Ipc;

static int version(void) { const char* v = getenv("STUB_HIP_VERSION"); return v ? atoi(v) : 71560940; }

static int done(const char* call) {
  const char* fail = getenv("STUB_HIP_FAIL");
  size_t n = strlen(call);
  return fail && !strncmp(fail, call, n) && fail[n] == '=' ? atoi(fail + n + 1) : 0;
}

#define LOG(name, ...) do { FILE* log_ = fopen(getenv("STUB_HIP_LOG"), "a"); fprintf(log_, "%s", name); \
  fprintf(log_, " " __VA_ARGS__); fprintf(log_, "\n"); fclose(log_); } while (0)
#define END(name) return done(name)
static __thread int current, mode;

int hipGetLastError(void) {
  LOG("hipGetLastError", "");
  return 0;
}

int hipRuntimeGetVersion(int* v) {
  LOG("hipRuntimeGetVersion", "");
  *v = version();
  END("hipRuntimeGetVersion");
}

int hipGetDeviceCount(int* n) {
  LOG("hipGetDeviceCount", "");
  *n = 2;
  END("hipGetDeviceCount");
}

int hipDeviceGetName(char* s, int n, int d) {
  LOG("hipDeviceGetName", "%d %d", n, d);
  snprintf(s, n, "Stub %d", d);
  END("hipDeviceGetName");
}

int hipDeviceGetPCIBusId(char* s, int n, int d) {
  LOG("hipDeviceGetPCIBusId", "%d %d", n, d);
  snprintf(s, n, "0000:%02x:00.0", d);
  END("hipDeviceGetPCIBusId");
}

int hipDeviceGetUuid(char* u, int d) {
  LOG("hipDeviceGetUuid", "%d", d);
  memset(u, 'a' + d, 16);
  END("hipDeviceGetUuid");
}

int hipDeviceGetAttribute(int* v, int a, int d) {
  LOG("hipDeviceGetAttribute", "%d %d", a, d);
  *v = 1;
  END("hipDeviceGetAttribute");
}

int hipDeviceCanAccessPeer(int* v, int d, int p) {
  LOG("hipDeviceCanAccessPeer", "%d %d", d, p);
  *v = 1;
  END("hipDeviceCanAccessPeer");
}

int hipDeviceEnablePeerAccess(int p, unsigned f) {
  LOG("hipDeviceEnablePeerAccess", "%d %u", p, f);
  END("hipDeviceEnablePeerAccess");
}

int hipGetDevice(int* d) {
  LOG("hipGetDevice", "");
  *d = current;
  END("hipGetDevice");
}

int hipSetDevice(int d) {
  LOG("hipSetDevice", "%d", d);
  current = d;
  END("hipSetDevice");
}

int hipThreadExchangeStreamCaptureMode(int* m) {
  LOG("hipThreadExchangeStreamCaptureMode", "%d", *m);
  int b = mode;
  mode = *m;
  *m = b;
  END("hipThreadExchangeStreamCaptureMode");
}

int hipStreamCreateWithFlags(void** s, unsigned f) {
  LOG("hipStreamCreateWithFlags", "%u", f);
  *s = (void*)0x88;
  END("hipStreamCreateWithFlags");
}

int hipStreamDestroy(void* s) {
  LOG("hipStreamDestroy", "%p", s);
  END("hipStreamDestroy");
}

int hipStreamSynchronize(void* s) {
  LOG("hipStreamSynchronize", "%p", s);
  END("hipStreamSynchronize");
}

int hipDeviceSynchronize(void) {
  LOG("hipDeviceSynchronize", "");
  END("hipDeviceSynchronize");
}

int hipExtMallocWithFlags(void** p, size_t n, unsigned f) {
  LOG("hipExtMallocWithFlags", "%zu %u", n, f);
  *p = (void*)0x600000000;
  END("hipExtMallocWithFlags");
}

int hipFree(void* p) {
  LOG("hipFree", "%p", p);
  END("hipFree");
}

int hipIpcGetMemHandle(Ipc* h, void* p) {
  LOG("hipIpcGetMemHandle", "%p", p);
  memset(h, 'H', 64);
  h->reserved[3] = 0;
  END("hipIpcGetMemHandle");
}

int hipIpcOpenMemHandle(void** p, Ipc h, unsigned f) {
  LOG("hipIpcOpenMemHandle", "%.64s %u", h.reserved, f);
  *p = (void*)0x610000000;
  END("hipIpcOpenMemHandle");
}

int hipIpcCloseMemHandle(void* p) {
  LOG("hipIpcCloseMemHandle", "%p", p);
  END("hipIpcCloseMemHandle");
}

int hipMemGetInfo(size_t* f, size_t* t) {
  LOG("hipMemGetInfo", "");
  *f = 1000;
  *t = 2000;
  END("hipMemGetInfo");
}

#define PROP "type=%d handles=%d location=%d:%d"
#define PROPS(p) (p)->type, (p)->handles, (p)->location, (p)->id
int hipMemGetAllocationGranularity(size_t* g, const Prop* p, int o) {
  LOG("hipMemGetAllocationGranularity", PROP " %d", PROPS(p), o);
  *g = 4096;
  END("hipMemGetAllocationGranularity");
}

int hipMemCreate(void** h, size_t n, const Prop* p, unsigned long long f) {
  LOG("hipMemCreate", "%zu " PROP " %llu", n, PROPS(p), f);
  *h = (void*)0x11;
  END("hipMemCreate");
}

int hipMemExportToShareableHandle(void* o, void* h, int t, unsigned long long f) {
  LOG("hipMemExportToShareableHandle", "%p %d %llu", h, t, f);
  *(int*)o = 42;
  END("hipMemExportToShareableHandle");
}

int hipMemImportFromShareableHandle(void** h, void* o, int t) {
  LOG("hipMemImportFromShareableHandle", "fd=%d %d", (int)(size_t)o, t);
  *h = (void*)0x22;
  END("hipMemImportFromShareableHandle");
}
int hipMemAddressReserve(void** p, size_t n, size_t a, void* hint, unsigned long long f) {
  LOG("hipMemAddressReserve", "%zu %zu %zu %llu", n, a, (size_t)hint, f);
  *p = (void*)0x700000000;
  END("hipMemAddressReserve");
}

int hipMemAddressFree(void* p, size_t n) {
  LOG("hipMemAddressFree", "%p %zu", p, n);
  END("hipMemAddressFree");
}

int hipMemMap(void* p, size_t n, size_t o, void* h, unsigned long long f) {
  LOG("hipMemMap", "%p %zu %zu %p %llu", p, n, o, h, f);
  END("hipMemMap");
}

int hipMemUnmap(void* p, size_t n) {
  LOG("hipMemUnmap", "%p %zu", p, n);
  END("hipMemUnmap");
}

int hipMemSetAccess(void* p, size_t n, const Access* d, size_t c) {
  LOG("hipMemSetAccess", "%p %zu %zu %d:%d=%d %d:%d=%d", p, n, c, d[0].location, d[0].id, d[0].flags, d[c - 1].location, d[c - 1].id, d[c - 1].flags);
  END("hipMemSetAccess");
}

int hipMemRelease(void* h) {
  LOG("hipMemRelease", "%p", h);
  END("hipMemRelease");
}

int hipHostMalloc(void** p, size_t n, unsigned f) {
  LOG("hipHostMalloc", "%zu %#x", n, f);
  *p = (void*)0x5000;
  END("hipHostMalloc");
}

int hipHostGetDevicePointer(void** d, void* h, unsigned f) {
  LOG("hipHostGetDevicePointer", "%p %u", h, f);
  *d = h;
  END("hipHostGetDevicePointer");
}

int hipHostFree(void* p) {
  LOG("hipHostFree", "%p", p);
  END("hipHostFree");
}

int hipMemcpyHtoDAsync(void* d, const void* s, size_t n, void* stream) {
  LOG("hipMemcpyHtoDAsync", "%p %p %zu %p", d, s, n, stream);
  END("hipMemcpyHtoDAsync");
}

int hipMemcpyDtoHAsync(void* d, const void* s, size_t n, void* stream) {
  LOG("hipMemcpyDtoHAsync", "%p %p %zu %p", d, s, n, stream);
  END("hipMemcpyDtoHAsync");
}

int hipMemsetD8Async(void* d, unsigned char v, size_t n, void* stream) {
  LOG("hipMemsetD8Async", "%p %d %zu %p", d, v, n, stream);
  END("hipMemsetD8Async");
}
