// What is given back as an engine with offload closes.
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/status.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/shard_states.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/registry.h"
#include "tests/offload/wide_trainee.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

using ::testing::Each;

// Closes an engine whose gradients, of a Backward without a Step, lie on a
// disk, and returns what a flat that outlives it, as one in a graph of the
// user's does, has of them.
TESSERA_RANK_FUNCTION(CloseWithGradients) {
  TrainingSpec spec = OnDisk();
  spec.gradients_on_disk = true;
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeWide(spec, world.communicator()));
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 0, 1, &record));
  TESSERA_RETURN_IF_ERROR(t.Backward(1));
  const std::shared_ptr<FlatParameter> flat =
      Registry::Global().Find(t.parameter("blocks.0.up.weight")).flat;
  const TieredBuffer& gradient = flat->states().At(ShardStates::kGradient);
  if (!gradient.on_disk()) return absl::InternalError("it is not on the disk");
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return std::string(gradient.defined() ? "kept" : "dropped");
}

TEST(OffloadCloseTest, DropsStoredGradients) {
  EXPECT_THAT(RunOnRanks(2, "CloseWithGradients", ""), Each("dropped"));
}

}  // namespace
}  // namespace tessera
