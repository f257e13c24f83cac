#include "sharding/trace/trace.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/autocast_mode.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/storage_access.h"
#include "base/torch_guard.h"
#include "c10/core/StorageImpl.h"
#include "sharding/trace/construct_fake.h"
#include "sharding/trace/traced_memory.h"
#include "sharding/trace/tracer.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// What is computed really may draw random numbers; the user's are kept.
class KeepGenerator {
 public:
  KeepGenerator() : state_(Generator().get_state()) {}
  ~KeepGenerator() { Generator().set_state(state_); }

 private:
  static at::Generator Generator() {
    return at::detail::getDefaultCPUGenerator();
  }
  const at::Tensor state_;
};

// Autocast's cache has no real casts in the trace, and no fake ones after it.
class NoAutocastCasts {
 public:
  NoAutocastCasts() { at::autocast::clear_cache(); }
  ~NoAutocastCasts() { at::autocast::clear_cache(); }
  NoAutocastCasts(const NoAutocastCasts&) = delete;
  NoAutocastCasts& operator=(const NoAutocastCasts&) = delete;
};

// The module's gradients are out of the way, and come back.
class KeepGradients {
 public:
  explicit KeepGradients(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)) {
    for (const at::Tensor& p : parameters_) {
      gradients_.push_back(p.is_leaf() ? p.grad() : at::Tensor());
      if (p.is_leaf()) p.mutable_grad().reset();
    }
  }
  ~KeepGradients() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!parameters_[i].is_leaf()) continue;
      parameters_[i].mutable_grad() = std::move(gradients_[i]);
    }
  }

 private:
  const std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> gradients_;
};

// For its life the parameters have fake memory, of the dtype that is asked for:
// nothing of the user's can be changed, and what is sharded or in use by others
// is not asked for.
class FakeParameters {
 public:
  FakeParameters() = default;
  FakeParameters(const FakeParameters&) = delete;
  FakeParameters& operator=(const FakeParameters&) = delete;
  void Replace(const std::vector<at::Tensor>& parameters,
               const TraceOptions& options) {
    absl::flat_hash_map<const c10::StorageImpl*, c10::Storage> fakes;
    for (const at::Tensor& p : parameters) {
      const c10::Storage own = p.storage();
      const at::ScalarType dtype =
          options.dtype ? options.dtype(p) : p.scalar_type();
      c10::Storage& fake = fakes[own.unsafeGetStorageImpl()];
      if (!fake) {
        const auto numel = static_cast<int64_t>(own.nbytes() / p.itemsize());
        fake = TracedMemory::Fake(
            numel * static_cast<int64_t>(c10::elementSize(dtype)), nullptr);
      }
      replaced_.push_back({p, own, p.scalar_type()});
      Set(p, fake, dtype);
    }
  }
  ~FakeParameters() {
    for (auto each = replaced_.rbegin(); each != replaced_.rend(); ++each) {
      Set(each->parameter, each->storage, each->dtype);
    }
  }

 private:
  struct Replaced {
    at::Tensor parameter;
    c10::Storage storage;
    at::ScalarType dtype;
  };
  static void Set(const at::Tensor& p, const c10::Storage& storage,
                  at::ScalarType dtype) {
    SetStorage(p,
               c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
                   storage.unsafeGetStorageImpl()),
               dtype);
  }

  std::vector<Replaced> replaced_;
};

class NoteGradient final : public torch::autograd::PostAccumulateGradHook {
 public:
  NoteGradient(TraceLog* log, int32_t parameter)
      : log_(log), parameter_(parameter) {}
  void operator()(const at::Tensor& tensor) override {
    const at::Tensor& grad = tensor.grad();
    int32_t allocation = -1;
    if (grad.defined() && grad.has_storage()) {
      const TracedMemory* const memory =
          TracedMemory::Of(grad.storage().unsafeGetStorageImpl());
      if (memory != nullptr) allocation = memory->allocation();
    }
    log_->Gradient(parameter_, allocation);
  }

 private:
  TraceLog* const log_;
  const int32_t parameter_;
};

// For its life the log is told of the parameters' gradients, and the user's
// hooks, which may look at values or change parameters, are out of the way.
class GradientNotes {
 public:
  GradientNotes(const std::vector<at::Tensor>& parameters, TraceLog* log) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& p = parameters[i];
      if (!p.requires_grad() || !p.is_leaf()) continue;
      auto& hook = torch::autograd::impl::post_acc_grad_hooks(p);
      replaced_.emplace_back(p, std::move(hook));
      hook = std::make_unique<NoteGradient>(log, static_cast<int32_t>(i));
    }
  }
  ~GradientNotes() {
    for (auto& [p, hook] : replaced_) {
      torch::autograd::impl::set_post_acc_grad_hooks(p, std::move(hook));
    }
  }

 private:
  using Hook = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;
  std::vector<std::pair<at::Tensor, Hook>> replaced_;
};

std::string ModuleOf(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? parameter : parameter.substr(0, dot);
}

}  // namespace

TracePeak Trace::Peak() const {
  TracePeak peak;
  int64_t held = 0;
  for (size_t i = 0; i < events.size(); ++i) {
    const TraceEvent& e = events[i];
    if (e.kind == TraceEvent::Kind::kAllocate) held += e.bytes;
    if (e.kind == TraceEvent::Kind::kFree) held -= e.bytes;
    const int64_t now =
        held + (e.kind == TraceEvent::Kind::kOperator ? e.bytes : 0);
    if (now > peak.bytes) peak = {now, i};
  }
  return peak;
}

int64_t Trace::flops() const {
  int64_t sum = 0;
  for (const TraceEvent& e : events) sum += e.flops;
  return sum;
}

absl::StatusOr<Trace> TakeTrace(const torch::nn::Module& module,
                                const std::function<at::Tensor()>& loss,
                                const TraceOptions& options) {
  Trace trace;
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  absl::flat_hash_set<const c10::TensorImpl*> seen;  // tied ones come twice
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& p = item.value();
    if (!p.defined() || !p.has_storage()) continue;
    if (!seen.insert(p.unsafeGetTensorImpl()).second) continue;
    if (!p.is_cpu()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "trace: parameter '", item.key(), "' is on ", p.device().str(),
          ", expected the CPU; plan before the module is moved"));
    }
    parameters.push_back(p);
    names.push_back(item.key());
  }
  if (Tracer::Current() != nullptr) {
    return absl::FailedPreconditionError(
        "trace: within another trace, or within ConstructFake");
  }
  TESSERA_RETURN_IF_ERROR(CatchTorch("trace", [&] {
    const auto log = std::make_shared<TraceLog>();
    Tracer tracer(options.tracer, log);
    FakeParameters fakes;
    fakes.Replace(parameters, options);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& p = parameters[i];
      tracer.AddParameter(p, static_cast<int32_t>(i), ModuleOf(names[i]));
      trace.parameters.push_back({names[i], p.unsafeGetTensorImpl(),
                                  static_cast<int64_t>(p.nbytes()),
                                  p.requires_grad()});
    }
    const KeepGenerator generator;
    const NoAutocastCasts no_casts;
    const KeepGradients gradients(parameters);
    const GradientNotes notes(parameters, log.get());
    Tracer::Scope scope(&tracer);
    at::Tensor value = loss();
    TORCH_CHECK_VALUE(value.defined() && value.numel() == 1,
                      "the function gave no scalar to go back from");
    log->BeginBackward();
    value.backward();
    value.reset();
    TraceLog::Record record = log->Close();
    trace.events = std::move(record.events);
    trace.operators = std::move(record.operators);
    trace.allocations = std::move(record.allocations);
    trace.uses = std::move(record.uses);
  }));
  trace.backward = trace.events.size();
  for (size_t i = 0; i < trace.events.size(); ++i) {
    const TraceEvent& e = trace.events[i];
    if (e.backward) {
      trace.backward = i;
      break;
    }
    if (e.kind == TraceEvent::Kind::kAllocate) trace.saved_bytes += e.bytes;
    if (e.kind == TraceEvent::Kind::kFree) trace.saved_bytes -= e.bytes;
  }
  return trace;
}

namespace trace_internal {

void RunFake(const std::function<void()>& construct) {
  Tracer tracer(TracerOptions(), nullptr);
  const KeepGenerator generator;
  Tracer::Scope scope(&tracer);
  construct();
}

}  // namespace trace_internal
}  // namespace tessera
