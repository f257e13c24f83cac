#include "parallel/pipeline/staged_run.h"

#include <algorithm>
#include <utility>

#include "ATen/SequenceNumber.h"
#include "ATen/autocast_mode.h"
#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "base/above/above_autograd.h"
#include "base/check.h"
#include "base/crc32c.h"
#include "base/torch/aten_names.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "parallel/pipeline/program_print.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/dispatch/stack_tensors.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

constexpr unsigned kNoHook = ~0U;
constexpr int kEverywhere = -1;  // in place of a stage

thread_local StagedRun* t_current = nullptr;

// A tensor that a stage can be the only one to have.
bool IsStaged(const at::Tensor& t) {
  return t.has_storage() && t.layout() == at::kStrided && !t.is_meta();
}

// A number of the tensor's first values, up to 1 MiB; memory beside them may be
// anything.
uint64_t PrintOfValues(const at::Tensor& tensor) {
  constexpr size_t kMost = 1 << 20;
  const c10::impl::ExcludeDispatchKeyGuard unseen{
      c10::DispatchKeySet(kBelowKey)};
  const TorchScope scope;
  at::Tensor some = tensor.detach();
  while (some.nbytes() > kMost) {
    some = some.size(0) == 1 ? some.select(0, 0)
                             : some.narrow(0, 0, some.size(0) / 2);
  }
  some = some.resolve_conj().resolve_neg().contiguous();
  return Crc32c(absl::string_view(
      static_cast<const char*>(some.const_data_ptr()), some.nbytes()));
}

// Whether a backward runs that makes no graph of its own: what runs forward
// again within it (a checkpoint, what is recomputed) is a forward.
bool InBackward() {
  return !at::GradMode::is_enabled() && !ReplayMark::IsSet() &&
         torch::autograd::get_current_graph_task_id() != -1;
}

}  // namespace

StagedRun::StagedRun(int stage, int stages, bool one_way, bool casts_inputs,
                     const std::vector<StagedParameter>& parameters,
                     std::shared_ptr<StageLinks> links)
    : stage_(stage),
      stages_(stages),
      one_way_(one_way),
      casts_inputs_(casts_inputs),
      links_(std::move(links)) {
  TESSERA_CHECK(stages <= kMaxStages);
  for (const StagedParameter& p : parameters) {
    storages_.AddParameter(p.tensor.storage(), p.home, p.name);
    parameters_.push_back(p.tensor);
    AddHomeHook(p);
  }
}

StagedRun::~StagedRun() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (hooks_[i] != kNoHook) parameters_[i].remove_hook(hooks_[i]);
  }
}

// An operator may have parameters of two stages, and runs at the later one. A
// frozen parameter may be trained later.
void StagedRun::AddHomeHook(const StagedParameter& parameter) {
  const at::Tensor& p = parameter.tensor;
  const bool trained = p.requires_grad();
  if (!p.is_floating_point() && !p.is_complex()) {
    hooks_.push_back(kNoHook);
    return;
  }
  if (!trained) p.set_requires_grad(true);
  hooks_.push_back(
      p.register_hook([this, home = parameter.home,
                       name = parameter.name](const at::Tensor& gradient) {
        if (active_ && gradient.defined() && IsStaged(gradient)) {
          Bring(gradient, home, absl::StrCat("gradient of '", name, "'"));
        }
      }));
  if (!trained) p.set_requires_grad(false);
}

// Keys begin anew with each of them, so that ranks that differ in one do not in
// the next.
StagedRun::Scope::Scope(StagedRun* run, int micro_batch, bool backward,
                        std::string doing)
    : run_(run),
      below_(run),
      cached_casts_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_cache_enabled(false);
  t_current = run;
  if (run->casts_inputs_) above_.emplace(c10::DispatchKeySet(kAboveKey));
  run->active_ = true;
  run->backward_ = backward;
  run->doing_ = std::move(doing);
  run->program_ = 0;
  run->next_order_ = ((int64_t{micro_batch} * 2 + (backward ? 1 : 0)) << 32);
  run->next_key_ = (int64_t{micro_batch} * 2 + (backward ? 1 : 0)) << 32;
}

StagedRun* StagedRun::Current() { return t_current; }

bool StagedRun::IsElsewhere(const at::Tensor& tensor) const {
  if (!IsStaged(tensor)) return false;
  const StagedStorages::Entry* const entry = storages_.Find(StorageOf(tensor));
  return entry != nullptr && entry->home >= 0 && entry->home != stage_;
}

StagedRun::Scope::~Scope() {
  at::autocast::set_autocast_cache_enabled(cached_casts_);
  t_current = nullptr;
  run_->active_ = false;
  if (!run_->backward_) {
    run_->print_ +=
        PrintOfWords({static_cast<uint64_t>(run_->next_key_), run_->program_});
  }
}

const StagedRun::KnownOperator& StagedRun::InfoOf(
    const c10::OperatorHandle& op) {
  KnownOperator& entry = operators_[&op.schema()];
  if (entry.traced == nullptr) {
    entry.traced = std::make_unique<TracedOperator>(TracedOperator::Of(op));
    entry.print = PrintOf(entry.traced->name());
  }
  return entry;
}

std::optional<int> StagedRun::StageOf(const TracedOperator& info,
                                      const torch::jit::Stack& stack) const {
  if (InBackward()) {
    std::optional<int> stage = StageOfNode();
    if (!stage.has_value()) stage = CommonStage(info, stack);
    if (stage.has_value()) return stage;
  }
  int latest = -1;
  ForEachDefinedTensor(stack, info.arguments, [&](const at::Tensor& t, size_t) {
    const StagedStorages::Entry* const entry = storages_.Find(StorageOf(t));
    if (entry == nullptr) return;
    latest = std::max(latest,
                      entry->home >= 0 ? entry->home : entry->stages.highest());
  });
  return latest < 0 ? std::nullopt : std::optional<int>(latest);
}

std::optional<int> StagedRun::StageOfNode() const {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return std::nullopt;
  const auto found = nodes_.find(node->sequence_nr());
  if (found == nodes_.end() || found->second == kEverywhere) {
    return std::nullopt;
  }
  return found->second;
}

// Where nobody has to be sent anything: a parameter's gradients are added up at
// its home.
std::optional<int> StagedRun::CommonStage(
    const TracedOperator& info, const torch::jit::Stack& stack) const {
  StageSet common = StageSet::Everywhere();
  ForEachDefinedTensor(stack, info.arguments, [&](const at::Tensor& t, size_t) {
    common.KeepThoseOf(storages_.StagesOf(StorageOf(t)));
  });
  if (common.everywhere() || common.empty()) return std::nullopt;
  return common.lowest();
}

// The newest node is this operator's, or that of a function of the program's
// whose forward it is in, or was noted before.
void StagedRun::NoteNode(int stage) {
  if (InBackward() || ReplayMark::IsSet()) return;
  if (at::sequence_number::peek() == 0) return;
  nodes_.try_emplace(at::sequence_number::peek() - 1, stage);
}

// Values that all ranks have are the same there, or ranks read other samples,
// which no operator would tell.
void StagedRun::NoteInputs(const TracedOperator& info,
                           const torch::jit::Stack& stack) {
  ForEachDefinedTensor(
      stack, info.arguments, [&](const at::Tensor& t, size_t i) {
        if (!t.is_cpu() || storages_.Find(StorageOf(t)) != nullptr) return;
        if (info.info->MayWrite(stack, i)) return;  // not filled yet, perhaps
        program_ = (program_ + PrintOfValues(t)) * kPrintPrime;
      });
}

void StagedRun::CheckNoParameterWritten(const TracedOperator& info,
                                        const torch::jit::Stack& stack) const {
  ForEachDefinedTensor(
      stack, info.arguments, [&](const at::Tensor& t, size_t i) {
        if (!info.info->MayWrite(stack, i)) return;
        const StagedStorages::Entry* const entry = storages_.Find(StorageOf(t));
        if (entry == nullptr || entry->home < 0) return;
        // One of the program's own that does not say what it writes.
        if (info.info->writes_are_guessed() &&
            entry->home == StageOf(info, stack)) {
          return;
        }
        ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
            info.name(), " writes parameter '", entry->name,
            "' within a forward of a pipeline, and other micro-batches are "
            "under way with its values; write it after Engine::Step")));
      });
}

// What this rank computes again is its own: others know nothing of it.
void StagedRun::CheckHere(const at::Tensor& tensor,
                          const std::string& what) const {
  const StageSet stages = storages_.StagesOf(StorageOf(tensor));
  if (stages.has(stage_)) return;
  ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
      what, ", computed again in backward by stage ", stage_,
      ", needs values of stage ", stages.highest(),
      ": a region that is recomputed must be within one stage; set "
      "pipeline.split_points, or recompute smaller modules")));
}

void StagedRun::CheckValuesEverywhere(const TracedOperator& info,
                                      const torch::jit::Stack& stack) const {
  ForEachDefinedTensor(stack, info.arguments, [&](const at::Tensor& t, size_t) {
    const StagedStorages::Entry* const entry = storages_.Find(StorageOf(t));
    if (entry == nullptr) return;
    const std::string of =
        entry->home >= 0 ? absl::StrCat(" of parameter '", entry->name, "'")
                         : "";
    ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
        info.name(), " asks for values", of, " that are at stage ",
        entry->stages.highest(), " of ", stages_,
        " of a pipeline alone; what a forward does must not depend on "
        "weights or activations (no item(), nonzero() or masks of them), or "
        "the model must fit one stage")));
  });
}

void StagedRun::RunHere(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard unseen{c10::DispatchKeySet(kBelowKey)};
  op.redispatchBoxed(BelowBelow(keys), stack);
}

void StagedRun::RunBelow(const c10::OperatorHandle& op,
                         c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  using Kind = TracedOperator::Kind;
  if (TorchScope::IsSet()) {  // the engine's own work
    RunHere(op, keys, stack);
    return;
  }
  const KnownOperator& known = InfoOf(op);
  const TracedOperator& info = *known.traced;
  bool staged = true;
  ForEachDefinedTensor(
      *stack, info.arguments,
      [&](const at::Tensor& t, size_t) { staged = staged && IsStaged(t); });
  if (info.kind == Kind::kComposite || !staged) {
    op.redispatchBoxed(BelowBelow(keys), stack);
    return;
  }
  const std::optional<int> stage = StageOf(info, *stack);
  if (!stage.has_value()) {
    // A node of inputs that require a gradient is no later operator's.
    bool has_node = false;
    ForEachDefinedTensor(*stack, info.arguments,
                         [&](const at::Tensor& t, size_t) {
                           has_node = has_node || t.requires_grad();
                         });
    if (has_node && at::GradMode::is_enabled()) NoteNode(kEverywhere);
    RunHere(op, keys, stack);
    return;
  }
  NoteNode(*stage);
  switch (info.kind) {
    case Kind::kView:
      RunHere(op, keys, stack);
      return;
    case Kind::kValues:
      CheckValuesEverywhere(info, *stack);
      RunHere(op, keys, stack);
      return;
    case Kind::kEqual: {
      // Attention asks whether its queries are its keys.
      const at::Tensor other = torch::jit::pop(*stack).toTensor();
      const at::Tensor self = torch::jit::pop(*stack).toTensor();
      stack->emplace_back(StorageOf(self) == StorageOf(other) &&
                          self.storage_offset() == other.storage_offset() &&
                          self.sizes() == other.sizes() &&
                          self.strides() == other.strides());
      return;
    }
    default:
      // In backward gradients are added up in place or not, as references to
      // them are held.
      if (!backward_ && !ReplayMark::IsSet()) {
        program_ = (program_ + known.print) * kPrintPrime;
        NoteInputs(info, *stack);
        CheckNoParameterWritten(info, *stack);
      }
      CheckCanBeElsewhere(info);
      RunAt(*stage, op, info, keys, stack);
  }
}

// How many random numbers these draw depends on values.
void StagedRun::CheckCanBeElsewhere(const TracedOperator& info) const {
  static const auto* const drawn_by_value = new AtenNames(
      "poisson,binomial,_standard_gamma,_sample_dirichlet,multinomial");
  if (!drawn_by_value->Contains(info.name())) return;
  ThrowIfError(absl::UnimplementedError(absl::StrCat(
      info.name(),
      " of values that one stage of a pipeline has draws as many random "
      "numbers "
      "as these say, and other stages cannot draw the same; draw from inputs, "
      "or let the model fit one stage")));
}

// The arguments outlive the operator, which takes them off the stack.
void StagedRun::RunAt(int stage, const c10::OperatorHandle& op,
                      const TracedOperator& info, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
  const torch::jit::Stack arguments(
      stack->end() - static_cast<int64_t>(info.arguments), stack->end());
  ForEachDefinedTensor(arguments, info.arguments,
                       [&](const at::Tensor& t, size_t) {
                         if (!ReplayMark::IsSet()) {
                           Bring(t, stage, info.name());
                         } else if (stage == stage_) {
                           CheckHere(t, info.name());
                         }
                       });
  if (stage == stage_) {
    RunHere(op, keys, stack);
  } else {
    RunElsewhere(op, info, keys, stack);
  }
  constexpr int64_t kMostArguments = 64;
  const int64_t order = next_order_;
  if (!ReplayMark::IsSet()) next_order_ += kMostArguments;
  std::vector<const c10::StorageImpl*> given;
  ForEachDefinedTensor(
      arguments, info.arguments, [&](const at::Tensor& t, size_t i) {
        given.push_back(StorageOf(t));
        if (info.info->MayWrite(arguments, i)) {
          storages_.SetStage(StorageOf(t), stage, /*outside=*/true,
                             order + static_cast<int64_t>(i));
        }
      });
  ForEachDefinedTensor(*stack, info.returns, [&](const at::Tensor& t, size_t) {
    if (!IsStaged(t)) return;
    c10::StorageImpl* const storage = StorageOf(t);
    if (std::find(given.begin(), given.end(), storage) != given.end()) {
      return;
    }
    storages_.SetStage(storage, stage, /*outside=*/false, order);
    if (ReplayMark::IsSet()) storages_.SetOwn(storage);
  });
}

}  // namespace tessera
