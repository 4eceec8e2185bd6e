// A step in pieces as one call: compiled pieces and the operators between them, without Python.
//
// A piece is the C++ function that Inductor's wrapper is (`inductor_entry_impl`).  It takes handles of
// its inputs, which are its own from then on, and writes those of its outputs; it begins by giving
// the interpreter's lock away and ends by taking it back, so it is called with the lock held.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "_step_memory.h"

// Of the interpreter that loaded this library, whichever its version; its headers are not needed.
extern "C" {
int PyGILState_Ensure(void);
void PyGILState_Release(int);
void* PyErr_Occurred(void);
void PyErr_Print(void);
}

namespace compilespec {
namespace step_plan {

using Handle = void*;  // of a tensor: a pointer to an at::Tensor on the heap
using Entry = void (*)(Handle* inputs, Handle* outputs);
constexpr const char* kEntry = "_Z19inductor_entry_implPP16AtenTensorOpaqueS1_";

struct InterpreterLock {
  const int state = PyGILState_Ensure();
  ~InterpreterLock() { PyGILState_Release(state); }
};

// A piece, where there is an entry, or an operator.
struct Step {
  Entry entry = nullptr;
  c10::optional<c10::OperatorHandle> op;
  std::vector<c10::IValue> arguments;   // of the operator; those at `places` are inputs
  std::vector<int64_t> inputs, places;
  std::vector<bool> moves;              // inputs that the piece may have for good
  std::vector<at::Tensor> constants;    // what the piece takes after its inputs
  std::vector<int64_t> outputs, dying;  // values that it makes; those that are not read after it
};

class StepPlan : public torch::CustomClassHolder {
 public:
  explicit StepPlan(int64_t num_inputs) : num_inputs_(num_inputs), num_values_(num_inputs) {}

  // The piece in a library that is loaded already.
  void add_piece(const std::string& library, std::vector<int64_t> inputs,
                 std::vector<at::Tensor> constants, std::vector<int64_t> outputs,
                 std::vector<int64_t> dying) {
    void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
    void* entry = loaded ? dlsym(loaded, kEntry) : nullptr;
    TORCH_CHECK(entry, "step_plan: ", library, " is not loaded, or has no ", kEntry);
    Step step;
    step.entry = reinterpret_cast<Entry>(entry);
    step.constants = std::move(constants);
    for (size_t i = 0; i < inputs.size(); ++i) {
      bool moves = false;
      for (const int64_t value : dying) moves |= value == inputs[i];
      for (size_t j = i + 1; j < inputs.size(); ++j) moves &= inputs[j] != inputs[i];
      step.moves.push_back(moves);
    }
    add(std::move(step), std::move(inputs), std::move(outputs), std::move(dying));
  }

  // `constants`: a tuple of the operator's arguments, None at the `places` where inputs belong.
  void add_op(const std::string& name, const std::string& overload, const c10::IValue& constants,
              std::vector<int64_t> places, std::vector<int64_t> inputs, int64_t output,
              std::vector<int64_t> dying) {
    Step step;
    step.op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const auto& schema = step.op->schema();
    const auto& given = constants.toTupleRef().elements();
    TORCH_CHECK(schema.returns().size() <= 1 && given.size() <= schema.arguments().size(),
                "step_plan: ", name, " does not fit");
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& argument = schema.arguments()[i];
      c10::IValue value = i < given.size() ? c10::IValue(given[i])
                                           : argument.default_value().value_or(c10::IValue());
      if (argument.type()->kind() == c10::TypeKind::FloatType && value.isInt())
        value = double(value.toInt());
      step.arguments.push_back(std::move(value));
    }
    step.places = std::move(places);
    add(std::move(step), std::move(inputs), {output}, std::move(dying));
  }

  void set_outputs(std::vector<int64_t> outputs) { outputs_ = std::move(outputs); }

  std::vector<at::Tensor> run(std::vector<at::Tensor> values) {
    TORCH_CHECK(int64_t(values.size()) == num_inputs_, "step_plan: expected ", num_inputs_,
                " inputs, got ", values.size());
    const InterpreterLock lock;
    const InsideStep inside;
    values.resize(size_t(num_values_));
    std::vector<Handle> handles, made;
    torch::jit::Stack stack;
    for (const Step& step : steps_) {
      if (step.entry)
        run_piece(step, values, handles, made);
      else
        run_op(step, values, stack);
      for (const int64_t value : step.dying) values[value].reset();
    }
    std::vector<at::Tensor> results;
    results.reserve(outputs_.size());
    for (const int64_t value : outputs_) results.push_back(values[value]);
    return results;
  }

 private:
  void add(Step step, std::vector<int64_t> inputs, std::vector<int64_t> outputs,
           std::vector<int64_t> dying) {
    step.inputs = std::move(inputs), step.outputs = std::move(outputs);
    step.dying = std::move(dying);
    for (const int64_t value : step.outputs) num_values_ = std::max(num_values_, value + 1);
    steps_.push_back(std::move(step));
  }

  static void run_piece(const Step& step, std::vector<at::Tensor>& values,
                        std::vector<Handle>& handles, std::vector<Handle>& made) {
    handles.clear();
    for (size_t i = 0; i < step.inputs.size(); ++i) {
      at::Tensor& value = values[step.inputs[i]];
      handles.push_back(step.moves[i] ? new at::Tensor(std::move(value)) : new at::Tensor(value));
    }
    for (const at::Tensor& constant : step.constants) handles.push_back(new at::Tensor(constant));
    made.assign(step.outputs.size(), nullptr);
    step.entry(handles.data(), made.data());
    for (size_t i = 0; i < made.size(); ++i) {
      if (!made[i]) continue;
      auto* tensor = static_cast<at::Tensor*>(made[i]);
      // One handle is in several places where the piece returns one tensor several times.
      for (size_t j = i + 1; j < made.size(); ++j) {
        if (made[j] != made[i]) continue;
        values[step.outputs[j]] = *tensor;
        made[j] = nullptr;
      }
      values[step.outputs[i]] = std::move(*tensor);
      delete tensor;
    }
    if (PyErr_Occurred()) {
      PyErr_Print();
      TORCH_CHECK(false, "an operator written in Python failed in a compiled step; see above");
    }
  }

  static void run_op(const Step& step, std::vector<at::Tensor>& values, torch::jit::Stack& stack) {
    stack = step.arguments;
    for (size_t i = 0; i < step.inputs.size(); ++i)
      stack[step.places[i]] = values[step.inputs[i]];
    step.op->callBoxed(stack);
    if (!stack.empty()) values[step.outputs[0]] = std::move(stack[0]).toTensor();
  }

  std::vector<Step> steps_;
  std::vector<int64_t> outputs_;
  int64_t num_inputs_, num_values_;
};

}  // namespace step_plan

TORCH_LIBRARY_FRAGMENT(compilespec, m) {
  using step_plan::StepPlan;
  m.class_<StepPlan>("StepPlan")
      .def(torch::init<int64_t>())
      .def("add_piece", &StepPlan::add_piece)
      .def("add_op", &StepPlan::add_op)
      .def("set_outputs", &StepPlan::set_outputs)
      .def("run", &StepPlan::run);
}

}  // namespace compilespec
