// Fifteen architectures of the field at stage 3: the oracle's bits, with each
// unit freed and poisoned after each use.
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "engine/construct_sharded.h"
#include "engine/engine.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;

class ZooTest : public ::testing::TestWithParam<std::string> {};

// Experts and Wandering differ from rank to rank, in which experts run and in
// how deep they go.
INSTANTIATE_TEST_SUITE_P(All, ZooTest,
                         ::testing::Values("Resnet", "Lstm", "Seq2Seq",
                                           "Experts", "Tied", "Unet", "Lora",
                                           "ConvNorm", "Wandering", "PackedGru",
                                           "Vit", "GraphNet", "Autoencoder",
                                           "Complex"),
                         [](const auto& info) { return info.param; });

TEST_P(ZooTest, EqualsTheOracle) {
  TrainingSpec spec;
  spec.model = GetParam();
  spec.stage = 3;
  spec.gradients = true;
  spec.poison = true;
  spec.max_live_parameters = 0;
  spec.served = "on";  // whatever the backend, ranks may differ
  ExpectEqualsOracle(spec, 2);
}

// The setting is a user's default: one working copy for a host over shm.
TEST_P(ZooTest, EqualsTheOracleByDefault) {
  TrainingSpec spec;
  spec.model = GetParam();
  spec.stage = 3;
  spec.accumulation = 2;
  ExpectEqualsOracle(spec, 2);
}

TEST_P(ZooTest, RecomputedEqualsTheOracle) {
  TrainingSpec spec;
  spec.model = GetParam();
  spec.stage = 3;
  spec.accumulation = 2;
  spec.recompute = "auto/full/never";
  ExpectEqualsOracle(spec, 2);
}

TEST_P(ZooTest, ConstructedShardedEqualsTheOracle) {
  TrainingSpec spec;
  spec.model = GetParam();
  spec.stage = 3;
  spec.accumulation = 2;
  spec.construct_budget = 2048;
  ExpectEqualsOracle(spec, 2);
}

// ---- the fifteenth: two networks against each other, an engine each

absl::StatusOr<nn::Sequential> Network(const TrainingSpec& spec, int64_t in,
                                       int64_t out) {
  const auto make = [&] {
    return nn::Sequential(nn::Linear(in, 17), nn::ReLU(), nn::Linear(17, 13),
                          nn::ReLU(), nn::Linear(13, out));
  };
  if (spec.construct_budget == 0) return make();
  return ConstructSharded(spec.construct_budget, make);
}

void SetTrainable(nn::Sequential* network, bool trainable) {
  for (Tensor& p : (*network)->parameters()) p.requires_grad_(trainable);
}

// args: a TrainingSpec. Three steps of each network; the parameters' lines.
TESSERA_RANK_FUNCTION(TrainGan) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  torch::manual_seed(TrainingSpec::kModelSeed);
  TESSERA_ASSIGN_OR_RETURN(nn::Sequential generator, Network(spec, 5, 7));
  TESSERA_ASSIGN_OR_RETURN(nn::Sequential critic, Network(spec, 7, 1));
  const auto comm = world.communicator();
  TESSERA_ASSIGN_OR_RETURN(auto of_generator,
                           MakeEngine(generator.ptr(), spec, comm));
  TESSERA_ASSIGN_OR_RETURN(auto of_critic,
                           MakeEngine(critic.ptr(), spec, comm));
  torch::manual_seed(TrainingSpec::kRankSeed +
                     static_cast<uint64_t>(world.rank()));
  std::string record;
  for (int step = 0; step < spec.steps; ++step) {
    const Tensor noise = torch::randn({6, 5});
    const Tensor fake = generator->forward(noise).detach();
    const Tensor loss = torch::softplus(-critic->forward(torch::randn({6, 7})))
                            .add(torch::softplus(critic->forward(fake)))
                            .mean();
    TESSERA_RETURN_IF_ERROR(of_critic->Backward(loss));
    TESSERA_RETURN_IF_ERROR(of_critic->Step());
    SetTrainable(&critic, false);
    const Tensor fooled =
        torch::softplus(-critic->forward(generator->forward(noise))).mean();
    TESSERA_RETURN_IF_ERROR(of_generator->Backward(fooled));
    TESSERA_RETURN_IF_ERROR(of_generator->Step());
    SetTrainable(&critic, true);
    absl::StrAppend(&record, LossLine(step, 0, loss.detach()), "\n",
                    LossLine(step, 1, fooled.detach()), "\n");
  }
  TESSERA_RETURN_IF_ERROR(of_generator->Close());
  TESSERA_RETURN_IF_ERROR(of_critic->Close());
  for (nn::Sequential* network : {&generator, &critic}) {
    for (const auto& p : (*network)->named_parameters()) {
      absl::StrAppend(&record, ParameterLine(p.key(), p.value()), "\n");
    }
  }
  return record;
}

TEST(ZooGanTest, TwoEnginesGiveTheSameBitsAtEveryStage) {
  std::vector<std::string> replicated;
  for (int i = 0; i <= 4; ++i) {
    const int stage = std::min(i, 3);
    TrainingSpec spec;
    spec.stage = stage;
    spec.construct_budget = i == 4 ? 512 : 0;
    const std::vector<std::string> records =
        RunOnRanks(2, "TrainGan", spec.ToText());
    if (stage == 0) replicated = records;
    EXPECT_EQ(records, replicated) << spec.ToText();
    // 3 steps of 2 losses, 12 parameters.
    EXPECT_EQ(std::count(records[0].begin(), records[0].end(), '\n'), 18)
        << records[0];
  }
}

}  // namespace
}  // namespace tessera
