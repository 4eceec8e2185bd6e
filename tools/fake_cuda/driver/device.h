// A CUDA driver and runtime without a GPU: "device memory" is host memory, streams are queues, and
// stream capture follows CUDA's rules (errors 900-908).  Kernels are recorded, not executed; values
// come from commands that the caller enqueues (fake_enqueue).
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

struct Stream;
using Run = std::function<void(Stream*)>;
using Clock = std::vector<unsigned long long>;  // of each stream, the last command that came before

// Memory that a command touches.
struct Range {
  uintptr_t begin, end;
  int writes;
};
using Ranges = std::vector<Range>;
// A command's touch; `serial` names the allocation of torch that it lies in, 0 for none.
struct Touch {
  Range range;
  long serial;
};

struct Node {
  std::string kind, name;
  Run run;
  Ranges touches;
  std::vector<Node*> deps;
};
struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
};
struct GraphExec {
  std::vector<std::pair<std::string, Run>> nodes;
  std::vector<Touch> touches;
  Ranges staged;  // host memory that copies read
};
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  Graph* graph;
  bool invalid = false;
  std::set<Stream*> streams;
};
struct Command {
  const char* kind;
  Run run;
};
// An access that the host has not waited for.
struct Access {
  Range range;
  unsigned long long at;
  const char* name;
};
struct Stream {
  int id = 0, device = 0, priority = 0;
  bool blocking = false;
  std::deque<Command> queue;
  std::atomic<unsigned long long> issued{0}, done{0};
  Capture* capture = nullptr;
  std::vector<cudaGraphNode_t> deps;  // Node*, of the capture
  Clock clock;
  std::vector<Access> recent;
};
struct Event {
  unsigned flags = 0;
  int device = 0;
  bool recorded = false;
  Stream* stream = nullptr;
  unsigned long long at = 0;
  double time = 0;
  unsigned long long capture_id = 0;  // of the capture that it was last recorded in
  std::vector<cudaGraphNode_t> deps;
  Clock clock;
};
struct Block {
  size_t bytes;
  int device;
  bool host, registered;
};
struct Function {
  std::string name;
  int shared = 0;
};
// What a test may change while the process runs; from the environment at first.
struct Switches {
  int lazy, poison, devices, sm;
  size_t total;
};

using Hold = std::lock_guard<std::recursive_mutex>;
extern std::recursive_mutex lock;  // the tables
extern std::map<uintptr_t, Block> blocks;
extern std::vector<Capture*> captures;
extern std::set<Stream*> streams;
extern Stream legacy_streams[16];
extern std::set<const void*> function_handles;
extern std::atomic<long> launch_count, replay_count, id_count;
extern thread_local int current_device, muted;
extern thread_local cudaError_t last_error;
extern thread_local cudaStreamCaptureMode thread_mode;

// --- devices.cpp
Switches& switches();
void trace(const char* format, ...);
double now();
cudaError_t fail(cudaError_t e);
cudaError_t refuse(const char* api, cudaError_t e);
void fault(const std::string& text);
int attribute(int a);
std::string taken(std::vector<std::string>& lines);
void count(const std::string& what, int device);

// --- memory.cpp
const Block* find(const void* p, uintptr_t* base = nullptr);

// --- streams.cpp
Stream* stream_of(cudaStream_t s);
bool is_legacy(Stream* s);
bool known(Stream* s);
void drain(Stream* s, unsigned long long upto);
void drain_all(int device);
cudaError_t unsafe(const char* api);
cudaError_t enqueue(const char* api, Stream* s, const char* kind, const char* name, Run run, Ranges touches = {});
void put(Stream* s, const char* kind, const char* name, Run run, const Ranges& touches);
std::vector<Stream*> all_streams(int device);

// --- capture.cpp
void invalidate(Capture* c);
void add_node(Stream* s, const char* kind, const char* name, Run run, const Ranges& touches);

// --- order.cpp
const char* interned(const std::string& name);
void join(Clock& clock, const Clock& other);
void ordered(Stream* s, const char* name, const Ranges& touches);
void host_waited(const Clock& clock);
void host_waited_for(Stream* s);
void copied_from_host(Stream* s, const Range& source);
void device_writes_host(const Range& range);
void unordered_nodes(const Graph& graph);
long serial_of(uintptr_t at);
void touched(const char* name, const Ranges& touches, bool in_capture);
void replayed(const GraphExec& exec);
void forget_memory(uintptr_t begin, uintptr_t end);
void capture_began(Stream* s);

// --- kernels.cpp
cudaError_t launch(const char* api, const char* name, dim3 grid, dim3 block, size_t shared, Stream* s);
const char* name_of(const void* f);
