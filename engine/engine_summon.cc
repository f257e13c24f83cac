// Engine::Summon: parameters whole in place, for a while.
#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "engine/engine_impl.h"
#include "engine/replicas.h"
#include "sharding/saved_tensors.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/nn/module.h"

namespace tessera {

using SummonState = Engine::SummonScope::State;

// What a scope holds, or has another rank hold.
struct Engine::SummonScope::State {
  Engine::Impl* impl;
  std::shared_ptr<const bool> alive;  // `impl` is
  SummonOptions options;
  bool holds = false;  // this rank does
  std::vector<at::Tensor> parameters;
  std::vector<std::shared_ptr<Unit>> units;  // not closed yet, in order
};

namespace {

constexpr char kWhere[] = "Engine::Summon";
constexpr char kClose[] = "SummonScope::Close";

}  // namespace

// By name, any of a tied parameter's.
absl::StatusOr<std::vector<at::Tensor>> Engine::Impl::Named(
    const std::vector<std::string>& names) const {
  const auto all = module_->named_parameters();
  std::vector<at::Tensor> parameters;
  for (const std::string& name : names) {
    const at::Tensor* const found = all.find(name);
    if (found == nullptr) {
      return absl::NotFoundError(
          absl::StrCat("the engine has no parameter '", name,
                       "' (names are those of named_parameters())"));
    }
    parameters.push_back(*found);
  }
  return parameters;
}

// Numbers of the units that these parameters are in, each once, in order.
absl::StatusOr<std::vector<size_t>> Engine::Impl::UnitsOf(
    const std::vector<at::Tensor>& parameters) const {
  absl::flat_hash_map<const void*, size_t> unit_of;
  for (size_t u = 0; u < units_.size(); ++u) {
    for (const auto& p : units_[u]->parameters()) {
      unit_of[p.tensor.unsafeGetTensorImpl()] = u;
    }
  }
  std::vector<size_t> units;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto found = unit_of.find(parameters[i].unsafeGetTensorImpl());
    if (found == unit_of.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", i,
          " is no parameter that this engine shards: expected "
          "the module's own tensors, not views or copies of them"));
    }
    if (summoned_.contains(units_[found->second].get())) {
      return absl::FailedPreconditionError(absl::StrCat(
          "[", units_[found->second]->name(),
          "] the unit is in another scope of Engine::Summon; Close() that one "
          "before"));
    }
    units.push_back(found->second);
  }
  std::sort(units.begin(), units.end());
  units.erase(std::unique(units.begin(), units.end()), units.end());
  return units;
}

absl::Status Engine::Impl::CheckNotSummoned() const {
  if (summoned_.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("[", (*summoned_.begin())->name(),
                   "] a scope of Engine::Summon is open; Close() it before"));
}

// What was written into a unit is taken. COLLECTIVE. On an error nothing is.
absl::Status Engine::Impl::UpdateUnit(Unit* unit, absl::string_view where) {
  TESSERA_RETURN_IF_ERROR(EnterUpdate(absl::OkStatus(), where, unit));
  ReleaseNodePins();
  schedule_->Border();
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(
      CatchTorch(where, [&] { return unit->PrepareUpdate(); }), where));
  // Not all ranks had it whole in the same way.
  unit->DropSecondary();
  return EndUpdate();
}

absl::StatusOr<std::unique_ptr<SummonState>> Engine::Impl::Summon(
    absl::StatusOr<std::vector<at::Tensor>> parameters,
    const SummonOptions& options) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  absl::StatusOr<std::vector<size_t>> units =
      parameters.ok() ? UnitsOf(*parameters) : parameters.status();
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(units.status(), kWhere));
  std::vector<std::string> names;
  for (const size_t u : *units) names.push_back(units_[u]->name());
  TESSERA_RETURN_IF_ERROR(CheckSame(
      absl::StrCat(absl::StrJoin(names, ", "), "; rank0_only ",
                   options.rank0_only, ", writeback ", options.writeback),
      "list of units, or the options, of Engine::Summon", comm_.get()));
  // What was written before is not taken back.
  for (const size_t u : *units) {
    TESSERA_RETURN_IF_ERROR(UpdateUnit(units_[u].get(), kWhere));
  }
  auto state = std::make_unique<SummonState>();
  *state = {this,
            alive_,
            options,
            !options.rank0_only || comm_->rank() == 0,
            *std::move(parameters),
            {}};
  absl::Status mine;
  for (const size_t u : *units) {
    Unit& unit = *units_[u];
    const absl::Status held = CatchTorch(kWhere, [&] {
      return state->holds ? unit.BeginSummon() : unit.SummonElsewhere(0);
    });
    mine.Update(held);
    if (held.ok()) {
      state->units.push_back(units_[u]);
      summoned_.insert(&unit);
    }
    schedule_->Border();  // frees it again where it is not held
  }
  const absl::Status agreed = comm_->AgreeOk(mine, kWhere);
  if (agreed.ok()) return state;
  DropSummoned(state.get());
  return agreed;
}

absl::Status Engine::Impl::CloseSummoned(SummonState* state) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  ReleaseNodePins();
  schedule_->Border();
  while (!state->units.empty()) {
    Unit* const unit = state->units.front().get();
    TESSERA_RETURN_IF_ERROR(
        CatchTorch(kClose, [&] { return CloseUnit(*state, unit); }));
    summoned_.erase(unit);
    state->units.erase(state->units.begin());
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::CloseUnit(const SummonState& state, Unit* unit) {
  const bool keeps = state.options.writeback;
  const bool receives = keeps && !state.holds;
  const absl::Status mine =
      state.holds ? unit->CheckSummonedOnly()
      : receives  ? CatchTorch(kClose, [&] { return unit->PrepareReceive(); })
                  : absl::OkStatus();
  const absl::Status agreed = comm_->AgreeOk(mine, kClose);
  if (!agreed.ok()) {
    if (receives && mine.ok()) unit->DropReceived();
    return agreed;
  }
  if (keeps && state.options.rank0_only) {
    const absl::Status sent = unit->BroadcastWritten(0);
    if (!sent.ok()) return FailUpdate(sent);
  }
  if (state.holds) {
    unit->EndSummon(keeps);
  } else {
    unit->EndSummonElsewhere();
  }
  if (!keeps) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(UpdateUnit(unit, kClose));
  for (const auto& p : unit->parameters()) {
    const bool given =
        std::any_of(state.parameters.begin(), state.parameters.end(),
                    [&](const at::Tensor& t) { return t.is_same(p.tensor); });
    if (given) torch::autograd::impl::bump_version(p.tensor);
  }
  return absl::OkStatus();
}

// The end of a scope without Close, also of one that outlived the engine.
void Engine::Impl::DropSummoned(SummonState* state) {
  for (const auto& unit : state->units) {
    const absl::Status dropped = CatchTorch(kWhere, [&] {
      if (state->holds) {
        unit->EndSummon(/*keep_writes=*/false);
      } else {
        unit->EndSummonElsewhere();
      }
    });
    if (!dropped.ok()) TESSERA_LOG(ERROR) << dropped.ToString();
    if (*state->alive) state->impl->summoned_.erase(unit.get());
  }
  state->units.clear();
}

Engine::SummonScope::SummonScope(std::unique_ptr<State> state)
    : state_(std::move(state)) {}
Engine::SummonScope::SummonScope(SummonScope&&) noexcept = default;
Engine::SummonScope& Engine::SummonScope::operator=(
    SummonScope&& other) noexcept {
  state_.swap(other.state_);
  return *this;
}

Engine::SummonScope::~SummonScope() {
  if (state_ == nullptr || state_->units.empty()) return;
  if (state_->options.writeback && state_->holds) {
    TESSERA_LOG(ERROR)
        << "[" << state_->units[0]->name()
        << "] a scope of Engine::Summon ended without Close(): what was "
           "written into its parameters is taken back";
  }
  Impl::DropSummoned(state_.get());
}

absl::Status Engine::SummonScope::Close() {
  if (state_ == nullptr || state_->units.empty()) return absl::OkStatus();
  if (!*state_->alive) {
    return absl::FailedPreconditionError(
        "SummonScope::Close: its engine was destroyed");
  }
  return state_->impl->CloseSummoned(state_.get());
}

absl::StatusOr<Engine::SummonScope> Engine::Summon(
    const std::vector<at::Tensor>& parameters, SummonOptions options) {
  TESSERA_ASSIGN_OR_RETURN(auto state, impl_->Summon(parameters, options));
  return SummonScope(std::move(state));
}

absl::StatusOr<Engine::SummonScope> Engine::SummonByName(
    const std::vector<std::string>& names, SummonOptions options) {
  TESSERA_ASSIGN_OR_RETURN(auto state,
                           impl_->Summon(impl_->Named(names), options));
  return SummonScope(std::move(state));
}

}  // namespace tessera
