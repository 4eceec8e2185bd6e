// The driver's names: contexts, modules, launches (Triton, and what c10 asks by name).
#include "device.h"
#include <algorithm>
#include <cstdio>

static CUresult cu(cudaError_t e) { last_error = cudaSuccess; return (CUresult)e; }
API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* v) { *v = 13000; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* n) { *n = switches().devices; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* d, int i) { if (i < 0 || i >= switches().devices) return CUDA_ERROR_INVALID_DEVICE; *d = i; return CUDA_SUCCESS; }
API CUresult cuDeviceGetName(char* s, int n, CUdevice) { snprintf(s, n, "Fake H100 80GB"); return CUDA_SUCCESS; }
API CUresult cuDeviceTotalMem_v2(size_t* n, CUdevice) { *n = switches().total; return CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) { *v = attribute((int)a); return CUDA_SUCCESS; }
static int contexts[16];
API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) { *c = (CUcontext)&contexts[d]; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext* c) { *c = (CUcontext)&contexts[current_device]; return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext c) { if (c) current_device = (int)((int*)c - contexts); return CUDA_SUCCESS; }
API CUresult cuCtxPushCurrent_v2(CUcontext c) { return cuCtxSetCurrent(c); }
API CUresult cuCtxPopCurrent_v2(CUcontext* c) { if (c) *c = (CUcontext)&contexts[current_device]; return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* v, CUlimit) { *v = 1 << 20; return CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuCtxSynchronize() { return cu(cudaDeviceSynchronize()); }
struct Module { std::vector<Function*> functions; std::string image; };
API CUresult cuModuleLoadData(CUmodule* m, const void* image) {
  if (auto e = unsafe("cuModuleLoadData")) return cu(e);
  auto module = new Module;
  if (!memcmp(image, "\177ELF", 4)) {  // a cubin: the end of its section headers or of its program headers
    auto b = (const unsigned char*)image;
    uint64_t shoff, phoff; uint16_t phentsize, phnum, shentsize, shnum;
    memcpy(&phoff, b + 32, 8); memcpy(&shoff, b + 40, 8); memcpy(&phentsize, b + 54, 2); memcpy(&phnum, b + 56, 2); memcpy(&shentsize, b + 58, 2); memcpy(&shnum, b + 60, 2);
    module->image.assign((const char*)image, std::max(shoff + (uint64_t)shentsize * shnum, phoff + (uint64_t)phentsize * phnum));
  } else module->image.assign((const char*)image);
  *m = (CUmodule)module;
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadDataEx(CUmodule* m, const void* image, unsigned, CUjit_option*, void**) { return cuModuleLoadData(m, image); }
API CUresult cuModuleLoad(CUmodule* m, const char* path) {
  FILE* f = fopen(path, "rb");
  if (!f) return CUDA_ERROR_FILE_NOT_FOUND;
  std::string all; char part[65536]; size_t n;
  while ((n = fread(part, 1, sizeof part, f)) > 0) all.append(part, n);
  fclose(f);
  return cuModuleLoadData(m, all.c_str());
}
API CUresult cuModuleUnload(CUmodule) { return cu(unsafe("cuModuleUnload")); }
API CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  Hold h(lock);
  if (((Module*)m)->image.find(std::string(".text.") + name) == std::string::npos && ((Module*)m)->image.find(name) == std::string::npos) return CUDA_ERROR_NOT_FOUND;
  auto fn = new Function{name};
  function_handles.insert(fn);
  *f = (CUfunction)fn;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction f) {
  *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? ((Function*)f)->shared : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
  if (a == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) { if (v > 232448) return CUDA_ERROR_INVALID_VALUE; ((Function*)f)->shared = v; }
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void**, void**) {
  if (shared > 49152 && (int)shared > ((Function*)f)->shared) return CUDA_ERROR_INVALID_VALUE;  // the opt-in is missing
  return cu(launch("cuLaunchKernel", name_of(f), {gx, gy, gz}, {bx, by, bz}, shared, stream_of(s)));
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** a, void** x) {
  return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, c->hStream, a, x);
}
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void** a) { return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, s, a, nullptr); }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int block, size_t) { *n = std::max(1, 2048 / std::max(1, block)); return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) { *n = 16; return CUDA_SUCCESS; }
API CUresult cuTensorMapEncodeTiled(CUtensorMap* m, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) { memset(m, 0, sizeof *m); return CUDA_SUCCESS; }
