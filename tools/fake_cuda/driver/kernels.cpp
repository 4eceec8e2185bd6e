// Kernels: registered, named and counted; launched into streams, where they compute nothing.
#include "device.h"
#include <dlfcn.h>
#include <algorithm>

static std::unordered_map<const void*, Function*> functions;
std::set<const void*> function_handles;
static std::map<std::string, long> launches;

cudaError_t launch(const char* api, const char* name, dim3 g, dim3 b, size_t shared, Stream* s) {
  if (!g.x || !g.y || !g.z || !b.x || !b.y || !b.z || (size_t)b.x * b.y * b.z > 1024 || g.y > 65535 || g.z > 65535) return refuse(api, cudaErrorInvalidConfiguration);
  if (shared > 232448) return refuse(api, cudaErrorInvalidValue);
  if (s->device != current_device) return refuse(api, cudaErrorInvalidResourceHandle);  // a device guard is missing
  { Hold h(lock); launches[name]++; }
  launch_count++;
  trace("launch %s <%u,%u,%u>", name, g.x, g.y, g.z);
  return enqueue(api, s, "kernel", name, [](Stream*) {});
}
const char* name_of(const void* f) {
  Hold h(lock);
  if (function_handles.count(f)) return ((Function*)f)->name.c_str();
  auto it = functions.find(f);
  return it == functions.end() ? "?" : it->second->name.c_str();
}
API void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t, int, int) { (void)host; }
API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  Hold h(lock);
  auto f = new Function{name};
  functions[host] = f; function_handles.insert(f);
}
API cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* host) {
  Hold h(lock);
  auto it = functions.find(host);
  if (it == functions.end()) return fail(cudaErrorInvalidDeviceFunction);
  *out = (cudaKernel_t)it->second;
  return cudaSuccess;
}
struct Configuration { dim3 grid, block; size_t shared; void* stream; };
static thread_local std::vector<Configuration> configurations;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t shared, CUstream_st* s) { configurations.push_back({g, b, shared, s}); return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* shared, void* s) {
  auto c = configurations.back(); configurations.pop_back();
  *g = c.grid; *b = c.block; *shared = c.shared; *(void**)s = c.stream;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void**, size_t shared, cudaStream_t s) {
  return launch("cudaLaunchKernel", name_of(f), g, b, shared, stream_of(s));
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void** a, size_t shared, cudaStream_t s) { return cudaLaunchKernel((const void*)f, g, b, a, shared, s); }
API cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void** a, size_t shared, cudaStream_t s) { return cudaLaunchKernel(f, g, b, a, shared, s); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) { return cudaLaunchKernel(f, c->gridDim, c->blockDim, a, c->dynamicSmemBytes, c->stream); }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->ptxVersion = 90; a->binaryVersion = 90; a->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int block, size_t, unsigned) { *n = block > 0 ? std::max(1, 2048 / block) : 1; if (*n > 32) *n = 32; return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int block, size_t shared) { return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, shared, 0); }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  *f = nullptr;
  for (const char* tail : {"_v3", "_v2", ""}) if (!*f) *f = dlsym(RTLD_DEFAULT, (std::string(name) + tail).c_str());
  if (!*f) { static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    for (const char* tail : {"_v3", "_v2", ""}) if (!*f && self) *f = dlsym(self, (std::string(name) + tail).c_str()); }
  if (status) *status = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*f) trace("fake_cuda: no driver entry point %s", name);
  return cudaSuccess;  // the status says it
}
static thread_local std::string text;
API long fake_launches() { return launch_count; }
API const char* fake_kernels() {
  Hold h(lock);
  text.clear();
  for (auto& l : launches) text += std::to_string(l.second) + " " + l.first + "\n";
  return text.c_str();
}
