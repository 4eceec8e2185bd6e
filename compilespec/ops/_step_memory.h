// Memory of the tensors that a step makes and drops: blocks that the thread has had before.
//
// A decode step makes some three hundred small tensors, in the same order every time.  torch asks the
// C library for aligned memory, which splits and joins chunks for each of them: a fifth of a step of
// a small model.  While a thread is inside a step, freed blocks wait in lists by size, for its next
// tensors; all other tensors get their memory as before.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace compilespec {
namespace step_plan {

constexpr size_t kLine = 64;                // bytes: of a cache line, which a block begins with
constexpr size_t kMostBytes = 1 << 20;      // of a tensor whose block is kept
constexpr size_t kMostKept = size_t(16) << 20;  // bytes that wait in the lists of a thread

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

struct Header {
  int number;
  size_t bytes;
};
static_assert(sizeof(Header) <= kLine);

// The blocks that wait in a thread.
struct Waiting {
  std::vector<void*> blocks[kNumClasses];
  size_t bytes = 0;

  ~Waiting();
};

inline thread_local bool has_ended = false;  // this thread's lists are gone, as at its exit
inline thread_local int steps_inside = 0;    // steps that this thread is in
inline thread_local Waiting waiting;

inline Waiting::~Waiting() {
  has_ended = true;
  for (auto& list : blocks)
    for (void* block : list) std::free(block);
}

class StepAllocator final : public c10::Allocator {
 public:
  // Have torch ask this one, which asks the one before for what is no step's.
  static void install() {
    static std::once_flag once;
    std::call_once(once, [] {
      static StepAllocator own(c10::GetAllocator(c10::kCPU));
      c10::SetAllocator(c10::kCPU, &own);
    });
  }

  c10::DataPtr allocate(size_t size) override {
    if (!steps_inside || has_ended || size == 0 || size > kMostBytes || c10::memoryProfilingEnabled())
      return before_->allocate(size);
    const SizeClass kind(size);
    auto& list = waiting.blocks[kind.number];
    void* block = nullptr;
    if (!list.empty()) {
      block = list.back();
      list.pop_back();
      waiting.bytes -= kind.bytes;
    } else {
      if (posix_memalign(&block, kLine, kLine + kind.bytes)) throw std::bad_alloc();
      new (block) Header{kind.number, kind.bytes};
    }
    return {static_cast<char*>(block) + kLine, block, give_back, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    before_->copy_data(to, from, count);
  }

 private:
  explicit StepAllocator(c10::Allocator* before) : before_(before) {}

  static void give_back(void* block) {
    const Header& header = *static_cast<Header*>(block);
    if (has_ended || waiting.bytes + header.bytes > kMostKept) {
      std::free(block);
      return;
    }
    waiting.bytes += header.bytes;
    waiting.blocks[header.number].push_back(block);
  }

  c10::Allocator* before_;
};

// A thread is inside a step while one of these lives.
struct InsideStep {
  InsideStep() {
    StepAllocator::install();
    ++steps_inside;
  }
  ~InsideStep() { --steps_inside; }
};

}  // namespace step_plan
}  // namespace compilespec
