// SeedAll: ranks make the same model, and draw different numbers afterwards.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "config/config.h"
#include "engine/engine.h"
#include "engine/program/start.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

// The next number of the default generator, to the bit.
std::string Drawn() {
  return absl::StrFormat("%a", torch::rand({1}, at::kDouble).item<double>());
}

// Create compares the initial values of the ranks.
TESSERA_RANK_FUNCTION(SeedAndCreate) {
  std::string drawn;
  for (const uint64_t seed : {5, 50}) {
    SeedAll(seed, world);
    auto model = std::make_shared<torch::nn::LinearImpl>(4, 4);
    TESSERA_ASSIGN_OR_RETURN(
        const auto config,
        ConfigFromJson("{\"train_micro_batch_size_per_gpu\": 1, "
                       "\"optimizer\": {\"type\": \"AdamW\"}}",
                       world.world_size()));
    TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(model, config));
    absl::StrAppend(&drawn, Drawn(), " ");
    TESSERA_RETURN_IF_ERROR(engine->Close());
  }
  return drawn;
}

TEST(SeedsTest, RanksDrawTheirOwnNumbersAfterCreate) {
  const std::vector<std::string> drawn = RunOnRanks(3, "SeedAndCreate", "");
  ASSERT_EQ(drawn.size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    std::string expected;
    for (const uint64_t seed : {5, 50}) {
      torch::manual_seed(seed + 1 + rank);
      absl::StrAppend(&expected, Drawn(), " ");
    }
    EXPECT_EQ(drawn[rank], expected) << rank;
  }
}

}  // namespace
}  // namespace tessera
