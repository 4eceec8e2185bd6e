// Whether the kernels share their work out among threads of our own (`_threads.h`).
#include <omp.h>
#include <torch/library.h>

#include "_threads.h"

namespace compilespec {

// Not where OpenMP pins its threads to cores: those of the pool would all lie on the caller's.
void use_thread_pool(bool wanted) {
  uses_pool = wanted && omp_get_proc_bind() == omp_proc_bind_false;
}

}  // namespace compilespec

TORCH_LIBRARY_IMPL(compilespec, CompositeExplicitAutograd, m) {
  m.impl("use_thread_pool", compilespec::use_thread_pool);
}
