// Work shared out among threads: torch's, or those of a pool that waits for nobody.
//
// OpenMP ends a loop when all of its threads have been there.  A decode step has some two hundred
// loops of a few microseconds; where another program has one of the cores, each waits for a thread
// that the system has put aside.  In the pool the calling thread takes over what the others have not
// begun, and waits only for those that are at it.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/ParallelGuard.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <vector>

namespace compilespec {

inline void pause_spinning() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// What a job reads in order: `bytes` of memory for each of the `count` items of its range.
struct Reading {
  const char* data = nullptr;
  int64_t count = 0, bytes = 0;
};

// Threads that wait for work: awake for a moment after the last, then asleep.
//
// A step reads the weights of a model in the same order as the step before, so the pool knows what
// the next job will read.  A worker that waits fetches the beginning of its part of that: memory
// would be idle while the calling thread does what it does alone.
class Pool {
 public:
  using Body = void (*)(const void* context, int64_t begin, int64_t end);

  static constexpr int kMostThreads = 256;
  static constexpr int64_t kChunks = 4;  // of a thread's part: what others can take over
  static constexpr std::chrono::microseconds kAwake{300};
  static constexpr int64_t kMostFetched = 384 << 10;  // bytes: less than a core's second cache

  // The pool of this process; a child of a fork begins with one of its own, since threads stay behind.
  static Pool& get() {
    static std::atomic<Pool*> pool{nullptr};
    static std::once_flag once;
    std::call_once(once, [] {
      pool = new Pool;  // never freed: its threads may outlive static objects
      pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    });
    return *pool;
  }

  // body(context, begin, end) over all of [0, count), in multiples of `grain`, on up to
  // `num_threads` threads, the calling one included.  False, and nothing is done, while another
  // thread has the pool.
  bool run(int64_t count, int64_t grain, int num_threads, Body body, const void* context,
           const Reading& reading) {
    std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
    if (!alone.owns_lock()) return false;
    num_threads = std::min(num_threads, kMostThreads);
    while (num_workers_ < num_threads - 1 && start(num_workers_ + 1)) ++num_workers_;
    body_ = body, context_ = context, num_parts_ = num_threads;
    const int64_t least = (count + num_threads * kChunks - 1) / (num_threads * kChunks);
    chunk_ = (least + grain - 1) / grain * grain;
    for (int64_t part = 0; part < num_threads; ++part) {
      parts_[part].next.store(count * part / num_threads, std::memory_order_relaxed);
      parts_[part].end = count * (part + 1) / num_threads;
    }
    if (reading.data) foresee(reading, num_threads);
    number_ = (number_ + 1) & kNumbers;
    gate_.store(number_ << kNumber | (num_threads - 1) << kLast | kOpen);  // before asleep_ is read
    for (int place = 1; place < num_threads; ++place) {
      if (asleep_[place].load()) {
        asleep_[place].store(0);
        asleep_[place].notify_one();
      }
    }
    work_on(0);
    const int before = gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    if (before & kInside) wait_until_left();
    std::exception_ptr failed;
    std::swap(failed, failed_);
    alone.unlock();
    if (failed) std::rethrow_exception(failed);
    return true;
  }

 private:
  // gate_: workers inside, whether it is open, the last place that has a part, the job's number.
  static constexpr int kInside = 255, kOpen = 256, kLast = 9, kNumber = 17, kNumbers = 0x3fff;

  // How far a worker has come with what it fetches.
  struct Fetching {
    const char *of = nullptr, *from = nullptr, *end = nullptr;
  };

  struct alignas(64) Part {
    std::atomic<int64_t> next;
    int64_t end;
  };

  bool start(int place) {
    try {
      std::thread([this, place] { serve(place); }).detach();
    } catch (const std::system_error&) {
      return false;  // the system has no more threads to give
    }
    return true;
  }

  // A worker's life.  It goes in only while the gate is open for its place, and the calling thread
  // changes nothing before all that went in have left.
  [[noreturn]] void serve(int place) {
    Fetching fetching;
    for (int seen = 0;;) {
      int gate = wait_for_work(place, seen, fetching);
      if (!gate_.compare_exchange_strong(gate, gate + 1, std::memory_order_acq_rel)) continue;
      seen = gate >> kNumber;
      work_on(place);
      const int before = gate_.fetch_sub(1, std::memory_order_acq_rel);
      if ((before & (kOpen | kInside)) == 1) gate_.notify_all();
    }
  }

  // Note that this is read now, and publish what was read after it before.
  void foresee(const Reading& reading, int num_threads) {
    size_t place = read_[last_read_].next;  // no search where it is what was foreseen
    if (read_[place].reading.data != reading.data) {
      const auto found = places_.try_emplace(reading.data, read_.size());
      place = found.first->second;
      if (found.second) read_.emplace_back();
      read_[last_read_].next = place;
    }
    read_[place].reading = reading;
    last_read_ = place;
    const Reading next = read_[read_[place].next].reading;
    next_data_.store(nullptr, std::memory_order_relaxed);
    next_count_.store(next.count, std::memory_order_release);
    next_bytes_.store(next.bytes, std::memory_order_release);
    next_threads_.store(num_threads, std::memory_order_release);
    next_data_.store(next.data, std::memory_order_release);
  }

  // A few cache lines of this place's part of what is read next.  That may be gone, or be published
  // anew at this moment: a fetch of any address does no harm.
  void fetch_some(int place, Fetching& fetching) const {
    const char* data = next_data_.load(std::memory_order_acquire);
    if (data && data != fetching.of) {
      const int64_t count = next_count_.load(std::memory_order_relaxed),
                    bytes = next_bytes_.load(std::memory_order_relaxed),
                    threads = next_threads_.load(std::memory_order_relaxed);
      const int64_t begin = count * place / threads * bytes,
                    end = count * (place + 1) / threads * bytes;
      fetching = {data, data + begin, data + std::min(end, begin + kMostFetched)};
    }
    if (fetching.from >= fetching.end) return pause_spinning();
    for (int line = 0; line < 4; ++line, fetching.from += 64)
      __builtin_prefetch(fetching.from, 0, 2);
  }

  // Whether `is_done` came true while a thread stays awake.
  template <class F, class G>
  static bool spin_until(const F& is_done, const G& meanwhile) {
    const auto limit = std::chrono::steady_clock::now() + kAwake;
    do {
      for (int i = 0; i < 32; ++i) {
        if (is_done()) return true;
        meanwhile();
      }
    } while (std::chrono::steady_clock::now() < limit);
    return false;
  }

  int wait_for_work(int place, int seen, Fetching& fetching) {
    const auto is_work = [=](int gate) {
      return (gate & kOpen) && gate >> kNumber != seen && place <= (gate >> kLast & kInside);
    };
    int gate;
    if (spin_until([&] { return is_work(gate = gate_.load(std::memory_order_acquire)); },
                   [&] { fetch_some(place, fetching); }))
      return gate;
    for (;;) {
      asleep_[place].store(1);  // before the gate is read: whoever opens it later sees this
      gate = gate_.load();
      if (is_work(gate)) {
        asleep_[place].store(0);
        return gate;
      }
      asleep_[place].wait(1);
    }
  }

  void wait_until_left() {
    const auto is_empty = [&] { return !(gate_.load(std::memory_order_acquire) & kInside); };
    if (spin_until(is_empty, pause_spinning)) return;
    for (int gate; (gate = gate_.load(std::memory_order_acquire)) & kInside;) gate_.wait(gate);
  }

  // A thread's own part first, the same at every call, so that it finds its data in its core's
  // cache; then what others have not begun.
  void work_on(int place) {
    c10::ParallelGuard inside(true);  // a loop within this one runs on its own thread
    for (int i = 0; i < num_parts_; ++i) {
      Part& part = parts_[(place + i) % num_parts_];
      for (int64_t begin; (begin = part.next.load(std::memory_order_relaxed)) < part.end;) {
        begin = part.next.fetch_add(chunk_, std::memory_order_relaxed);
        if (begin >= part.end) break;
        try {
          body_(context_, begin, std::min(begin + chunk_, part.end));
        } catch (...) {
          std::lock_guard<std::mutex> one(failing_);
          if (!failed_) failed_ = std::current_exception();
        }
      }
    }
  }

  std::atomic<int> gate_{0};
  std::atomic<int> asleep_[kMostThreads]{};  // by place
  std::mutex busy_, failing_;
  std::atomic<const char*> next_data_{nullptr};
  std::atomic<int64_t> next_count_{0}, next_bytes_{0}, next_threads_{1};
  // What has been read, the first being nothing; each knows what was read after it.
  struct Read {
    Reading reading;
    size_t next = 0;
  };
  std::vector<Read> read_{1};
  std::unordered_map<const char*, size_t> places_;  // in read_
  size_t last_read_ = 0;
  int num_workers_ = 0, number_ = 0, num_parts_ = 0;
  int64_t chunk_ = 1;
  Body body_ = nullptr;
  const void* context_ = nullptr;
  std::exception_ptr failed_;
  std::unique_ptr<Part[]> parts_{new Part[kMostThreads]};
};

// Whether `parallel_for` uses the pool: where no OpenMP loops run in between, whose threads go on
// spinning on its cores.
inline std::atomic<bool> uses_pool{false};

// at::parallel_for from 0, on whichever threads are to be used.  Results must not depend on how the
// range is divided.
template <class F>
void parallel_for(int64_t count, int64_t grain, const Reading& reading, const F& body) {
  const int64_t most = (count + grain - 1) / std::max<int64_t>(grain, 1);
  const auto num_threads = int(std::min<int64_t>(at::get_num_threads(), most));
  if (uses_pool.load(std::memory_order_relaxed) && num_threads > 1 && !at::in_parallel_region()) {
    const auto call = [](const void* context, int64_t begin, int64_t end) {
      (*static_cast<const F*>(context))(begin, end);
    };
    if (Pool::get().run(count, grain, num_threads, call, &body, reading)) return;
  }
  at::parallel_for(0, count, grain, body);
}

template <class F>
void parallel_for(int64_t count, int64_t grain, const F& body) {
  parallel_for(count, grain, Reading{}, body);
}

// body(next) on as many threads as the work is worth; each takes items from the shared counter until
// it reaches num_items.  Results must not depend on who takes what.
template <class F>
void share(int64_t num_items, double total_ns, const F& body) {
  const int64_t threads =
      std::min<int64_t>({at::get_num_threads(), num_items, int64_t(total_ns / 8000) + 1});
  std::atomic<int64_t> next{0};
  parallel_for(threads, 1, [&](int64_t, int64_t) {
    if (next.load(std::memory_order_relaxed) < num_items) body(next);
  });
}

}  // namespace compilespec
