// Streams as queues, events, and the rules about calls while somebody captures.
#include "device.h"

std::recursive_mutex lock;
static std::recursive_mutex executing;  // one command at a time
std::set<Stream*> streams;
static std::set<Event*> events;
Stream legacy_streams[16];
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static void* (*gil_release)() = nullptr;
static void (*gil_restore)(void*) = nullptr;

struct Executing {  // waits without the GIL: a command may be Python
  Executing() {
    if (executing.try_lock()) return;
    void* state = gil_release ? gil_release() : nullptr;
    executing.lock();
    if (state) gil_restore(state);
  }
  ~Executing() { executing.unlock(); }
};

// Calls that CUDA calls "potentially unsafe" while somebody captures.
cudaError_t unsafe(const char* api) {
  Hold h(lock);
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool bad = false;
  for (Capture* c : captures) {
    bool mine = c->thread == std::this_thread::get_id();
    if ((mine && c->mode != cudaStreamCaptureModeRelaxed) ||
        (!mine && thread_mode == cudaStreamCaptureModeGlobal && c->mode == cudaStreamCaptureModeGlobal)) {
      bad = true;
      invalidate(c);
    }
  }
  return bad ? refuse(api, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
Stream* stream_of(cudaStream_t s) {
  if (s && s != cudaStreamLegacy && s != cudaStreamPerThread) return (Stream*)s;
  Stream* l = &legacy_streams[current_device];
  l->device = current_device;
  l->blocking = true;
  l->id = -1 - current_device;
  return l;
}
bool is_legacy(Stream* s) { return s >= legacy_streams && s < legacy_streams + 16; }
bool known(Stream* s) { return is_legacy(s) || streams.count(s); }
std::vector<Stream*> all_streams(int device) {
  Hold h(lock);
  std::vector<Stream*> all;
  for (Stream* s : streams) if (device < 0 || s->device == device) all.push_back(s);
  for (int d = 0; d < 16; d++) if (device < 0 || d == device) all.push_back(&legacy_streams[d]);
  return all;
}
void drain(Stream* s, unsigned long long upto) {
  Executing e;
  while (s->done < upto) {
    Command c;
    {
      Hold h(lock);
      if (s->queue.empty()) return;
      c = std::move(s->queue.front());
      s->queue.pop_front();
    }
    c.run(s);
    s->done++;
  }
}
void drain_all(int device) { for (Stream* s : all_streams(device)) drain(s, s->issued); }

// A command at the end of a queue; nobody runs it yet.
void put(Stream* s, const char* kind, const char* name, Run run, const Ranges& touches) {
  s->queue.push_back({kind, std::move(run)});
  s->issued++;
  ordered(s, *name ? name : kind, touches);
}
static void wait_for(Stream* s, Stream* other) {
  unsigned long long at = other->issued;
  join(s->clock, other->clock);
  put(s, "wait", "", [other, at](Stream*) { drain(other, at); }, {});
}
// All work goes through here: a node of the capture, or a command of the queue.
cudaError_t enqueue(const char* api, Stream* s, const char* kind, const char* name, Run run, Ranges touches) {
  {
    Hold h(lock);
    if (!known(s)) return refuse(api, cudaErrorInvalidResourceHandle);
    if (strcmp(kind, "graph")) touched(*name ? name : kind, touches, s->capture);
    if (s->capture) {
      if (s->capture->invalid) return refuse(api, cudaErrorStreamCaptureInvalidated);
      add_node(s, kind, name, std::move(run), touches);
      return cudaSuccess;
    }
    if (is_legacy(s))
      for (Capture* c : captures)
        for (Stream* other : c->streams)
          if (other->blocking && other->device == s->device) {
            invalidate(c);
            return refuse(api, cudaErrorStreamCaptureImplicit);
          }
    if (is_legacy(s)) {  // implicit order between the legacy stream and blocking ones
      for (Stream* other : streams) if (other->blocking && other->device == s->device) wait_for(s, other);
    } else if (s->blocking) wait_for(s, &legacy_streams[s->device]);
    put(s, kind, name, std::move(run), touches);
  }
  if (!switches().lazy) drain(s, s->issued);
  return cudaSuccess;
}

API int fake_enqueue(cudaStream_t s, const char* name, void (*f)(void*), void* arg, void (*drop)(void*), const Range* touches, int n) {
  std::shared_ptr<void> held(arg, drop);
  return enqueue(name, stream_of(s), "value", name, [f, held](Stream*) { f(held.get()); }, Ranges(touches, touches + n));
}
// Before a kernel takes memory for its results, which may be what its arguments lost.
API void fake_reads(cudaStream_t st, const char* name, const Range* touches, int n) {
  Hold h(lock);
  touched(name, Ranges(touches, touches + n), stream_of(st)->capture);
}
API void fake_mute(int by) { muted += by; }
API void fake_gil(void* (*r)(), void (*b)(void*)) { gil_release = r; gil_restore = b; }
API long fake_pending() {
  Hold h(lock);
  long n = 0;
  for (Stream* s : all_streams(-1)) n += s->queue.size();
  return n;
}

// --- streams
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  Hold h(lock);
  auto s = new Stream;
  s->id = ++id_count;
  s->device = current_device;
  s->priority = priority;
  s->blocking = !(flags & cudaStreamNonBlocking);
  streams.insert(s);
  *out = (cudaStream_t)s;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t p) {
  auto s = stream_of(p);
  drain(s, s->issued);
  Hold h(lock);
  streams.erase(s);
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) { *p = stream_of(s)->priority; return cudaSuccess; }
static cudaError_t blocked(const char* api, Stream* s) {  // waiting for, or asking, a stream that captures
  Hold h(lock);
  if (!known(s)) return refuse(api, cudaErrorInvalidResourceHandle);
  if (s->capture) {
    auto e = s->capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnsupported;
    invalidate(s->capture);
    return refuse(api, e);
  }
  if (is_legacy(s))
    for (Capture* c : captures)
      for (Stream* o : c->streams)
        if (o->blocking) { invalidate(c); return refuse(api, cudaErrorStreamCaptureImplicit); }
  return unsafe(api);
}
API cudaError_t cudaStreamSynchronize(cudaStream_t p) {
  Stream* s = stream_of(p);
  if (auto e = blocked("cudaStreamSynchronize", s)) return e;
  drain(s, s->issued);
  host_waited_for(s);
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t p) {
  Stream* s = stream_of(p);
  if (auto e = blocked("cudaStreamQuery", s)) return e;
  if (s->done == s->issued) { host_waited_for(s); return cudaSuccess; }
  drain(s, s->done + 1);  // a poller makes progress
  return fail(cudaErrorNotReady);
}
API cudaError_t cudaDeviceSynchronize() {
  {
    Hold h(lock);
    for (Capture* c : captures)
      if (c->origin->device == current_device) { invalidate(c); return refuse("cudaDeviceSynchronize", cudaErrorStreamCaptureUnsupported); }
  }
  drain_all(current_device);
  for (Stream* s : all_streams(current_device)) host_waited_for(s);
  return cudaSuccess;
}

// --- events
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  Hold h(lock);
  auto e = new Event;
  e->flags = flags;
  e->device = current_device;
  events.insert(e);
  *out = (cudaEvent_t)e;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t p) { Hold h(lock); return events.erase((Event*)p) ? cudaSuccess : fail(cudaErrorInvalidResourceHandle); }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t p, cudaStream_t st, unsigned flags) {
  Event* e = (Event*)p;
  Stream* s = stream_of(st);
  if (e->device != s->device) return refuse("cudaEventRecord", cudaErrorInvalidResourceHandle);
  bool external = s->capture && flags & cudaEventRecordExternal;
  {
    Hold h(lock);
    if (s->capture && !external) {
      if (s->capture->invalid) return refuse("cudaEventRecord", cudaErrorStreamCaptureInvalidated);
      e->capture_id = s->capture->id;
      e->deps = s->deps;
      e->recorded = true;
      return cudaSuccess;
    }
    if (!s->capture) { e->capture_id = 0; e->recorded = true; e->stream = s; e->at = s->issued + 1; }
  }
  auto r = enqueue("cudaEventRecord", s, "event record", "", [e](Stream* on) { e->time = now(); e->stream = on; });
  Hold h(lock);
  if (!s->capture) { e->at = s->issued; e->clock = s->clock; }
  return r;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
// An event of a capture, also of one that has ended, says nothing outside.
static cudaError_t refused_event(const char* api, Event* e, bool waits) {
  Hold h(lock);
  if (!e->capture_id) return waits ? unsafe(api) : cudaSuccess;
  for (Capture* c : captures) if (c->id == e->capture_id) invalidate(c);
  return refuse(api, cudaErrorCapturedEvent);
}
API cudaError_t cudaEventQuery(cudaEvent_t p) {
  Event* e = (Event*)p;
  if (auto r = refused_event("cudaEventQuery", e, true)) return r;
  if (!e->recorded) return cudaSuccess;
  if (e->stream->done >= e->at) { host_waited(e->clock); return cudaSuccess; }
  drain(e->stream, e->stream->done + 1);
  return fail(cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t p) {
  Event* e = (Event*)p;
  if (auto r = refused_event("cudaEventSynchronize", e, true)) return r;
  if (e->recorded) { drain(e->stream, e->at); host_waited(e->clock); }
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  Event *x = (Event*)a, *y = (Event*)b;
  if (x->capture_id || y->capture_id) return refuse("cudaEventElapsedTime", cudaErrorCapturedEvent);
  if (!x->recorded || !y->recorded) return fail(cudaErrorInvalidResourceHandle);
  if (x->stream->done < x->at || y->stream->done < y->at) return fail(cudaErrorNotReady);
  *ms = (float)((y->time - x->time) * 1e3);
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t st, cudaEvent_t p, unsigned flags) {
  Stream* s = stream_of(st);
  Event* e = (Event*)p;
  Stream* on;
  unsigned long long at;
  {
    Hold h(lock);
    if (!e->recorded) return cudaSuccess;
    Capture* of = nullptr;
    for (Capture* c : captures) if (e->capture_id && c->id == e->capture_id) of = c;
    if (e->capture_id && !of) return refuse("cudaStreamWaitEvent", cudaErrorCapturedEvent);
    if (of) {
      if (of->invalid) return refuse("cudaStreamWaitEvent", cudaErrorStreamCaptureInvalidated);
      if (is_legacy(s)) { invalidate(of); return refuse("cudaStreamWaitEvent", cudaErrorStreamCaptureImplicit); }
      if (s->capture && s->capture != of) { invalidate(of); invalidate(s->capture); return refuse("cudaStreamWaitEvent", cudaErrorStreamCaptureMerge); }
      if (!s->capture) { s->capture = of; of->streams.insert(s); s->deps.clear(); }
      for (auto d : e->deps) {
        bool has = false;
        for (auto x : s->deps) has |= x == d;
        if (!has) s->deps.push_back(d);
      }
      return cudaSuccess;
    }
    if (s->capture && !(flags & cudaEventWaitExternal)) {
      invalidate(s->capture);
      return refuse("cudaStreamWaitEvent", cudaErrorStreamCaptureIsolation);
    }
    on = e->stream;
    at = e->at;
    if (!s->capture) join(s->clock, e->clock);
  }
  return enqueue("cudaStreamWaitEvent", s, "wait", "", [on, at](Stream* self) { if (on != self) drain(on, at); });
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* arg) {
  return enqueue("cudaLaunchHostFunc", stream_of(s), "host", "", [=](Stream*) { f(arg); });
}
API cudaError_t cudaStreamAddCallback(cudaStream_t st, cudaStreamCallback_t f, void* arg, unsigned) {
  Stream* s = stream_of(st);
  if (s->capture) { invalidate(s->capture); return refuse("cudaStreamAddCallback", cudaErrorStreamCaptureUnsupported); }
  return enqueue("cudaStreamAddCallback", s, "host", "", [=](Stream*) { f(st, cudaSuccess, arg); });
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { std::swap(*mode, thread_mode); return cudaSuccess; }
