#include "engine/construct_sharded.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "sharding/construct/construction.h"
#include "sharding/dispatch/tag.h"
#include "torch/nn/module.h"

namespace tessera::construct_internal {
namespace {

absl::Status Check(int64_t budget_bytes) {
  if (budget_bytes < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ConstructSharded: the budget is ", budget_bytes,
        " bytes; expected at least 1, of whole tensors at a time"));
  }
  if (Construction::Current() != nullptr) {
    return absl::FailedPreconditionError(
        "ConstructSharded within another; one for the whole module is enough");
  }
  return CheckTagFallback();
}

}  // namespace

absl::Status Run(int64_t budget_bytes, const ConstructOptions& options,
                 const std::function<const torch::nn::Module*()>& make) {
  std::shared_ptr<Communicator> comm = options.communicator;
  if (comm == nullptr && World::Current() != nullptr) {
    comm = World::Current()->communicator();
  }
  if (comm == nullptr) {
    return absl::FailedPreconditionError(
        "ConstructSharded: call tessera::Init first, or set "
        "ConstructOptions::communicator");
  }
  TESSERA_RETURN_IF_ERROR(
      comm->AgreeOk(Check(budget_bytes), "ConstructSharded"));
  auto construction = std::make_shared<Construction>(comm, budget_bytes);
  const torch::nn::Module* module = nullptr;
  absl::Status made = CatchTorch("ConstructSharded", [&] {
    std::optional<Construction::Scope> scope;
    // With one rank a shard is the whole.
    if (comm->world_size() > 1) scope.emplace(construction.get());
    module = make();
  });
  if (made.ok() && module == nullptr) {
    made = absl::InvalidArgumentError(
        "ConstructSharded: the function returned no module");
  }
  if (!made.ok()) comm->Announce(made);  // others may gather
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(made, "ConstructSharded"));
  const absl::Status finished = CatchTorch(
      "ConstructSharded", [&] { return construction->Finish(*module); });
  if (!finished.ok()) comm->Announce(finished);
  return comm->AgreeOk(finished, "ConstructSharded");
}

}  // namespace tessera::construct_internal
