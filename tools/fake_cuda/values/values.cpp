// Values for the fake device. Every operator with a CUDA kernel is wrapped: the real CUDA kernel runs first
// (allocations, waits, launches: all real, its copies on the device muted), then one command is put on the stream
// which runs the CPU kernel of the same operator over the same memory. During capture that command is a node.
#include <Python.h>
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>
#include <map>
#include <mutex>
#include <set>

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

struct Range {  // as in device.h
  uintptr_t begin, end;
  int writes;
};
extern "C" {
int fake_enqueue(void* stream, const char* name, void (*run)(void*), void* arg, void (*drop)(void*), const Range*, int);
void fake_reads(void* stream, const char* name, const Range*, int);
void fake_allocated(void*, size_t, int pooled);
void fake_freed(void*, size_t, void* stream, int device, int pooled);
void fake_fault(const char* said);
void fake_mute(int by);
void fake_gil(void* (*release)(), void (*restore)(void*));
}

namespace {
std::map<std::string, c10::SafeKernelFunction> originals;
std::map<std::string, long> valued, missing;
std::mutex tables;
thread_local int depth = 0;

const std::set<std::string> no_values = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::view.dtype", "aten::_reshape_alias",
    "aten::unfold", "aten::resize_", "aten::resize_as_", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory",
    "aten::_local_scalar_dense", "aten::_fused_sdp_choice", "aten::is_set_to", "aten::set_.source_Storage", "aten::set_",
    "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::_copy_from_and_resize", "aten::_efficientzerotensor"};
// Their sizes depend on values, so the real ones wait for the device: we wait too, and ask the CPU.
const std::set<std::string> on_host = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::bincount",
    "aten::repeat_interleave.Tensor", "aten::equal"};

std::string full_name(const OperatorHandle& op) {
  auto& n = op.operator_name();
  return n.overload_name.empty() ? n.name : n.name + "." + n.overload_name;
}
void* current_stream() {
  c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return guard.getStreamNativeHandle(guard.getStream(guard.getDevice()));
}
at::Tensor host_alias(const at::Tensor& t) {
  if (!t.defined()) return t;
  if (!t.is_cuda()) {
    at::Tensor copy = t.detach().clone();
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), [](void*) {},
                       at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
}
IValue on_cpu(const IValue& v) {
  if (v.isTensor()) return host_alias(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) list.push_back(host_alias(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector()) list.push_back(t ? std::optional<at::Tensor>(host_alias(*t)) : std::nullopt);
    return list;
  }
  if (v.isDevice()) return c10::Device(at::kCPU);
  if (v.isGenerator()) return IValue();
  return v;
}
bool any_cuda(const IValue& v, bool cuda) {
  if (v.isTensor()) return v.toTensor().defined() && v.toTensor().dim() + (int)cuda > 0 && v.toTensor().is_cuda() == cuda;
  return false;
}
std::vector<at::Tensor> tensors_of(const IValue& v) {
  if (v.isTensor()) return {v.toTensor()};
  if (v.isTensorList()) return v.toTensorVector();
  return {};
}

// Scales of a product's rows or columns, or of blocks of both, for each of its elements.
at::Tensor spread(const at::Tensor& scale, const at::Tensor& of) {
  auto s = scale.to(at::kFloat);
  if (s.dim() != 2) return s;
  for (int64_t d : {0, 1})
    if (s.size(d) > 1 && s.size(d) < of.size(d)) s = s.repeat_interleave((of.size(d) + s.size(d) - 1) / s.size(d), d).slice(d, 0, of.size(d));
  return s;
}
// CPU forms of the operators that have no CPU kernel of the same name.
bool substitute(const std::string& name, Stack& s) {
  if (name == "aten::histc" && !s[0].toTensor().is_floating_point()) {  // CUDA counts integers, the CPU does not
    auto t = s[0].toTensor();
    auto counts = at::histc(t.to(at::kDouble), s[1].toInt(), s[2].toScalar(), s[3].toScalar()).to(t.scalar_type());
    s.clear();
    s.push_back(counts);
    return true;
  }
  if (name == "aten::_scaled_mm") {  // a, b, scales, bias, scale of the result, dtype: in float32
    auto a = s[0].toTensor().to(at::kFloat), b = s[1].toTensor().to(at::kFloat);
    auto out = at::mm(a * spread(s[2].toTensor(), a), b * spread(s[3].toTensor(), b));
    if (!s[4].isNone() && s[4].toTensor().defined()) out = out + s[4].toTensor().to(at::kFloat);
    if (!s[5].isNone() && s[5].toTensor().defined()) out = out * s[5].toTensor();
    out = out.to(s[6].isNone() ? s[0].toTensor().scalar_type() : s[6].toScalarType());
    s.clear();
    s.push_back(out);
    return true;
  }
  if (name == "aten::_grouped_mm") {  // rows, weights of each group, the ends of the groups, bias, dtype
    auto a = s[0].toTensor(), b = s[1].toTensor();
    if (a.dim() == 2 && b.dim() == 3 && !s[2].isNone()) {
      auto ends = s[2].toTensor().to(at::kLong);
      auto out = at::zeros({a.size(0), b.size(2)}, a.options());
      for (int64_t g = 0, from = 0; g < ends.size(0); from = ends[g++].item<int64_t>()) {
        auto rows = out.slice(0, from, ends[g].item<int64_t>());
        rows.copy_(at::mm(a.slice(0, from, ends[g].item<int64_t>()), b[g]));
      }
      s.clear();
      s.push_back(out);
      return true;
    }
  }
  if (name == "aten::_scaled_dot_product_flash_attention" || name == "aten::_scaled_dot_product_efficient_attention" ||
      name == "aten::_scaled_dot_product_cudnn_attention") {
    bool flash = name == "aten::_scaled_dot_product_flash_attention";
    std::optional<at::Tensor> bias;
    if (!flash && !s[3].isNone() && s[3].toTensor().defined()) bias = s[3].toTensor();
    bool causal = flash ? s[4].toBool() : s[6].toBool();
    auto scale = s.back().isNone() ? std::nullopt : std::optional<double>(s.back().toDouble());
    auto out = std::get<0>(at::_scaled_dot_product_attention_math(s[0].toTensor(), s[1].toTensor(), s[2].toTensor(), bias, 0.0, causal, std::nullopt, scale));
    s.clear();
    s.push_back(out);
    return true;
  }
  return false;
}
bool runs_on_cpu(const OperatorHandle& op, const std::string& name) {
  return op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) || name.find("_scaled_dot_product_") != std::string::npos ||
         name == "aten::_scaled_mm" || name == "aten::_grouped_mm";
}

// Name spaces whose kernels are Triton's, and interpreted, for the time being.
std::set<std::string> passed;
bool passes(const OperatorHandle& op) {
  std::lock_guard<std::mutex> h(tables);
  return !passed.empty() && passed.count(op.operator_name().getNamespace() ? std::string(*op.operator_name().getNamespace()) : "");
}

struct Work {
  OperatorHandle op;
  std::string name;
  Stack inputs;
  std::vector<std::pair<int, IValue>> outputs;  // the new tensors: place, alias
};
void run_cpu(const OperatorHandle& op, const std::string& name, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_python(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}));
  if (!substitute(name, stack)) op.callBoxed(stack);
}
void run_work(void* p) {
  Work& w = *(Work*)p;
  try {
    Stack stack = w.inputs;
    run_cpu(w.op, w.name, stack);
    for (auto& [place, out] : w.outputs) {
      if (place >= (int)stack.size()) continue;
      auto results = tensors_of(stack[place]), places = tensors_of(out);
      for (size_t i = 0; i < places.size() && i < results.size(); i++)
        if (places[i].defined() && results[i].defined() && places[i].numel()) {
          at::AutoDispatchBelowADInplaceOrView below;
          places[i].copy_(results[i].reshape(places[i].sizes()));
        }
    }
  } catch (const std::exception& e) {
    std::string first = e.what();
    first = w.name + ": " + first.substr(0, first.find('\n'));
    fake_fault(("values: " + first).c_str());  // a device would trap here
  }
}

void host_valued(const OperatorHandle& op, const std::string& name, Stack* stack) {
  int e = (int)cudaStreamSynchronize((cudaStream_t)current_stream());
  TORCH_CHECK(e == 0, "CUDA error: ", cudaGetErrorString((cudaError_t)e));
  size_t n = op.schema().arguments().size();
  Stack cpu;
  for (size_t i = stack->size() - n; i < stack->size(); i++) cpu.push_back(on_cpu((*stack)[i]));
  run_cpu(op, name, cpu);
  torch::jit::drop(*stack, n);
  for (auto& v : cpu) stack->push_back(v.isTensor() ? IValue(v.toTensor().to(at::kCUDA)) : v);
}
// x[mask]: torch asks nonzero first, which waits.
void masks_to_places(Stack* stack, size_t first) {
  for (size_t i = first; i < stack->size(); i++) {
    if (!(*stack)[i].isOptionalTensorList()) continue;
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : (*stack)[i].toOptionalTensorVector()) {
      if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte))
        for (auto& column : t->nonzero().unbind(1)) list.push_back(std::optional<at::Tensor>(column));
      else list.push_back(t);
    }
    (*stack)[i] = list;
  }
}

// The memory between a tensor's first element and its last.
void touch(std::vector<Range>& touches, const IValue& v, bool writes) {
  for (auto& t : tensors_of(v)) {
    if (!t.defined() || !t.is_cuda() || !t.numel()) continue;
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
    auto begin = (uintptr_t)t.const_data_ptr();
    touches.push_back({begin, begin + (last + 1) * t.element_size(), writes});
  }
}

struct Muted {
  Muted() { depth++; fake_mute(1); }
  ~Muted() { depth--; fake_mute(-1); }
};

std::optional<c10::Device> device_of(const Stack& stack, size_t first) {
  for (size_t i = first; i < stack.size(); i++)
    for (auto& t : stack[i].isTensor() || stack[i].isTensorList() ? tensors_of(stack[i]) : std::vector<at::Tensor>{})
      if (t.defined() && t.is_cuda()) return t.device();
  return std::nullopt;
}
void wrapped(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  std::string name = full_name(op);
  auto& original = originals.at(name);
  if (passes(op)) return original.callBoxed(op, keys, stack);
  if (on_host.count(name)) {
    c10::OptionalDeviceGuard on;
    if (auto d = device_of(*stack, stack->size() - op.schema().arguments().size())) on.reset_device(*d);
    return host_valued(op, name, stack);
  }
  if (depth) return original.callBoxed(op, keys, stack);
  const auto& schema = op.schema();
  size_t n = schema.arguments().size(), first = stack->size() - n;
  if (name == "aten::copy_" && (any_cuda((*stack)[first], false) || any_cuda((*stack)[first + 1], false) || !(*stack)[first + 1].toTensor().is_cuda()))
    return original.callBoxed(op, keys, stack);  // between host and device: real copies
  bool view = false;
  for (auto& r : schema.returns()) view |= r.alias_info() && !r.alias_info()->isWrite();
  if (view || no_values.count(name)) return original.callBoxed(op, keys, stack);
  if (!runs_on_cpu(op, name)) {
    { std::lock_guard<std::mutex> h(tables); missing[name]++; }
    return original.callBoxed(op, keys, stack);  // its inner operators are wrapped instead
  }
  masks_to_places(stack, first);
  Stack inputs(stack->begin() + first, stack->end());
  std::vector<Range> touches;
  for (size_t i = 0; i < inputs.size(); i++) {
    auto* alias = schema.arguments()[i].alias_info();
    touch(touches, inputs[i], alias && alias->isWrite());
  }
  fake_reads(current_stream(), name.c_str(), touches.data(), (int)touches.size());
  { Muted m; original.callBoxed(op, keys, stack); }
  c10::OptionalDeviceGuard on;  // that of the tensors; the kernel itself ran under the caller's
  if (auto d = device_of(inputs, 0)) on.reset_device(*d);
  else if (auto made = device_of(*stack, stack->size() - schema.returns().size())) on.reset_device(*made);
  auto* work = new Work{op, name, {}, {}};
  for (auto& v : inputs) work->inputs.push_back(on_cpu(v));
  size_t results = schema.returns().size();
  for (size_t i = 0; i < results; i++) {
    auto& r = schema.returns()[i];
    if (r.alias_info() && r.alias_info()->isWrite()) continue;  // an input, written by the CPU kernel itself
    auto& v = (*stack)[stack->size() - results + i];
    if (v.isTensor() || v.isTensorList()) {
      work->outputs.push_back({(int)i, on_cpu(v)});
      touch(touches, v, true);
    }
  }
  { std::lock_guard<std::mutex> h(tables); valued[name]++; }
  fake_enqueue(current_stream(), name.c_str(), run_work, work, [](void* p) { delete (Work*)p; },
               touches.data(), (int)touches.size());
}

void* release() { return PyGILState_Check() ? PyEval_SaveThread() : nullptr; }
void restore(void* state) { PyEval_RestoreThread((PyThreadState*)state); }
std::vector<std::unique_ptr<torch::Library>> libraries;
}  // namespace

// What torch's allocator gives out and takes back, while it holds its lock.
static void follow_allocator() {
  static bool follows = false;
  if (std::exchange(follows, true)) return;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const c10::cuda::CUDACachingAllocator::TraceEntry& e) {
    using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;
    int pooled = e.mempool_.first || e.mempool_.second;
    if (e.action_ == Entry::ALLOC) fake_allocated((void*)e.addr_, e.size_, pooled);
    if (e.action_ == Entry::FREE_COMPLETED) fake_freed((void*)e.addr_, e.size_, e.stream_, e.device_, pooled);
  });
}
extern "C" int values_attach(const char* space) {
  fake_gil(release, restore);
  follow_allocator();
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, space, c10::DispatchKey::CUDA, __FILE__, __LINE__);
  int count = 0;
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind(std::string(space) + "::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    std::string full = full_name(*op);
    if (originals.count(full)) continue;
    bool own = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    if (!own && full != "aten::copy_") continue;
    originals.emplace(full, op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA));
    std::string short_name = full.substr(full.find("::") + 2);
    library->impl(short_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&wrapped>());
    count++;
  }
  libraries.push_back(std::move(library));
  return count;
}
extern "C" void values_pass(const char* space, int on) {
  std::lock_guard<std::mutex> h(tables);
  if (on) passed.insert(space);
  else passed.erase(space);
}
extern "C" int values_depth() { return depth; }
static thread_local std::string text;
extern "C" const char* values_missing() {
  std::lock_guard<std::mutex> h(tables);
  text.clear();
  for (auto& [name, times] : missing) text += std::to_string(times) + " " + name + "\n";
  return text.c_str();
}
extern "C" const char* values_of() {
  std::lock_guard<std::mutex> h(tables);
  text.clear();
  for (auto& [name, times] : valued) text += std::to_string(times) + " " + name + "\n";
  return text.c_str();
}
// A Python function as a command of the current stream.
extern "C" int values_enqueue_python(const char* name, PyObject* function, const Range* touches, int n) {
  Py_INCREF(function);
  auto run = [](void* p) {
    auto gil = PyGILState_Ensure();
    PyObject* r = PyObject_CallNoArgs((PyObject*)p);
    if (r) Py_DECREF(r);
    else {
      PyObject *type, *value, *where;
      PyErr_Fetch(&type, &value, &where);
      PyObject* said = value ? PyObject_Str(value) : nullptr;
      fake_fault((std::string("values: a kernel in Python: ") + (said ? PyUnicode_AsUTF8(said) : "failed")).c_str());
      Py_XDECREF(said), Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(where);
    }
    PyGILState_Release(gil);
  };
  auto drop = [](void* p) { auto gil = PyGILState_Ensure(); Py_DECREF((PyObject*)p); PyGILState_Release(gil); };
  return fake_enqueue(current_stream(), name, run, function, drop, touches, n);
}
