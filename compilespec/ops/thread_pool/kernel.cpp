// Whether the kernels share their work out among threads of our own (`_threads.h`).
#include <omp.h>
#include <torch/library.h>
#include <unistd.h>

#include "_threads.h"

namespace compilespec {

const pid_t loaded_by = getpid();

// Not where OpenMP pins its threads to cores: those of the pool would all lie on the caller's.
//
// The caller's OpenMP threads end where the pool takes over, and the next prefill starts others, a
// few tens of microseconds for each: they would go on spinning for milliseconds beside the pool's.
// Not in a fork: its OpenMP would wait for threads that stayed behind.
void use_thread_pool(bool wanted) {
  const bool uses = wanted && omp_get_proc_bind() == omp_proc_bind_false;
  if (!uses_pool.exchange(uses) && uses && getpid() == loaded_by)
    omp_pause_resource(omp_pause_soft, omp_get_initial_device());
}

}  // namespace compilespec

TORCH_LIBRARY_IMPL(compilespec, CompositeExplicitAutograd, m) {
  m.impl("use_thread_pool", compilespec::use_thread_pool);
}
