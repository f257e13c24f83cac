#include "engine/engine_scopes.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/log.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "engine/engine_impl.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// How long a rank that failed waits for the others to say that they did too:
// shorter than kAnnounceGrace, after which they give up unless
// WorldOptions::announce_grace is another.
constexpr absl::Duration kAllFailedWait = absl::Seconds(4);

}  // namespace

// The modes of all modules, from the outside in: Module::train sets those of
// the modules below, too, so an outer one must not come after an inner one.
struct EvalScope::State {
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes;
  c10::NoGradGuard no_gradients;
};

EvalScope::EvalScope(Engine* engine)
    : engine_(engine), state_(std::make_unique<State>()) {
  torch::nn::Module& module = engine_->impl_->model().module();
  for (const auto& each : module.modules()) {
    state_->modes.emplace_back(each, each->is_training());
  }
  module.eval();
}

EvalScope::~EvalScope() {
  for (const auto& [module, training] : state_->modes) module->train(training);
}

// Where gathers are collectives, a rank that failed must not come to the
// agreement while others are inside a gather: theirs would be another
// collective under the same number. Only if all have failed are none.
absl::Status EvalScope::Agree(const absl::Status& mine) {
  constexpr char kWhere[] = "evaluation";
  const ShardedModel& model = engine_->impl_->model();
  Communicator* const comm = model.comm();
  const bool together =
      model.forwards_together() ||
      std::any_of(model.flats().begin(), model.flats().end(),
                  [](const auto& flat) { return flat->gathers_together(); });
  if (mine.ok() || !together) return comm->AgreeOk(mine, kWhere);
  comm->Announce(mine);
  if (!comm->AllAnnounced(kAllFailedWait)) return mine;
  const absl::Status agreed = comm->AgreeOk(mine, kWhere);
  comm->ClearAnnouncement();
  return agreed;
}

absl::StatusOr<AveragesScope> AveragesScope::Open(Engine* engine) {
  TESSERA_RETURN_IF_ERROR(engine->SwapInAverages());
  return AveragesScope(engine);
}

AveragesScope::AveragesScope(AveragesScope&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)) {}

AveragesScope::~AveragesScope() {
  const absl::Status closed = Close();
  if (!closed.ok()) {
    TESSERA_LOG(ERROR) << "the averages could not be swapped out: "
                       << closed.message();
  }
}

absl::Status AveragesScope::Close() {
  Engine* const engine = std::exchange(engine_, nullptr);
  return engine == nullptr ? absl::OkStatus() : engine->SwapOutAverages();
}

}  // namespace tessera
