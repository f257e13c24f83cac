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
#include "engine/setup/initial_sync.h"
#include "sharding/dispatch/saved_tensors.h"
#include "sharding/flat/summoning.h"
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
  std::vector<std::shared_ptr<FlatParameter>>
      flats;  // not closed yet, in order
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
  for (size_t u = 0; u < flats_.size(); ++u) {
    for (const auto& p : flats_[u]->parameters()) {
      unit_of[p.tensor.unsafeGetTensorImpl()] = u;
    }
  }
  std::vector<size_t> flats;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto found = unit_of.find(parameters[i].unsafeGetTensorImpl());
    if (found == unit_of.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", i,
          " is no parameter that this engine shards: expected "
          "the module's own tensors, not views or copies of them"));
    }
    if (summoned_.contains(flats_[found->second].get())) {
      return absl::FailedPreconditionError(absl::StrCat(
          "[", flats_[found->second]->name(),
          "] the unit is in another scope of Engine::Summon; Close() that one "
          "before"));
    }
    flats.push_back(found->second);
  }
  std::sort(flats.begin(), flats.end());
  flats.erase(std::unique(flats.begin(), flats.end()), flats.end());
  return flats;
}

absl::Status Engine::Impl::CheckNotSummoned() const {
  if (summoned_.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("[", (*summoned_.begin())->name(),
                   "] a scope of Engine::Summon is open; Close() it before"));
}

// What was written into a unit is taken. COLLECTIVE. On an error nothing is.
absl::Status Engine::Impl::UpdateUnit(FlatParameter* flat,
                                      absl::string_view where) {
  TESSERA_RETURN_IF_ERROR(EnterUpdate(absl::OkStatus(), where, flat));
  ReleaseNodePins();
  schedule_->EndPass();
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(
      CatchTorch(where, [&] { return flat->PrepareUpdate(); }), where));
  // Not all ranks had it whole in the same way.
  flat->DropSecondary();
  return EndUpdate();
}

absl::StatusOr<std::unique_ptr<SummonState>> Engine::Impl::Summon(
    absl::StatusOr<std::vector<at::Tensor>> parameters,
    const SummonOptions& options) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  absl::StatusOr<std::vector<size_t>> flats =
      parameters.ok() ? UnitsOf(*parameters) : parameters.status();
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(flats.status(), kWhere));
  std::vector<std::string> names;
  for (const size_t u : *flats) names.push_back(flats_[u]->name());
  TESSERA_RETURN_IF_ERROR(CheckSame(
      absl::StrCat(absl::StrJoin(names, ", "), "; rank0_only ",
                   options.rank0_only, ", writeback ", options.writeback),
      "list of units, or the options, of Engine::Summon", comm_.get()));
  // What was written before is not taken back.
  for (const size_t u : *flats) {
    TESSERA_RETURN_IF_ERROR(UpdateUnit(flats_[u].get(), kWhere));
  }
  auto state = std::make_unique<SummonState>();
  *state = {this,
            alive_,
            options,
            !options.rank0_only || comm_->rank() == 0,
            *std::move(parameters),
            {}};
  absl::Status mine;
  for (const size_t u : *flats) {
    FlatParameter& flat = *flats_[u];
    const absl::Status held = CatchTorch(kWhere, [&] {
      return state->holds ? Summoning(&flat).Begin()
                          : Summoning(&flat).BeginElsewhere(0);
    });
    mine.Update(held);
    if (held.ok()) {
      state->flats.push_back(flats_[u]);
      summoned_.insert(&flat);
    }
    schedule_->EndPass();  // frees it again where it is not held
  }
  const absl::Status agreed = comm_->AgreeOk(mine, kWhere);
  if (agreed.ok()) return state;
  DropSummoned(state.get());
  return agreed;
}

absl::Status Engine::Impl::CloseSummoned(SummonState* state) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  ReleaseNodePins();
  schedule_->EndPass();
  while (!state->flats.empty()) {
    FlatParameter* const flat = state->flats.front().get();
    TESSERA_RETURN_IF_ERROR(
        CatchTorch(kClose, [&] { return CloseUnit(*state, flat); }));
    summoned_.erase(flat);
    state->flats.erase(state->flats.begin());
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::CloseUnit(const SummonState& state,
                                     FlatParameter* flat) {
  Summoning summoning(flat);
  const bool keeps = state.options.writeback;
  const bool receives = keeps && !state.holds;
  const absl::Status mine =
      state.holds ? summoning.CheckAlone()
      : receives
          ? CatchTorch(kClose, [&] { return summoning.PrepareReceive(); })
          : absl::OkStatus();
  const absl::Status agreed = comm_->AgreeOk(mine, kClose);
  if (!agreed.ok()) {
    if (receives && mine.ok()) summoning.DropReceived();
    return agreed;
  }
  if (keeps && state.options.rank0_only) {
    const absl::Status sent = summoning.BroadcastWritten(0);
    if (!sent.ok()) return FailUpdate(sent);
  }
  if (state.holds) {
    summoning.End(keeps);
  } else {
    summoning.EndElsewhere();
  }
  if (!keeps) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(UpdateUnit(flat, kClose));
  for (const auto& p : flat->parameters()) {
    const bool given =
        std::any_of(state.parameters.begin(), state.parameters.end(),
                    [&](const at::Tensor& t) { return t.is_same(p.tensor); });
    if (given) torch::autograd::impl::bump_version(p.tensor);
  }
  return absl::OkStatus();
}

// The end of a scope without Close, also of one that outlived the engine.
void Engine::Impl::DropSummoned(SummonState* state) {
  for (const auto& flat : state->flats) {
    const absl::Status dropped = CatchTorch(kWhere, [&] {
      if (state->holds) {
        Summoning(flat.get()).End(/*keep_writes=*/false);
      } else {
        Summoning(flat.get()).EndElsewhere();
      }
    });
    if (!dropped.ok()) TESSERA_LOG(ERROR) << dropped.ToString();
    if (*state->alive) state->impl->summoned_.erase(flat.get());
  }
  state->flats.clear();
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
  if (state_ == nullptr || state_->flats.empty()) return;
  if (state_->options.writeback && state_->holds) {
    TESSERA_LOG(ERROR)
        << "[" << state_->flats[0]->name()
        << "] a scope of Engine::Summon ended without Close(): what was "
           "written into its parameters is taken back";
  }
  Impl::DropSummoned(state_.get());
}

absl::Status Engine::SummonScope::Close() {
  if (state_ == nullptr || state_->flats.empty()) return absl::OkStatus();
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
