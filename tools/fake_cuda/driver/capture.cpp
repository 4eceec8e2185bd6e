// Captures and graphs.
#include "device.h"
#include <cstdio>

std::vector<Capture*> captures;

void invalidate(Capture* c) { if (c) c->invalid = true; }
void add_node(Stream* s, const char* kind, const char* name, Run run, const Ranges& touches) {
  auto node = std::make_unique<Node>();
  node->kind = kind;
  node->name = name;
  node->run = std::move(run);
  node->touches = touches;
  for (auto d : s->deps) node->deps.push_back((Node*)d);
  Node* p = node.get();
  s->capture->graph->nodes.push_back(std::move(node));
  s->deps.assign(1, (cudaGraphNode_t)p);
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t st, cudaStreamCaptureMode mode) {
  Hold h(lock);
  Stream* s = stream_of(st);
  if (is_legacy(s)) return refuse("cudaStreamBeginCapture", cudaErrorStreamCaptureUnsupported);
  if (s->capture) return refuse("cudaStreamBeginCapture", cudaErrorIllegalState);
  auto c = new Capture{(unsigned long long)++id_count, mode, std::this_thread::get_id(), s, new Graph};
  c->streams.insert(s);
  captures.push_back(c);
  s->capture = c;
  s->deps.clear();
  capture_began(s);
  return cudaSuccess;
}
// Every node must be reached from the stream in which the capture began.
static bool all_joined(Stream* s, const Graph& graph) {
  std::set<Node*> seen;
  std::vector<Node*> todo;
  for (auto d : s->deps) todo.push_back((Node*)d);
  while (!todo.empty()) {
    Node* n = todo.back();
    todo.pop_back();
    if (seen.insert(n).second) for (auto d : n->deps) todo.push_back(d);
  }
  return seen.size() == graph.nodes.size();
}
API cudaError_t cudaStreamEndCapture(cudaStream_t st, cudaGraph_t* out) {
  std::unique_ptr<Graph> spoilt;  // its values are dropped after the lock
  Hold h(lock);
  Stream* s = stream_of(st);
  *out = nullptr;
  Capture* c = s->capture;
  if (!c) return refuse("cudaStreamEndCapture", cudaErrorIllegalState);
  if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != std::this_thread::get_id()) return refuse("cudaStreamEndCapture", cudaErrorStreamCaptureWrongThread);
  cudaError_t e = cudaSuccess;
  if (c->invalid) e = cudaErrorStreamCaptureInvalidated;
  else if (s != c->origin) { invalidate(c); return refuse("cudaStreamEndCapture", cudaErrorStreamCaptureUnmatched); }
  else if (!all_joined(s, *c->graph)) e = cudaErrorStreamCaptureUnjoined;
  for (Stream* o : c->streams) { o->capture = nullptr; o->deps.clear(); }
  for (size_t i = 0; i < captures.size(); i++) if (captures[i] == c) { captures.erase(captures.begin() + i); break; }
  if (e == cudaSuccess) { unordered_nodes(*c->graph); *out = (cudaGraph_t)c->graph; }
  else spoilt.reset(c->graph);
  delete c;
  return e == cudaSuccess ? e : refuse("cudaStreamEndCapture", e);
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t st, cudaStreamCaptureStatus* out) {
  Hold h(lock);
  Stream* s = stream_of(st);
  if (is_legacy(s)) for (Capture* c : captures) for (Stream* o : c->streams) if (o->blocking) return refuse("cudaStreamIsCapturing", cudaErrorStreamCaptureImplicit);
  *out = !s->capture ? cudaStreamCaptureStatusNone : s->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t st, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** deps, const cudaGraphEdgeData** edges, size_t* n) {
  Hold h(lock);
  if (auto e = cudaStreamIsCapturing(st, status)) return e;
  Stream* s = stream_of(st);
  if (*status != cudaStreamCaptureStatusActive) return cudaSuccess;
  if (id) *id = s->capture->id;
  if (graph) *graph = (cudaGraph_t)s->capture->graph;
  if (deps) *deps = s->deps.data();
  if (edges) *edges = nullptr;
  if (n) *n = s->deps.size();
  return cudaSuccess;
}
API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t st, cudaGraphNode_t* deps, const cudaGraphEdgeData*, size_t n, unsigned flags) {
  Hold h(lock);
  Stream* s = stream_of(st);
  if (!s->capture) return fail(cudaErrorIllegalState);
  std::vector<cudaGraphNode_t> more(deps, deps + n);
  if (flags == cudaStreamSetCaptureDependencies) s->deps.clear();
  s->deps.insert(s->deps.end(), more.begin(), more.end());
  return cudaSuccess;
}

// --- graphs
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t g, unsigned long long) {
  Hold h(lock);
  auto x = new GraphExec;
  std::map<std::pair<uintptr_t, uintptr_t>, int> touches;
  for (auto& n : ((Graph*)g)->nodes) {
    x->nodes.push_back({n->kind + (n->name.empty() ? "" : " " + n->name), n->run});
    for (auto& t : n->touches) touches[{t.begin, t.end}] |= t.writes;
    if (n->kind == "memcpy HtoD") x->staged.push_back(n->touches.front());
  }
  for (auto& [place, writes] : touches) x->touches.push_back({{place.first, place.second, writes}, serial_of(place.first)});
  *out = (cudaGraphExec_t)x;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t g, unsigned long long f) { return cudaGraphInstantiateWithFlags(out, g, f); }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t p, cudaStream_t st) {
  auto x = (GraphExec*)p;
  Stream* s = stream_of(st);
  replay_count++;
  replayed(*x);
  Ranges touches;
  for (auto& t : x->touches) touches.push_back(t.range);
  auto e = enqueue("cudaGraphLaunch", s, "graph", "", [x](Stream* on) { for (auto& n : x->nodes) n.second(on); }, touches);
  for (auto& source : x->staged) copied_from_host(s, source);
  return e;
}
API cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaGraphDestroy(cudaGraph_t g) { delete (Graph*)g; return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x) { drain_all(-1); delete (GraphExec*)x; return cudaSuccess; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* out, size_t* n) {
  auto& nodes = ((Graph*)g)->nodes;
  if (out) for (size_t i = 0; i < *n && i < nodes.size(); i++) out[i] = (cudaGraphNode_t)nodes[i].get();
  *n = nodes.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t p, cudaGraphNode_t* out, cudaGraphEdgeData*, size_t* n) {
  auto& deps = ((Node*)p)->deps;
  if (out) for (size_t i = 0; i < *n && i < deps.size(); i++) out[i] = (cudaGraphNode_t)deps[i];
  *n = deps.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t g, const char* path, unsigned) {
  FILE* f = fopen(path, "w");
  if (!f) return fail(cudaErrorInvalidValue);
  fprintf(f, "digraph {\n");
  for (auto& n : ((Graph*)g)->nodes) {
    fprintf(f, "n%p [label=\"%s %s\"];\n", (void*)n.get(), n->kind.c_str(), n->name.c_str());
    for (auto d : n->deps) fprintf(f, "n%p -> n%p;\n", (void*)d, (void*)n.get());
  }
  fprintf(f, "}\n");
  fclose(f);
  return cudaSuccess;
}
static thread_local std::string text;
API const char* fake_graph(cudaGraphExec_t x) {
  text.clear();
  for (auto& n : ((GraphExec*)x)->nodes) text += n.first + "\n";
  return text.c_str();
}
API long fake_replays() { return replay_count; }
