// Devices and their attributes, errors, and what went wrong, for those who ask.
#include "device.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <time.h>

std::atomic<long> launch_count{0}, replay_count{0}, id_count{0};
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
static std::vector<std::string> refusals, faults;
static std::map<std::string, long> uses;  // allocations by call and current device

static int number(const char* name, int otherwise) {
  const char* v = getenv(name);
  return v && *v ? atoi(v) : otherwise;
}
Switches& switches() {
  static Switches s{number("FAKE_CUDA_LAZY", 0), number("FAKE_CUDA_POISON", 1), number("FAKE_CUDA_DEVICES", 1),
                    number("FAKE_CUDA_SM", 90), (size_t)number("FAKE_CUDA_MIB", 80 << 10) << 20};
  return s;
}
void trace(const char* format, ...) {
  static bool on = number("FAKE_CUDA_TRACE", 0);
  if (!on) return;
  va_list a;
  va_start(a, format);
  vfprintf(stderr, format, a);
  va_end(a);
  fputc('\n', stderr);
}
double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
cudaError_t fail(cudaError_t e) {
  if (e != cudaSuccess) last_error = e;
  return e;
}
cudaError_t refuse(const char* api, cudaError_t e) {
  Hold h(lock);
  refusals.push_back(std::string(api) + ": " + cudaGetErrorName(e));
  trace("fake_cuda: %s refused: %s", api, cudaGetErrorName(e));
  return fail(e);
}
void fault(const std::string& text) {
  Hold h(lock);
  for (auto& f : faults) if (f == text) return;
  faults.push_back(text);
  trace("fake_cuda: fault: %s", text.c_str());
}
void count(const std::string& what, int device) { Hold h(lock); uses[what + " on " + std::to_string(device)]++; }
std::string taken(std::vector<std::string>& lines) {
  Hold h(lock);
  std::string all;
  for (auto& line : lines) all += line + "\n";
  lines.clear();
  return all;
}

static thread_local std::string text;
API const char* fake_refusals() { text = taken(refusals); return text.c_str(); }
API const char* fake_faults() { text = taken(faults); return text.c_str(); }
API const char* fake_uses() {
  Hold h(lock);
  text.clear();
  for (auto& u : uses) text += std::to_string(u.second) + " " + u.first + "\n";
  return text.c_str();
}
API void fake_fault(const char* said) { fault(said); }
API int fake_switch(const char* name, long value) {
  Switches& s = switches();
  std::string n = name;
  if (n == "lazy") {
    if (!value) drain_all(-1);
    s.lazy = (int)value;
  } else if (n == "poison") s.poison = (int)value;
  else if (n == "mib") s.total = (size_t)value << 20;
  else return 1;
  return 0;
}
// Called by the generated tables for every entry point that nobody wrote.
API void fake_missing(const char* name) {
  fprintf(stderr, "fake_cuda: %s is not written\n", name);
  fflush(stderr);
  abort();
}

static cudaError_t check_device(int d) { return d < 0 || d >= switches().devices ? fail(cudaErrorInvalidDevice) : cudaSuccess; }
API cudaError_t cudaGetDeviceCount(int* n) { *n = switches().devices; return *n ? cudaSuccess : fail(cudaErrorNoDevice); }
API cudaError_t cudaGetDevice(int* d) { *d = current_device; return cudaSuccess; }
API cudaError_t cudaSetDevice(int d) { if (auto e = check_device(d)) return e; current_device = d; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
int attribute(int a) {
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrComputeCapabilityMajor: return switches().sm / 10;
    case cudaDevAttrComputeCapabilityMinor: return switches().sm % 10;
    case cudaDevAttrL2CacheSize: return 52428800;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrGpuOverlap: case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrManagedMemory: case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrComputePreemptionSupported: return 1;
    default: return 0;
  }
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  if (auto e = check_device(d)) return e;
  *v = attribute(a);
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (auto e = check_device(d)) return e;
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Fake H100 80GB");
  p->totalGlobalMem = switches().total; p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32;
  p->memPitch = 2147483647; p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536; p->major = switches().sm / 10; p->minor = switches().sm % 10;
  p->textureAlignment = 512; p->multiProcessorCount = 132;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
  p->asyncEngineCount = 3; p->memoryBusWidth = 5120; p->l2CacheSize = 52428800;
  p->persistingL2CacheMaxSize = 32 << 20; p->maxThreadsPerMultiProcessor = 2048; p->globalL1CacheSupported = 1;
  p->localL1CacheSupported = 1; p->sharedMemPerMultiprocessor = 233472; p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1; p->cooperativeLaunch = 1; p->sharedMemPerBlockOptin = 232448; p->pciBusID = 1 + d;
  p->maxBlocksPerMultiProcessor = 32; p->reservedSharedMemPerBlock = 1024;
  p->uuid.bytes[0] = (char)(d + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", 1 + d); return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) { *low = 0; *high = -5; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* v, int, int) { *v = 0; return cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
API cudaError_t cudaGetLastError() { auto e = last_error; last_error = cudaSuccess; return e; }
API cudaError_t cudaPeekAtLastError() { return last_error; }

struct ErrorName { int code; const char *name, *text; };
static const ErrorName error_names[] = {
  {0, "cudaSuccess", "no error"}, {1, "cudaErrorInvalidValue", "invalid argument"}, {2, "cudaErrorMemoryAllocation", "out of memory"},
  {3, "cudaErrorInitializationError", "initialization error"}, {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
  {98, "cudaErrorInvalidDeviceFunction", "invalid device function"}, {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
  {101, "cudaErrorInvalidDevice", "invalid device ordinal"}, {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
  {401, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
  {500, "cudaErrorSymbolNotFound", "named symbol not found"}, {600, "cudaErrorNotReady", "device not ready"},
  {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
  {801, "cudaErrorNotSupported", "operation not supported"},
  {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
  {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
  {902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
  {903, "cudaErrorStreamCaptureUnmatched", "capture was not initiated in this stream"},
  {904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
  {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
  {906, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
  {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
  {908, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
};
static const ErrorName& error_name(int e) {
  for (auto& n : error_names) if (n.code == e) return n;
  static const ErrorName unknown{-1, "cudaErrorUnknown", "unknown error"};
  return unknown;
}
API const char* cudaGetErrorName(cudaError_t e) { return error_name(e).name; }
API const char* cudaGetErrorString(cudaError_t e) { return error_name(e).text; }
API CUresult cuGetErrorString(CUresult e, const char** s) { *s = error_name((int)e).text; return CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult e, const char** s) { *s = error_name((int)e).name; return CUDA_SUCCESS; }
