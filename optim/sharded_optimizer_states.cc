// What a step finds and leaves: states of units, numbers of steps, and weights
// of averages.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "optim/custom/custom_optimizer.h"
#include "optim/sharded_optimizer.h"

namespace tessera {
namespace {

constexpr char kAverage[] = "ema";

}  // namespace

std::vector<std::string> ShardedOptimizer::StateNames(size_t u) const {
  std::vector<std::string> names = StateNamesOf(OptionsOf(u));
  if (OptionsOf(u).ema_decay > 0) names.push_back(kAverage);
  return names;
}

TieredBuffer* ShardedOptimizer::average(size_t u) {
  std::vector<TieredBuffer>& moments = states_[u].moments;
  return OptionsOf(u).ema_decay > 0 && !moments.empty() ? &moments.back()
                                                        : nullptr;
}

absl::Status ShardedOptimizer::EnsureState(size_t u) {
  FlatParameter& flat = *flats_[u];
  if (states_[u].made) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(flat.MakeMasters());
  const FlatParameterOptions& options = flat.options();
  const std::vector<std::string> names = StateNames(u);
  State made;  // all of it, or nothing
  made.made = true;
  for (const std::string& name : names) {
    const StateType type =
        name == kAverage ? StateType::kFloat32 : OptionsOf(u).states;
    TESSERA_ASSIGN_OR_RETURN(
        TieredBuffer state,
        TieredBuffer::Allocate(flat.owned().numel(),
                               StateFormatOf(type, flat.step_dtype()),
                               flat.device(), MemoryKind::kOptimizer,
                               options.PlaceOf(options.states),
                               absl::StrCat(name, " of unit ", flat.name())));
    made.moments.push_back(std::move(state));
  }
  TESSERA_ASSIGN_OR_RETURN(made.factored,
                           FactoredStates::Allocate(flat, FormulaOf(u)));
  if (flat.updated_on_host()) {
    TESSERA_RETURN_IF_ERROR(AllocateHostBuffers(flat, &made));
  }
  states_[u] = std::move(made);
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::AllocateHostBuffers(const FlatParameter& flat,
                                                   State* state) {
  const auto allocate = [&](at::ScalarType dtype, MemoryKind kind,
                            const char* what) {
    return TieredBuffer::Allocate(flat.owned().numel(), dtype, flat.device(),
                                  kind, {Tier::kHost, nullptr},
                                  absl::StrCat(what, " of unit ", flat.name()));
  };
  if (!flat.stage().sharded_gradients) {
    TESSERA_ASSIGN_OR_RETURN(
        state->gradient,
        allocate(flat.gradient_dtype(), MemoryKind::kGradients, "gradient"));
  }
  const bool masters_are_it = flat.dtype() == flat.master_dtype() &&
                              flat.options().states == Tier::kHost;
  if (!masters_are_it && flat.options().parameters == Tier::kMemory) {
    TESSERA_ASSIGN_OR_RETURN(
        state->working,
        allocate(flat.dtype(), MemoryKind::kOptimizer, "new values"));
  }
  return absl::OkStatus();
}

std::vector<uint8_t> ShardedOptimizer::has_state() const {
  std::vector<uint8_t> has;
  for (const State& state : states_) has.push_back(state.made);
  return has;
}

absl::Status ShardedOptimizer::MatchStates(
    const std::vector<uint8_t>& has_state) {
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (has_state[u] != 0) {
      TESSERA_RETURN_IF_ERROR(EnsureState(u));
    } else {
      states_[u] = State();
      flats_[u]->DropMasters();
    }
  }
  return absl::OkStatus();
}

void ShardedOptimizer::CountStep(const FlatParameter& flat,
                                 const FlatGradient& gradient) {
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    if (!gradient.has_gradient(i)) continue;
    counted_.push_back(static_cast<size_t>(flat.parameters()[i].index));
    ++steps_[counted_.back()];
    const auto group = static_cast<size_t>(groups_.of[counted_.back()]);
    const OptimizerOptions& options = groups_.options[group];
    if (options.algorithm == Algorithm::kScheduleFree &&
        weights_[group] == weights_before_[group]) {
      weights_[group] = weights_[group].After(options);
    }
  }
}

void ShardedOptimizer::Uncount() {
  for (const size_t i : counted_) --steps_[i];
  counted_.clear();
  weights_ = weights_before_;
}

void ShardedOptimizer::SetAverageWeights(std::vector<AverageWeights> weights) {
  weights_before_ = weights_ = std::move(weights);
}

// As if all groups were stepped: those that are not use none of it.
std::vector<OptimizerOptions> ShardedOptimizer::WithShares(
    std::vector<OptimizerOptions> options) const {
  for (size_t g = 0; g < options.size(); ++g) {
    if (options[g].algorithm != Algorithm::kScheduleFree) continue;
    options[g].average_share = weights_[g].ShareOf(options[g]);
  }
  return options;
}

}  // namespace tessera
