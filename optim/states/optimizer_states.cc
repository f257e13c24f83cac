#include "optim/states/optimizer_states.h"

#include <utility>

#include "base/status.h"
#include "base/torch_guard.h"
#include "optim/custom/custom_optimizer.h"
#include "optim/kernels/block8.h"

namespace tessera {
namespace {

constexpr char kAverage[] = "ema";

// What states are kept in where a step computes in this dtype.
ElementFormat StateFormatOf(StateType type, at::ScalarType masters) {
  if (masters != at::kFloat || type == StateType::kFloat32) return masters;
  return type == StateType::kBFloat16
             ? ElementFormat(at::kBFloat16)
             : ElementFormat::Blocks(kBlock8Elements, kBlock8Bytes);
}

}  // namespace

OptimizerStates::~OptimizerStates() {
  for (size_t u = 0; u < units_.size(); ++u) {
    Drop(u);
    flats_[u]->states().Drop(ShardStates::kTrainingPoint);
  }
}

const OptimizerOptions& OptimizerStates::OptionsOf(size_t u) const {
  const auto first = static_cast<size_t>(flats_[u]->parameters()[0].index);
  return groups_.options[static_cast<size_t>(groups_.of[first])];
}

std::vector<std::string> OptimizerStates::Names(size_t u) const {
  std::vector<std::string> names = StateNamesOf(OptionsOf(u));
  if (OptionsOf(u).ema_decay > 0) names.push_back(kAverage);
  return names;
}

bool OptimizerStates::IsNonNegative(size_t u, size_t moment) const {
  const StepStates states = StatesOf(FormulaOf(u));
  return moment < static_cast<size_t>(states.count) &&
         states.states[moment].non_negative;
}

TieredBuffer* OptimizerStates::average(size_t u) const {
  return OptionsOf(u).ema_decay > 0 && !moments(u).empty() ? &moments(u).back()
                                                           : nullptr;
}

absl::Status OptimizerStates::Make(size_t u) {
  if (units_[u].made) return absl::OkStatus();
  const absl::Status made =
      CatchTorch("optimizer states", [&] { return Allocate(u); });
  if (!made.ok()) Drop(u);
  units_[u].made = made.ok();
  return made;
}

absl::Status OptimizerStates::Allocate(size_t u) {
  FlatParameter& flat = *flats_[u];
  const TieredBuffer::Place place =
      flat.options().PlaceOf(flat.options().states_tier);
  if (flat.separate_masters() && !flat.states().has(ShardStates::kMasters)) {
    TESSERA_RETURN_IF_ERROR(
        flat.states().MakeMasters(flat.kept_master_dtype(), place));
  }
  std::vector<ShardStates::Moment> moments;
  for (const std::string& name : Names(u)) {
    const StateType type =
        name == kAverage ? StateType::kFloat32 : OptionsOf(u).states;
    moments.push_back({name, StateFormatOf(type, flat.step_dtype())});
  }
  TESSERA_RETURN_IF_ERROR(flat.states().AddMoments(moments, place));
  TESSERA_ASSIGN_OR_RETURN(units_[u].factored,
                           FactoredStates::Allocate(flat, FormulaOf(u)));
  return flat.updated_on_host() ? AllocateHostBuffers(u) : absl::OkStatus();
}

// Where the processor updates these for a device: the gradient if it is not
// sharded, and what is on its way to the working copy.
absl::Status OptimizerStates::AllocateHostBuffers(size_t u) {
  const FlatParameter& flat = *flats_[u];
  const TieredBuffer::Place host = {Tier::kHost, nullptr};
  if (!flat.stage().sharded_gradients) {
    TESSERA_RETURN_IF_ERROR(flat.states().Add(
        ShardStates::kGradient, flat.kept_gradient_dtype(), host));
  }
  const bool masters_are_it = flat.dtype() == flat.master_dtype() &&
                              flat.options().states_tier == Tier::kHost;
  if (masters_are_it || flat.options().parameters_tier != Tier::kMemory) {
    return absl::OkStatus();
  }
  return flat.states().Add(ShardStates::kNewValues, flat.dtype(), host);
}

void OptimizerStates::Drop(size_t u) {
  const FlatParameter& flat = *flats_[u];
  flat.states().DropNext();
  flat.states().DropMoments();
  flat.states().Drop(ShardStates::kNewValues);
  if (!flat.stage().sharded_gradients) {
    flat.states().Drop(ShardStates::kGradient);
  }
  units_[u] = Unit();
}

std::vector<uint8_t> OptimizerStates::has() const {
  std::vector<uint8_t> has;
  for (const Unit& unit : units_) has.push_back(unit.made);
  return has;
}

absl::Status OptimizerStates::Match(const std::vector<uint8_t>& has) {
  for (size_t u = 0; u < flats_.size(); ++u) {
    if (has[u] != 0) {
      TESSERA_RETURN_IF_ERROR(Make(u));
      continue;
    }
    Drop(u);
    if (!flats_[u]->trainable()) {
      flats_[u]->states().Drop(ShardStates::kMasters);
    }
  }
  return absl::OkStatus();
}

int64_t OptimizerStates::resident_bytes() const {
  int64_t bytes = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    const ShardStates& states = flats_[u]->states();
    bytes += units_[u].factored.bytes();
    bytes += states.At(ShardStates::kTrainingPoint).resident_bytes();
    for (const TieredBuffer& moment : states.moments()) {
      bytes += moment.resident_bytes();
    }
  }
  return bytes;
}

}  // namespace tessera
