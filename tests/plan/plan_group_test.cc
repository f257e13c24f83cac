// Plans where engines and groups are there already: modules that an engine has,
// and the buffers of backends.
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "comm/backend_table.h"
#include "engine/construct_sharded.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/trace/counted_tensors_test_util.h"
#include "tests/plan/truth.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// A module can be planned before an engine has it, and after; one that was
// constructed in shards, too.
TESSERA_RANK_FUNCTION(PlanOfOwnedModules) {
  const TruthCase truth = TruthCase::FromText("Gpt stage=3 dtype=bf16");
  // Before the engine's own allocator, for the cases that follow in this
  // process: what that one lends is no tensor's memory.
  CountedTensors::Global();
  torch::manual_seed(1);
  PlanOptions options;
  options.world_size = world.world_size();
  const auto peak_of = [&](const TruthModel& model) -> absl::StatusOr<int64_t> {
    TESSERA_ASSIGN_OR_RETURN(
        const PlanReport report,
        Plan(*model.module, model.loss, truth.config(), options));
    return report.stages[3].peak.total();
  };
  TruthModel model;
  ConstructOptions construct_options;
  construct_options.communicator = world.communicator();
  TESSERA_RETURN_IF_ERROR(ConstructSharded(
                              /*budget_bytes=*/1 << 20,
                              [&] {
                                model = MakeTruthModel(truth.model);
                                return model.module;
                              },
                              construct_options)
                              .status());
  TESSERA_ASSIGN_OR_RETURN(const int64_t before, peak_of(model));
  EngineOptions engine_options;
  engine_options.communicator = world.communicator();
  TESSERA_ASSIGN_OR_RETURN(
      auto engine,
      Engine::Create(model.module, truth.config(), engine_options));
  const absl::Status owned = peak_of(model).status();
  TESSERA_RETURN_IF_ERROR(TrainSteps(model, truth, engine.get(), 1));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  TESSERA_ASSIGN_OR_RETURN(const int64_t after, peak_of(model));
  return absl::StrCat(before == after ? "same" : "differs", "; ",
                      owned.message());
}

TEST(PlanOwnedTest, ModulesOfEnginesAreRefused) {
  for (const auto& answer : RankPool::Get(2)->Run("PlanOfOwnedModules", "")) {
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(*answer,
              "same; Plan: parameter 'token.weight' belongs to a "
              "tessera::Engine; plan before Engine::Create, or with a module "
              "of ConstructFake");
  }
}

// Returns the memory that this rank has for itself: the head that it shows the
// others (shm), and staging that is counted (gloo).
TESSERA_RANK_FUNCTION(BytesOfTransport) {
  const TruthCase truth = TruthCase::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           TrainedEngine(truth, world.communicator()));
  int64_t bytes =
      MemoryLedger::Host().Report()[MemoryKind::kCommunication].peak_bytes;
  TESSERA_RETURN_IF_ERROR(engine->Close());
  std::ifstream maps("/proc/self/maps");
  std::string line;
  int64_t heads = 0;  // of all ranks
  while (std::getline(maps, line)) {
    int64_t begin = 0, end = 0;
    if (!absl::StrContains(line, "tessera-head")) continue;
    if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2) continue;
    heads += end - begin;
  }
  return absl::StrCat(bytes + heads / world.world_size());
}

TEST(PlanTransportTest, CommunicationBuffersAreWhatBackendsTake) {
  for (const std::string backend : {"shm", "gloo"}) {
    const std::string text =
        absl::StrCat("LargeWideGpt stage=2 world=2 backend=", backend);
    const auto report = PlanOf(TruthCase::FromText(text));
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->backend, backend);
    RankPoolOptions options;
    options.backend = backend;
    for (const auto& answer : RankPool(options).Run("BytesOfTransport", text)) {
      ASSERT_TRUE(answer.ok()) << answer.status();
      int64_t bytes = 0;
      ASSERT_TRUE(absl::SimpleAtoi(*answer, &bytes));
      EXPECT_GE(bytes, report->communication_bytes);
      // A page of a head is for words that ranks tell each other.
      EXPECT_LE(bytes, report->communication_bytes + 4096);
    }
  }
}

// The group is there and over several hosts, which no key of the configuration
// says.
TEST(PlanTransportTest, TheBackendOfAGroupThatIsThereIsPlannedFor) {
  proto::Config config = TruthCase::FromText("Mlp stage=2 world=4").config();
  const TruthModel model = MakeTruthModel("Mlp");
  PlanOptions options;
  options.world_size = 4;
  options.backend = "hierarchical";
  auto report = Plan(*model.module, model.loss, config, options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->backend, "hierarchical");
  EXPECT_EQ(report->communication_bytes,
            MemoryOfTransport("hierarchical", 4).bytes);
  EXPECT_THAT(report->ToString(),
              HasSubstr("communication buffers (hierarchical) take at most "));
  config.mutable_communication()->set_backend("nccl");  // goes before it
  report = Plan(*model.module, model.loss, config, options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->backend, "nccl");
  EXPECT_THAT(report->ToString(),
              HasSubstr("communication buffers (nccl, an estimate) take "));
}

}  // namespace
}  // namespace tessera
