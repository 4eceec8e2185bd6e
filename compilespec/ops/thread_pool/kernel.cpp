// Whether the kernels share their work out among threads of our own (`_threads.h`).
#include <torch/library.h>

#include "_threads.h"

TORCH_LIBRARY_FRAGMENT(compilespec, m) {
  m.def("use_thread_pool(bool wanted) -> ()", [](bool wanted) { compilespec::uses_pool = wanted; });
}
