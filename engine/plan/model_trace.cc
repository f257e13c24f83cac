#include "engine/plan/model_trace.h"

#include <optional>
#include <utility>

#include "ATen/autocast_mode.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "config/config.pb.h"
#include "engine/build/group_choice.h"
#include "engine/build/recompute_choice.h"
#include "engine/plan/replay/recomputation.h"
#include "sharding/flat/registry.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

absl::Status CheckNotOwned(const Partition& partition) {
  for (const UnitPlan& unit : partition.units) {
    for (const NamedParameter& p : unit.parameters) {
      if (!Registry::Global().Find(p.tensor)) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "Plan: parameter '", p.name,
          "' belongs to a tessera::Engine; plan before Engine::Create, or with "
          "a module of ConstructFake"));
    }
  }
  return absl::OkStatus();
}

// As Engine::AutocastScope, on the CPU.
class Autocast {
 public:
  explicit Autocast(std::optional<at::ScalarType> dtype)
      : on_(dtype.has_value()),
        was_enabled_(at::autocast::is_autocast_enabled(at::kCPU)),
        was_dtype_(at::autocast::get_autocast_dtype(at::kCPU)) {
    if (!on_) return;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, *dtype);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (!on_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, was_enabled_);
    at::autocast::set_autocast_dtype(at::kCPU, was_dtype_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const bool on_, was_enabled_;
  const at::ScalarType was_dtype_;
};

// Parameters that require no gradient until the end of the scope.
class Frozen {
 public:
  ~Frozen() {
    for (const at::Tensor& p : parameters_) p.requires_grad_(true);
  }
  void Add(const at::Tensor& p) {
    if (!p.requires_grad()) return;
    parameters_.push_back(p);
    p.requires_grad_(false);
  }

 private:
  std::vector<at::Tensor> parameters_;
};

absl::StatusOr<ParameterGroups> GroupsOf(const torch::nn::Module& module,
                                         const proto::Optimizer& optimizer,
                                         const Settings& settings,
                                         const PlanOptions& options,
                                         const Partition& partition,
                                         Frozen* frozen) {
  if (!settings.optimizer.has_value()) return ParameterGroups();
  TESSERA_ASSIGN_OR_RETURN(GroupChoice choice, CatchTorch("units", [&] {
                             return ChooseGroups(
                                 optimizer, options.param_groups,
                                 *settings.optimizer, settings.muon, module,
                                 partition.units);
                           }));
  for (const UnitPlan& unit : partition.units) {
    for (const NamedParameter& p : unit.parameters) {
      const int group = choice.groups.of[static_cast<size_t>(p.index)];
      if (choice.frozen[static_cast<size_t>(group)]) frozen->Add(p.tensor);
    }
  }
  return std::move(choice.groups);
}

int64_t BytesOfBuffers(const torch::nn::Module& module,
                       const Settings& settings) {
  int64_t bytes = 0;
  for (const at::Tensor& buffer : module.buffers()) {
    if (!buffer.defined()) continue;
    const bool converted = settings.buffer_dtype.has_value() &&
                           c10::isFloatingType(buffer.scalar_type());
    bytes += buffer.numel() *
             static_cast<int64_t>(c10::elementSize(
                 converted ? *settings.buffer_dtype : buffer.scalar_type()));
  }
  return bytes;
}

absl::StatusOr<std::vector<int>> RecomputedOf(const torch::nn::Module& module,
                                              const RecomputeChoice& choice,
                                              const ModelTrace& model) {
  TESSERA_ASSIGN_OR_RETURN(
      const RecomputedModules found,
      ChooseRecomputed(module, model.partition.units, choice));
  // By storage, as an engine knows them.
  absl::flat_hash_map<const c10::StorageImpl*, int> of_storage;
  const auto set = [&](const at::Tensor& p, int number) {
    of_storage[p.storage().unsafeGetStorageImpl()] = number;
  };
  for (const UnitPlan& unit : model.partition.units) {
    for (const NamedParameter& p : unit.parameters) {
      set(p.tensor, RecomputationOptions::kNone);
    }
  }
  for (size_t i = 0; i < found.modules.size(); ++i) {
    for (const at::Tensor& p : found.modules[i].parameters) {
      set(p, static_cast<int>(i));
    }
  }
  for (const at::Tensor& p : found.shared) {
    set(p, RecomputationOptions::kUnseen);
  }
  std::vector<int> recomputed;
  for (const TracedParameter& p : model.trace.parameters) {
    const auto it = of_storage.find(p.tensor->storage().unsafeGetStorageImpl());
    recomputed.push_back(it == of_storage.end() ? RecomputationOptions::kUnseen
                                                : it->second);
  }
  return recomputed;
}

}  // namespace

absl::StatusOr<ModelTrace> TraceModel(const torch::nn::Module& module,
                                      const std::function<at::Tensor()>& loss,
                                      const proto::Optimizer& optimizer,
                                      const Settings& settings,
                                      const PlanOptions& options) {
  ModelTrace model;
  TESSERA_ASSIGN_OR_RETURN(model.partition, CatchTorch("units", [&] {
                             return PlanUnits(module, settings.partition);
                           }));
  if (model.partition.units.empty()) {
    return absl::InvalidArgumentError(
        "Plan: the module has no parameters: register its layers with "
        "register_module in its constructor");
  }
  TESSERA_RETURN_IF_ERROR(CheckNotOwned(model.partition));
  Frozen frozen;
  TESSERA_ASSIGN_OR_RETURN(
      model.groups,
      GroupsOf(module, optimizer, settings, options, model.partition, &frozen));
  absl::flat_hash_map<const c10::TensorImpl*, at::ScalarType> dtypes;
  for (const UnitPlan& unit : model.partition.units) {
    for (const NamedParameter& p : unit.parameters) {
      dtypes[p.tensor.unsafeGetTensorImpl()] = WorkingDtype(settings, p);
      const auto index = static_cast<size_t>(p.index);
      if (model.trainable.size() <= index) model.trainable.resize(index + 1);
      model.trainable[index] = p.tensor.requires_grad();
    }
  }
  TraceOptions trace_options;
  trace_options.tracer = options.tracer;
  trace_options.tracer.cast_inputs = settings.cast_inputs;
  trace_options.dtype = [&](const at::Tensor& p) {
    const auto found = dtypes.find(p.unsafeGetTensorImpl());
    return found == dtypes.end() ? p.scalar_type() : found->second;
  };
  const auto under_autocast = [&] {
    const Autocast autocast(settings.autocast_dtype);
    return loss();
  };
  TESSERA_ASSIGN_OR_RETURN(model.trace,
                           TakeTrace(module, under_autocast, trace_options));
  model.recomputes = !settings.recomputed.units.empty() ||
                     settings.recomputed.is_recomputed != nullptr;
  TESSERA_ASSIGN_OR_RETURN(model.recomputed,
                           RecomputedOf(module, settings.recomputed, model));
  TESSERA_ASSIGN_OR_RETURN(model.automatic,
                           RecomputedOf(module, {{"auto"}, nullptr, 1}, model));
  model.buffer_bytes = BytesOfBuffers(module, settings);
  return model;
}

}  // namespace tessera
