// Handles all operators that operators.cc does not: it runs the CPU's kernel
// over the device's memory, as one task of the current stream of the arguments'
// device.
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/core/LegacyTypeDispatch.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/ivalue.h"
#include "ATen/core/stack.h"
#include "absl/strings/str_cat.h"
#include "c10/core/DeviceGuard.h"
#include "testing/device/host_tensors.h"
#include "testing/device/runtime.h"
#include "testing/device/torch_parts.h"
#include "torch/library.h"

namespace testdevice {
namespace {

using Stack = torch::jit::Stack;

// Returns whether the argument is written to though the schema does not say so.
bool WritesUnsaid(const std::string& name, const Stack& arguments, size_t i) {
  // native_batch_norm(input, weight, bias, running_mean, running_var, training
  return name == "aten::native_batch_norm" && (i == 3 || i == 4) &&
         arguments[5].toBool();
}

// One call, classified by its arguments.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack arguments)
      : op_(op),
        name_(op.operator_name().name),
        arguments_(std::move(arguments)) {
    const auto& schema = op.schema();
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* const alias = schema.arguments()[i].alias_info();
      const bool writes = (alias != nullptr && alias->isWrite()) ||
                          WritesUnsaid(name_, arguments_, i);
      ForTensors(arguments_[i], [&](const at::Tensor& t) {
        if (!IsOfDevice(t)) return;
        if (!device_.has_value()) device_ = t.device();
        accesses_.push_back(AccessTo(t, writes, static_cast<int>(i)));
        writes_ = writes_ || writes;
      });
      if (arguments_[i].isDevice() && !device_.has_value()) {
        device_ = arguments_[i].toDevice();
      }
    }
    for (const auto& result : schema.returns()) {
      views_ = views_ || (result.alias_info() != nullptr &&
                          !result.alias_info()->isWrite());
    }
    draws_ = op.hasTag(at::Tag::nondeterministic_seeded);
  }

  Stack Run() {
    const c10::Device device =
        device_.value_or(TestDevice(Runtime::Get().current_device()));
    const c10::DeviceGuard guard(device);
    stream_ = Runtime::Get().Current(device.index());
    if (views_ && !writes_) return RunAtOnce();
    if (ShapesDependOnValues()) {
      // The kernel's results are launched as any others; the host waits for
      // their sizes.
      Runtime::Get().Drain();
      Stack results = RunAtOnce();
      Runtime::Get().HostWait(stream_, absl::StrCat("sizes of ", name_));
      return results;
    }
    if (!Runtime::Get().has_workers()) return RunAtOnce();
    std::optional<Stack> results = RunLater();
    if (results.has_value()) return *std::move(results);
    Runtime::Get().Drain();
    return RunAtOnce();
  }

 private:
  template <typename F>
  static void ForTensors(const c10::IValue& value, const F& f) {
    if (value.isTensor()) {
      f(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) f(t);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
        if (t.has_value()) f(*t);
      }
    }
  }

  // Returns the value with f(t) in place of each tensor; nullopt if it has
  // none.
  template <typename F>
  static std::optional<c10::IValue> MapTensors(const c10::IValue& value,
                                               const F& f) {
    if (value.isTensor()) return c10::IValue(f(value.toTensor()));
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(f(t));
      return c10::IValue(std::move(list));
    }
    if (!value.isOptionalTensorList()) return std::nullopt;
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
      list.push_back(t.has_value() ? std::optional<at::Tensor>(f(*t)) : t);
    }
    return c10::IValue(std::move(list));
  }

  bool ShapesDependOnValues() const {
    if (op_.hasTag(at::Tag::data_dependent_output)) return true;
    if (!op_.hasTag(at::Tag::dynamic_output_shape)) return false;
    if (name_ != "aten::index") return true;
    bool masked = false;
    ForTensors(arguments_[1], [&](const at::Tensor& t) {
      masked = masked || t.scalar_type() == at::kBool ||
               t.scalar_type() == at::kByte;
    });
    return masked;
  }

  // Returns the arguments for the CPU. `generator` is the CPU generator that
  // draws. CPU tensors are taken as they are now.
  Stack HostArguments(HostTensors* host, const at::Generator& generator) const {
    Stack made;
    const auto of = [&](const at::Tensor& t) {
      if (IsOfDevice(t)) return host->Of(t);
      const at::AutoDispatchBelowADInplaceOrView below;
      return t.defined() && Runtime::Get().has_workers() ? t.clone() : t;
    };
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const c10::IValue& value = arguments_[i];
      if (auto mapped = MapTensors(value, of)) {
        made.push_back(*std::move(mapped));
      } else if (value.isDevice()) {
        made.emplace_back(c10::Device(at::kCPU));
      } else if (IsGenerator(i)) {
        made.emplace_back(generator);
      } else {
        made.push_back(value);
      }
    }
    return made;
  }

  bool IsGenerator(size_t i) const {
    return arguments_[i].isGenerator() ||
           (draws_ && arguments_[i].isNone() &&
            op_.schema().arguments()[i].name() == "generator");
  }

  bool HasGenerator() const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (IsGenerator(i)) return true;
    }
    return false;
  }

  // Returns the CPU generator behind the one that was passed, or behind the
  // device's default one.
  at::Generator& HostGeneratorOfCall() const {
    for (const c10::IValue& value : arguments_) {
      if (value.isGenerator()) return HostGeneratorOf(value.toGenerator());
    }
    return HostGenerator(stream_.device_index());
  }

  static Stack CallOnCpu(const c10::OperatorHandle& op, Stack arguments) {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
    return arguments;
  }

  // Runs an operator that draws without a generator argument, from the CPU's
  // default one: that has the device's state meanwhile.
  Stack Draw(Stack arguments) const {
    if (!draws_ || HasGenerator()) return CallOnCpu(op_, std::move(arguments));
    static auto* const swapped = new std::mutex;
    const std::lock_guard<std::mutex> lock(*swapped);
    at::Generator of_cpu = at::detail::getDefaultCPUGenerator();
    at::Generator& own = HostGeneratorOfCall();
    const at::Tensor before = of_cpu.get_state();
    of_cpu.set_state(own.get_state());
    Stack results = CallOnCpu(op_, std::move(arguments));
    own.set_state(of_cpu.get_state());
    of_cpu.set_state(before);
    return results;
  }

  // Makes the device's tensors for `results`, and lists what must be copied
  // there.
  using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;  // to, from
  Stack Results(const HostTensors& host, const Stack& results, Copies* copies) {
    const auto of = [&](const at::Tensor& result) -> at::Tensor {
      if (!result.defined()) return result;
      const at::Tensor alias = host.Alias(result);
      if (alias.defined()) return alias;
      at::Tensor made = NewOnDevice(result);
      copies->emplace_back(made, result);
      return made;
    };
    Stack made;
    for (const c10::IValue& value : results) {
      made.push_back(MapTensors(value, of).value_or(value));
    }
    for (const auto& [of_device, grown] : host.Grown()) {
      of_device.resize_(grown.sizes());
      copies->emplace_back(of_device, grown);
    }
    return made;
  }

  void Launch(const Copies& copies, std::function<void()> work) {
    std::vector<Access> accesses = accesses_;
    for (size_t i = 0; i < copies.size(); ++i) {
      accesses.push_back(
          AccessTo(copies[i].first, true, -1 - static_cast<int>(i)));
    }
    const auto describe = [&](int argument) {
      if (argument < 0) {
        return absl::StrCat(
            "its result ",
            TextOf(copies[static_cast<size_t>(-1 - argument)].first));
      }
      const auto at = static_cast<size_t>(argument);
      std::string text =
          absl::StrCat("its argument ", op_.schema().arguments()[at].name());
      ForTensors(arguments_[at], [&](const at::Tensor& t) {
        absl::StrAppend(&text, " ", TextOf(t));
      });
      return text;
    };
    Runtime::Get().Launch(stream_, name_, accesses, describe, std::move(work));
  }

  // Converts Copies: the targets become host tensors.
  static Copies OverHost(const Copies& copies) {
    HostTensors host(HostTensors::Memory::kOver);
    Copies made;
    for (const auto& [to, from] : copies) made.emplace_back(host.Of(to), from);
    return made;
  }

  static void Copy(const at::Tensor& to, const at::Tensor& from) {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  }

  // Runs the kernel in the call, over memory whose writers are done.
  Stack RunAtOnce() {
    HostTensors host(HostTensors::Memory::kOver);
    const Stack raw = Draw(HostArguments(&host, HostGeneratorOfCall()));
    Copies copies;
    Stack results = Results(host, raw, &copies);
    if (views_ && !writes_ && copies.empty()) return results;
    const Copies on_host = OverHost(copies);
    Launch(copies, [on_host] {
      for (const auto& [to, from] : on_host) Copy(to, from);
    });
    return results;
  }

  // The kernel runs when the stream comes to it. Here it runs on zeros, to find
  // out what its results look like. Returns nullopt if that cannot be found in
  // this way.
  std::optional<Stack> RunLater() {
    if (draws_ && !HasGenerator()) return std::nullopt;
    const at::Generator before = HostGeneratorOfCall().clone();
    HostTensors zeros(HostTensors::Memory::kZeros);
    Stack trial;
    try {
      trial = CallOnCpu(op_, HostArguments(&zeros, HostGeneratorOfCall()));
    } catch (const c10::Error&) {
      HostGeneratorOfCall().set_state(before.get_state());
      return std::nullopt;
    }
    Copies shapes;
    Stack results = Results(zeros, trial, &shapes);
    HostTensors host(HostTensors::Memory::kOver);
    Stack arguments = HostArguments(&host, before);
    const Copies on_host = OverHost(shapes);
    Launch(shapes, [op = op_, arguments, on_host, trial] {
      Fill(on_host, trial, CallOnCpu(op, arguments));
    });
    return results;
  }

  // Fills in those results for which the trial had no argument, in order.
  static void Fill(const Copies& wanted, const Stack& trial,
                   const Stack& results) {
    std::vector<at::Tensor> of_trial, made;
    for (const c10::IValue& value : trial) {
      ForTensors(value, [&](const at::Tensor& t) { of_trial.push_back(t); });
    }
    for (const c10::IValue& value : results) {
      ForTensors(value, [&](const at::Tensor& t) { made.push_back(t); });
    }
    for (const auto& [to, from] : wanted) {
      for (size_t i = 0; i < of_trial.size(); ++i) {
        if (of_trial[i].is_same(from)) Copy(to, made[i]);
      }
    }
  }

  const c10::OperatorHandle op_;
  const std::string name_;
  const Stack arguments_;
  std::optional<c10::Device> device_;
  std::vector<Access> accesses_;
  bool writes_ = false, views_ = false, draws_ = false;
  c10::Stream stream_{c10::Stream::DEFAULT, TestDevice(0)};
};

void Fallback(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Stack arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  for (c10::IValue& result : Call(op, std::move(arguments)).Run()) {
    stack->push_back(std::move(result));
  }
}

// Returns whether the CPU's kernel must be used: operators have a kernel for
// all devices, which takes precedence over a fallback, and one for the CPU,
// which has other bits; and the convolutions' kernel for all devices looks for
// one that only some have.
bool TakesCpuKernel(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  using c10::DispatchKey;
  if (name.rfind("aten::", 0) != 0 ||
      op.hasKernelForDispatchKey(DispatchKey::PrivateUse1) ||
      !op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd)) {
    return false;
  }
  // Devices have kernels for lists of tensors, which count as one.
  return op.hasKernelForDispatchKey(DispatchKey::CPU) ||
         name == "aten::_foreach_copy_" || name == "aten::_foreach_zero_" ||
         name == "aten::convolution" || name == "aten::convolution_backward";
}

}  // namespace

void RegisterFallback() {
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "_",
                         c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>());
  static auto* const own =
      new torch::Library(torch::Library::IMPL, "aten",
                         c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op.has_value() || !op->hasSchema() || !TakesCpuKernel(*op)) continue;
    own->impl(c10::toString(name).substr(strlen("aten::")).c_str(),
              torch::CppFunction::makeFromBoxedFunction<&Fallback>());
  }
}

}  // namespace testdevice
