// Device and pinned memory, copies, and what is known of pointers.
#include "device.h"
#include <sys/mman.h>

std::map<uintptr_t, Block> blocks;
static size_t used_bytes[16];
thread_local int muted = 0;  // copies of kernels whose values come from elsewhere

const Block* find(const void* p, uintptr_t* base) {
  auto it = blocks.upper_bound((uintptr_t)p);
  if (it == blocks.begin()) return nullptr;
  --it;
  if ((uintptr_t)p >= it->first + it->second.bytes) return nullptr;
  if (base) *base = it->first;
  return &it->second;
}
static bool on_device(const void* p) { Hold h(lock); auto b = find(p); return b && !b->host; }
static bool pageable(const void* p) { Hold h(lock); return find(p) == nullptr; }

static cudaError_t allocate(void** p, size_t bytes, bool host) {
  Hold h(lock);
  count(host ? "cudaHostAlloc" : "cudaMalloc", current_device);
  size_t room = (bytes + 4095) & ~size_t(4095);
  if (!room) room = 4096;
  if (!host && used_bytes[current_device] + room > switches().total) { *p = nullptr; return fail(cudaErrorMemoryAllocation); }
  void* q = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (q == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  blocks[(uintptr_t)q] = {room, current_device, host, false};
  if (!host) used_bytes[current_device] += room;
  *p = q;
  return cudaSuccess;
}
static cudaError_t release(void* p) {
  drain_all(-1);
  Hold h(lock);
  auto it = blocks.find((uintptr_t)p);
  if (it == blocks.end()) return fail(cudaErrorInvalidValue);
  for (Stream* s : all_streams(-1)) host_waited_for(s);
  if (!it->second.host) used_bytes[it->second.device] -= it->second.bytes;
  forget_memory(it->first, it->first + it->second.bytes);
  munmap(p, it->second.bytes);
  blocks.erase(it);
  return cudaSuccess;
}
API cudaError_t cudaMalloc(void** p, size_t bytes) {
  if (auto e = unsafe("cudaMalloc")) return e;
  trace("cudaMalloc %zu", bytes);
  return allocate(p, bytes, false);
}
API cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  if (auto e = unsafe("cudaFree")) return e;
  return release(p);
}
API cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  if (auto e = unsafe("cudaHostAlloc")) return e;
  return allocate(p, bytes, true);
}
API cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
API cudaError_t cudaFreeHost(void* p) {
  if (!p) return cudaSuccess;
  if (auto e = unsafe("cudaFreeHost")) return e;
  return release(p);
}
API cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  if (auto e = unsafe("cudaHostRegister")) return e;
  Hold h(lock);
  blocks[(uintptr_t)p] = {bytes, current_device, true, true};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  Hold h(lock);
  auto it = blocks.find((uintptr_t)p);
  if (it == blocks.end() || !it->second.registered) return fail(cudaErrorHostMemoryNotRegistered);
  blocks.erase(it);
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void** d, void* p, unsigned) { *d = p; return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  Hold h(lock);
  size_t used = used_bytes[current_device];
  *total = switches().total;
  *free_bytes = *total > used ? *total - used : 0;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Hold h(lock);
  memset(a, 0, sizeof *a);
  auto b = find(p);
  if (!b) { a->type = cudaMemoryTypeUnregistered; a->device = -2; return cudaSuccess; }
  a->type = b->host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = b->device;
  a->devicePointer = (void*)p;
  a->hostPointer = b->host ? (void*)p : nullptr;
  return cudaSuccess;
}

// --- copies
struct Copy { void* dst; size_t dpitch; const void* src; size_t spitch, width, height; };
static void perform(const Copy& c) {
  if (c.height == 1) memmove(c.dst, c.src, c.width);
  else for (size_t r = 0; r < c.height; r++) memmove((char*)c.dst + r * c.dpitch, (const char*)c.src + r * c.spitch, c.width);
}
static Range extent(const void* p, size_t pitch, const Copy& c, bool writes) {
  return {(uintptr_t)p, (uintptr_t)p + (c.height - 1) * pitch + c.width, writes};
}
static cudaError_t copy_async(const char* api, Copy c, cudaStream_t stream) {
  Stream* s = stream_of(stream);
  bool from_pageable = pageable(c.src), to_pageable = pageable(c.dst);
  if (s->capture && (from_pageable || to_pageable)) {
    invalidate(s->capture);
    return refuse(api, cudaErrorStreamCaptureUnsupported);
  }
  bool from_device = on_device(c.src), to_device = on_device(c.dst);
  if (muted && from_device && to_device) return enqueue(api, s, "memcpy DtoD", "", [](Stream*) {});
  const char* kind = from_device ? (to_device ? "memcpy DtoD" : "memcpy DtoH") : "memcpy HtoD";
  Ranges touches{extent(c.src, c.spitch, c, false), extent(c.dst, c.dpitch, c, true)};
  std::shared_ptr<std::vector<char>> staged;
  if (from_pageable && !s->capture) {  // the source may change as soon as the call returns
    staged = std::make_shared<std::vector<char>>(c.width * c.height);
    perform({staged->data(), c.width, c.src, c.spitch, c.width, c.height});
    c.src = staged->data();
    c.spitch = c.width;
    touches.erase(touches.begin());
  }
  if (to_pageable) touches.pop_back();
  else if (!to_device && !s->capture) device_writes_host(touches.back());
  auto e = enqueue(api, s, kind, "", [c, staged](Stream*) { perform(c); }, touches);
  if (e == cudaSuccess && !s->capture) {
    if (to_pageable) { drain(s, s->issued); host_waited_for(s); }
    else if (!from_pageable && !from_device) copied_from_host(s, touches.front());
  }
  return e;
}
API cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t n, cudaMemcpyKind, cudaStream_t s) {
  return n ? copy_async("cudaMemcpyAsync", {dst, n, src, n, n, 1}, s) : cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t n, cudaStream_t s) {
  return n ? copy_async("cudaMemcpyPeerAsync", {dst, n, src, n, n, 1}, s) : cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void* dst, size_t dp, const void* src, size_t sp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t s) {
  return w && h ? copy_async("cudaMemcpy2DAsync", {dst, dp, src, sp, w, h}, s) : cudaSuccess;
}
API cudaError_t cudaMemcpy(void* dst, const void* src, size_t n, cudaMemcpyKind) {
  if (auto e = unsafe("cudaMemcpy")) return e;
  auto e = n ? copy_async("cudaMemcpy", {dst, n, src, n, n, 1}, nullptr) : cudaSuccess;
  Stream* s = stream_of(nullptr);
  drain(s, s->issued);
  host_waited_for(s);
  return e;
}
static cudaError_t set_async(const char* api, void* p, int v, size_t n, cudaStream_t stream) {
  if (muted) return enqueue(api, stream_of(stream), "memset", "", [](Stream*) {});
  Ranges touches{{(uintptr_t)p, (uintptr_t)p + n, true}};
  return enqueue(api, stream_of(stream), "memset", "", [=](Stream*) { memset(p, v, n); }, touches);
}
API cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t s) { return set_async("cudaMemsetAsync", p, v, n, s); }
API cudaError_t cudaMemset(void* p, int v, size_t n) {
  if (auto e = unsafe("cudaMemset")) return e;
  return set_async("cudaMemset", p, v, n, nullptr);
}
API CUresult cuMemsetD32Async(CUdeviceptr p, unsigned v, size_t n, CUstream s) {
  Ranges touches{{(uintptr_t)p, (uintptr_t)p + 4 * n, true}};
  auto e = enqueue("cuMemsetD32Async", stream_of(s), "memset", "",
                   [=](Stream*) { for (size_t i = 0; i < n; i++) ((unsigned*)p)[i] = v; }, touches);
  last_error = cudaSuccess;
  return (CUresult)e;
}
API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute a, CUdeviceptr p) {
  Hold h(lock);
  uintptr_t base = 0;
  auto b = find((void*)p, &base);
  if (!b) return CUDA_ERROR_INVALID_VALUE;
  switch (a) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr*)out = p; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned*)out = b->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)out = b->device; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr*)out = base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t*)out = b->bytes; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}
API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* n, CUdeviceptr p) {
  Hold h(lock);
  uintptr_t at;
  auto b = find((void*)p, &at);
  if (!b) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = at;
  if (n) *n = b->bytes;
  return CUDA_SUCCESS;
}

// --- virtual addresses, as expandable segments use them: memory lies where it is mapped.
// Documents name no rule of capture for these calls, and torch makes them in captures.
struct Physical { size_t bytes; int device; };
API CUresult cuMemGetAllocationGranularity(size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { *n = 2 << 20; return CUDA_SUCCESS; }
API CUresult cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
  void* q = mmap(nullptr, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (q == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *p = (CUdeviceptr)q;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr p, size_t n) { munmap((void*)p, n); return CUDA_SUCCESS; }
API CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t n, const CUmemAllocationProp* prop, unsigned long long) {
  Hold h(lock);
  int device = prop->location.id;
  count("cuMemCreate", device);
  if (used_bytes[device] + n > switches().total) return CUDA_ERROR_OUT_OF_MEMORY;
  used_bytes[device] += n;
  *out = (CUmemGenericAllocationHandle) new Physical{n, device};
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle p) {
  Hold h(lock);
  auto physical = (Physical*)p;
  used_bytes[physical->device] -= physical->bytes;
  delete physical;
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr p, size_t n, size_t, CUmemGenericAllocationHandle of, unsigned long long) {
  Hold h(lock);
  if (mprotect((void*)p, n, PROT_READ | PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
  blocks[(uintptr_t)p] = {n, ((Physical*)of)->device, false, false};
  return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
API CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
  drain_all(-1);
  Hold h(lock);
  forget_memory(p, p + n);
  blocks.erase(blocks.lower_bound(p), blocks.lower_bound(p + n));
  madvise((void*)p, n, MADV_DONTNEED);
  mprotect((void*)p, n, PROT_NONE);
  return CUDA_SUCCESS;
}
