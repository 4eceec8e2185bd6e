// What a GPU would not tell: accesses of two streams that nothing orders, pinned memory that the host
// changed under a copy, and memory that is used after torch's allocator took it back.
//
// Order is that of vector clocks.  A command comes after all commands before it in its stream, after
// those that an event it waited for came after, and after all that the host had waited for.
#include "device.h"

static Clock host_clock;
struct Staged { int stream; unsigned long long at; Range source; size_t hash; };
static std::vector<Staged> staged;
struct Allocation { uintptr_t end; long serial; bool pooled; };
static std::map<uintptr_t, Allocation> live, dead;  // what torch's allocator gave out, and took back
struct Freed { uintptr_t begin, end; };
static std::map<Stream*, std::vector<Freed>> freed_outside;  // of pools, after a capture
static long num_allocations = 0;

const char* interned(const std::string& name) {
  static std::set<std::string> names;
  return names.insert(name).first->c_str();
}
static size_t place_of(Stream* s) { return is_legacy(s) ? s - legacy_streams : 16 + s->id; }
static unsigned long long at(const Clock& c, size_t i) { return i < c.size() ? c[i] : 0; }
void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}
static bool clash(const Range& a, const Range& b) { return (a.writes || b.writes) && a.begin < b.end && b.begin < a.end; }
static std::string stream_name(Stream* s) { return is_legacy(s) ? "the default stream" : "stream " + std::to_string(s->id); }

void ordered(Stream* s, const char* name, const Ranges& touches) {
  join(s->clock, host_clock);
  size_t mine = place_of(s);
  if (s->clock.size() <= mine) s->clock.resize(mine + 1);
  s->clock[mine] = s->issued;
  if (touches.empty()) return;
  for (Stream* other : all_streams(-1)) {
    if (other == s || other->recent.empty()) continue;
    auto known_until = at(s->clock, place_of(other));
    for (auto& access : other->recent) {
      if (access.at <= known_until) continue;
      for (auto& t : touches)
        if (clash(t, access.range))
          fault(std::string("no order: ") + name + " on " + stream_name(s) + (t.writes ? " writes" : " reads") + " what " +
                access.name + " on " + stream_name(other) + (access.range.writes ? " writes" : " reads"));
    }
  }
  const char* kept = interned(name);
  for (auto& t : touches) s->recent.push_back({t, s->issued, kept});
}

// --- what the host waited for
static size_t hash_of(const Range& r) { return std::hash<std::string_view>{}({(const char*)r.begin, r.end - r.begin}); }
static void check(const Staged& one) {
  if (hash_of(one.source) != one.hash) fault("staging: the host changed pinned memory that an asynchronous copy was reading");
}
void host_waited(const Clock& clock) {
  Hold h(lock);
  join(host_clock, clock);
  std::vector<Staged> left;
  for (auto& one : staged)
    if (one.at <= at(host_clock, one.stream)) check(one); else left.push_back(one);
  staged = std::move(left);
  for (Stream* s : all_streams(-1)) {
    auto until = at(host_clock, place_of(s));
    size_t keep = 0;
    for (auto& access : s->recent) if (access.at > until) s->recent[keep++] = access;
    s->recent.resize(keep);
  }
}
void host_waited_for(Stream* s) {
  Clock clock;
  { Hold h(lock); clock = s->clock; }
  host_waited(clock);
}
void copied_from_host(Stream* s, const Range& source) {
  Hold h(lock);
  for (Stream* other : all_streams(-1))
    for (auto& access : other->recent)
      if (access.range.writes && access.range.begin < source.end && source.begin < access.range.end) return;
  staged.push_back({(int)place_of(s), s->issued, source, hash_of(source)});
}
void device_writes_host(const Range& range) {
  Hold h(lock);
  std::vector<Staged> left;
  for (auto& one : staged)
    if (one.source.begin < range.end && range.begin < one.source.end) check(one); else left.push_back(one);
  staged = std::move(left);
}

// --- within a graph: two nodes, neither of which comes before the other
void unordered_nodes(const Graph& graph) {
  bool chain = true;
  for (size_t i = 1; i < graph.nodes.size(); i++) {
    auto& deps = graph.nodes[i]->deps;
    chain &= deps.size() == 1 && deps[0] == graph.nodes[i - 1].get();
  }
  if (chain) return;
  std::map<const Node*, std::set<const Node*>> before;
  for (auto& node : graph.nodes) {
    auto& mine = before[node.get()];
    for (Node* d : node->deps) { mine.insert(d); mine.insert(before[d].begin(), before[d].end()); }
    for (auto& other : graph.nodes) {
      if (other == node) break;
      if (mine.count(other.get())) continue;
      for (auto& a : node->touches)
        for (auto& b : other->touches)
          if (clash(a, b)) fault("no order: in a graph, " + node->kind + " " + node->name + " and " + other->kind + " " + other->name + " touch the same memory");
    }
  }
}

// --- torch's allocator: freed memory is overwritten, and known
static void poison(uintptr_t begin, uintptr_t end) {
  Hold h(lock);
  auto b = find((void*)begin);
  if (!b || b->host) return;
  auto word = (unsigned short*)begin;  // NaN in every floating type, and no legal index or token
  for (size_t i = 0; i < (end - begin) / 2; i++) word[i] = 0xfffd;
}
static Run poisons(uintptr_t begin, uintptr_t end) { return [=](Stream*) { poison(begin, end); }; }
static void erase(std::map<uintptr_t, Allocation>& table, uintptr_t begin, uintptr_t end) {
  auto it = table.upper_bound(begin);
  if (it != table.begin() && std::prev(it)->second.end > begin) --it;
  while (it != table.end() && it->first < end) it = table.erase(it);
}
static const Allocation* at_place(const std::map<uintptr_t, Allocation>& table, uintptr_t place) {
  auto it = table.upper_bound(place);
  if (it == table.begin()) return nullptr;
  --it;
  return it->second.end > place ? &it->second : nullptr;
}
API void fake_allocated(void* p, size_t n, int pooled) {
  Hold h(lock);
  uintptr_t begin = (uintptr_t)p, end = begin + n;
  erase(dead, begin, end);
  erase(live, begin, end);
  live[begin] = {end, ++num_allocations, (bool)pooled};
}
// Called while torch's allocator holds its lock: nothing may be waited for here.
API void fake_freed(void* p, size_t n, cudaStream_t st, int device, int pooled) {
  Hold h(lock);
  uintptr_t begin = (uintptr_t)p, end = begin + n;
  erase(live, begin, end);
  erase(dead, begin, end);
  dead[begin] = {end, 0, (bool)pooled};
  if (!switches().poison || !n) return;
  Stream* s = st ? (Stream*)st : &legacy_streams[device];
  if (!known(s)) return;
  Ranges touches{{begin, end, true}};
  if (s->capture) {
    if (pooled && !s->capture->invalid) add_node(s, "poison", "", poisons(begin, end), touches);
  } else if (pooled) freed_outside[s].push_back({begin, end});
  else put(s, "poison", "a free", poisons(begin, end), touches);
}
// What a pool got back after the last capture may be overwritten by this one.
void capture_began(Stream* s) {
  for (auto& f : freed_outside[s]) add_node(s, "poison", "", poisons(f.begin, f.end), {{f.begin, f.end, true}});
  freed_outside[s].clear();
}
long serial_of(uintptr_t place) {
  auto found = at_place(live, place);
  return found && !found->pooled ? found->serial : 0;
}
void touched(const char* name, const Ranges& touches, bool in_capture) {
  for (auto& t : touches) {
    auto found = at_place(dead, t.begin);
    if (found && (in_capture || !found->pooled))
      fault(std::string("use after free: ") + name + (t.writes ? " writes" : " reads") + " memory that was freed");
  }
}
void replayed(const GraphExec& exec) {
  Hold h(lock);
  for (auto& t : exec.touches)
    if (t.serial && serial_of(t.range.begin) != t.serial)
      fault("outside the pool: a replayed graph touches memory that was freed since its capture");
}
void forget_memory(uintptr_t begin, uintptr_t end) {
  erase(live, begin, end);
  erase(dead, begin, end);
  for (auto& [s, list] : freed_outside) {
    std::vector<Freed> left;
    for (auto& f : list) if (f.end <= begin || f.begin >= end) left.push_back(f);
    list = std::move(left);
  }
}
