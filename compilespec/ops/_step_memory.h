// Memory of the tensors that a step makes and drops: blocks that the thread has had before.
//
// A decode step makes some three hundred small tensors, in the same order every time.  torch asks the
// C library for aligned memory, which splits and joins chunks for each of them: a fifth of a step of
// a small model.  While a thread is inside a step, its tensors get blocks of an arena, which go back
// to lists by size; all other tensors get their memory as before.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <mutex>
#include <utility>
#include <vector>

namespace compilespec {
namespace step_plan {

constexpr size_t kLine = 64;                     // bytes: of a cache line, which a block begins with
constexpr size_t kMostBytes = 1 << 20;           // of a tensor that gets a block
constexpr size_t kArenaBytes = size_t(64) << 20;  // reserved; pages are used as blocks are made

// Sizes of blocks: multiples of a line to eight of them, then four between powers of two.
struct SizeClass {
  size_t bytes;
  int number;

  explicit SizeClass(size_t wanted) {
    int shift = 6;
    while (wanted > size_t(8) << shift) ++shift;
    const size_t steps = (wanted + (size_t(1) << shift) - 1) >> shift;
    bytes = steps << shift;
    number = (shift - 6) * 8 + int(steps);
  }
};
constexpr int kNumClasses = (20 - 9 + 1) * 8 + 9;  // up to kMostBytes
using Lists = std::vector<void*>[kNumClasses];     // free blocks, by class

// All blocks, each behind a line that holds the number of its class.
class Arena {
 public:
  static Arena& get() {
    static Arena* arena = new Arena;  // never freed: blocks may outlive static objects
    return *arena;
  }

  bool has(const void* block) const {
    return block >= begin_ && block < begin_ + kArenaBytes;
  }
  static int class_of(const void* block) {
    return *reinterpret_cast<const int*>(static_cast<const char*>(block) - kLine);
  }

  // A block that a thread has left, or a new one; null where there is no more memory.
  void* take(const SizeClass& kind) {
    const std::lock_guard<std::mutex> one(mutex_);
    auto& list = left_[kind.number];
    if (!list.empty()) {
      void* block = list.back();
      list.pop_back();
      return block;
    }
    if (!begin_ || kLine + kind.bytes > kArenaBytes - used_) return nullptr;
    char* block = begin_ + used_ + kLine;
    *reinterpret_cast<int*>(block - kLine) = kind.number;
    used_ += kLine + kind.bytes;
    return block;
  }

  void leave(void* block) {
    const std::lock_guard<std::mutex> one(mutex_);
    left_[class_of(block)].push_back(block);
  }

 private:
  Arena() {
    void* memory = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) begin_ = static_cast<char*>(memory);
  }

  char* begin_ = nullptr;
  size_t used_ = 0;
  Lists left_;  // by threads that have ended, or run no steps
  std::mutex mutex_;
};

inline thread_local bool has_ended = false;   // this thread's lists are gone, as at its exit
inline thread_local bool runs_steps = false;  // this thread has been in one: it will want blocks
inline thread_local int steps_inside = 0;     // steps that this thread is in

// The free blocks of a thread.
struct Waiting {
  Lists blocks;

  ~Waiting() {
    has_ended = true;
    for (auto& list : blocks)
      for (void* block : list) Arena::get().leave(block);
  }
};
inline thread_local Waiting waiting;

// A block is what it holds and its own context, as torch wants of memory that it takes raw.
class StepAllocator final : public c10::Allocator {
 public:
  // Have torch ask this one, which asks the one before for what is no step's.
  static void install() {
    static std::once_flag once;
    std::call_once(once, [] {
      before_ = c10::GetAllocator(c10::kCPU);
      c10::SetAllocator(c10::kCPU, new StepAllocator);
    });
  }

  c10::DataPtr allocate(size_t size) override {
    if (steps_inside && !has_ended && size > 0 && size <= kMostBytes &&
        !c10::memoryProfilingEnabled()) {
      const SizeClass kind(size);
      auto& list = waiting.blocks[kind.number];
      void* block = list.empty() ? Arena::get().take(kind) : list.back();
      if (!list.empty()) list.pop_back();
      if (block) return {block, block, give_back, c10::Device(c10::kCPU)};
    }
    return before_->allocate(size);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return before_->raw_deleter() ? free_raw : nullptr;
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    before_->copy_data(to, from, count);
  }

 private:
  static void give_back(void* block) {
    if (has_ended || !runs_steps)
      Arena::get().leave(block);
    else
      waiting.blocks[Arena::class_of(block)].push_back(block);
  }

  static void free_raw(void* memory) {
    if (Arena::get().has(memory))
      give_back(memory);
    else
      before_->raw_deleter()(memory);
  }

  static inline c10::Allocator* before_ = nullptr;
};

// A thread is inside a step while one of these lives.
struct InsideStep {
  InsideStep() {
    StepAllocator::install();
    runs_steps = true;
    ++steps_inside;
  }
  ~InsideStep() { --steps_inside; }
};

}  // namespace step_plan
}  // namespace compilespec
