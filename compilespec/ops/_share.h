// Work shared out among torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace compilespec {

// body(next) on as many threads as the work is worth; each takes items from the shared counter until
// it reaches num_items.  Results must not depend on who takes what.
template <class F>
void share(int64_t num_items, double total_ns, const F& body) {
  const int64_t threads =
      std::min<int64_t>({at::get_num_threads(), num_items, int64_t(total_ns / 8000) + 1});
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { body(next); });
}

}  // namespace compilespec
