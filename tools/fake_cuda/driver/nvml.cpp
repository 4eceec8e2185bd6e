// NVML, as far as torch's allocator asks: no links between devices, no other processes.
#include "device.h"
#include <cstdlib>

static const int NOT_SUPPORTED = 3;
static int devices[16];
API int nvmlInit_v2() { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** out) {
  *out = &devices[atoi(bus + 5) - 1];
  return 0;
}
API int nvmlDeviceGetGpuFabricInfoV(void*, void* info) {  // after its version: no cluster, no fabric
  memset((char*)info + 4, 0, 28);
  return 0;
}
API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { *count = 0; return 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }
