// Tests what Engine::Create does with values that differ between ranks: it
// returns an error that names them, or takes rank 0's.
#include <torch/torch.h>

#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kParameter[] = "blocks.1.up.weight";

TrainingSpec SpecOf(absl::string_view stage) {
  TrainingSpec spec;
  TORCH_CHECK(absl::SimpleAtoi(stage, &spec.stage));
  return spec;
}

class CreateTest : public ::testing::TestWithParam<int> {
 protected:
  std::vector<std::string> Run(absl::string_view function,
                               absl::string_view more_args = "") {
    return RunOnRanks(2, function, absl::StrCat(GetParam(), more_args));
  }
};

TESSERA_RANK_FUNCTION(SyncFromRank0) {
  torch::manual_seed(50 + static_cast<uint64_t>(world.rank()));
  auto model = MakeTestModel("ConvNorm");
  for (at::Tensor& buffer : model->buffers()) buffer.add_(world.rank());
  Record own;
  for (const auto& p : model->named_parameters()) {
    own.push_back(
        absl::StrCat("parameter ", p.key(), " ", PrintOf(p.value().detach())));
  }
  EngineOptions options;
  options.sync_from_rank0 = true;
  TrainingSpec spec = SpecOf(args);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           Engine::Create(model, ConfigOf(spec), options));
  TESSERA_ASSIGN_OR_RETURN(Record synced, ParametersOf(*engine, *model));
  if (world.rank() == 0 && synced != own) {
    return absl::InternalError("rank 0's parameters changed");
  }
  if (world.rank() != 0 && synced == own) {
    return absl::InternalError("parameters were equal before");
  }
  for (const auto& buffer : model->named_buffers()) {
    synced.push_back(absl::StrCat(buffer.key(), " ", PrintOf(buffer.value())));
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return ToText(synced);
}

TEST_P(CreateTest, SyncFromRank0MakesParametersAndBuffersEqual) {
  const std::vector<std::string> answers = Run("SyncFromRank0");
  EXPECT_THAT(answers[0], HasSubstr("norm1.running_mean"));
  EXPECT_EQ(
      FirstDifference(RecordFromText(answers[0]), RecordFromText(answers[1])),
      "");
}

// args: stage, and what is different on rank 1.
TESSERA_RANK_FUNCTION(Different) {
  auto model = BuildModel("Mlp", world.rank());
  torch::NoGradGuard no_grad;
  if (world.rank() == 1 && args.substr(1) == "element") {
    model->named_parameters()[kParameter][3][2] += 1;
  }
  if (world.rank() == 1 && args.substr(1) == "number") {
    model->register_parameter("more", torch::zeros({2}));
  }
  if (world.rank() == 1 && args.substr(1) == "shape") {
    at::Tensor p = model->named_parameters()[kParameter];
    p.set_data(p.t().contiguous());
  }
  auto engine =
      MakeEngine(model, SpecOf(args.substr(0, 1)), world.communicator());
  // A refused module is left as it was.
  for (const at::Tensor& p : model->parameters()) {
    if (p.data_ptr() == nullptr) return absl::InternalError("taken over");
  }
  return engine.status().ToString();
}

// args: stage, and what is done about an ignored parameter that is another on
// rank 1: "", "may" differ, "sync".
TESSERA_RANK_FUNCTION(DifferentIgnored) {
  const absl::string_view what = args.substr(1);
  auto model = BuildModel("Mlp", world.rank());
  const at::Tensor ignored = model->named_parameters()[kParameter];
  {
    torch::NoGradGuard no_grad;
    ignored.fill_(world.rank());
  }
  EngineOptions options;
  options.buffers_may_differ = what == "may";
  options.sync_from_rank0 = what == "sync";
  proto::Config config = ConfigOf(SpecOf(args.substr(0, 1)));
  config.mutable_sharding()->add_ignored_parameters(kParameter);
  auto engine = Engine::Create(model, config, options);
  return absl::StrCat(ignored.sum().item<double>() / ignored.numel(), " ",
                      engine.status().ToString());
}

TEST_P(CreateTest, AnIgnoredParameterIsComparedAsBuffersAre) {
  EXPECT_THAT(Run("DifferentIgnored", ""),
              Each(HasSubstr("the values of ignored parameter "
                             "'blocks.1.up.weight' (number 0) differ between "
                             "rank 0 and rank 1")));
  EXPECT_THAT(Run("DifferentIgnored", "may"), ElementsAre("0 OK", "1 OK"));
  EXPECT_THAT(Run("DifferentIgnored", "sync"), Each("0 OK"));
}

// args: stage, and the module's dtype. Without fp16 or bf16.
TESSERA_RANK_FUNCTION(HalfModule) {
  auto model = BuildModel("Mlp", world.rank());
  if (args.substr(1) == "half") model->to(at::kHalf);
  TESSERA_ASSIGN_OR_RETURN(
      auto engine,
      MakeEngine(model, SpecOf(args.substr(0, 1)), world.communicator()));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return std::string();
}

TEST_P(CreateTest, AHalfModuleWithoutALossScaleIsSaid) {
  EXPECT_THAT(Run("HalfModule", "half"), Each(""));
  EXPECT_THAT(RankPool::Get(2)->stderr_of(0),
              AllOf(HasSubstr("more are float16, and fp16 is not enabled: the "
                              "loss is not scaled"),
                    HasSubstr("\"fp16\": {\"enabled\": true}")));
  EXPECT_EQ(RankPool::Get(2)->stderr_of(1), "");
  EXPECT_THAT(Run("HalfModule", "float"), Each(""));
  EXPECT_EQ(RankPool::Get(2)->stderr_of(0), "");
}

// args: stage, and whether buffers may differ.
TESSERA_RANK_FUNCTION(DifferentBuffers) {
  auto model = BuildModel("ConvNorm", world.rank());
  if (world.rank() == 1) {
    model->named_buffers()["norm1.running_var"].add_(1);
  }
  EngineOptions options;
  options.buffers_may_differ = args.substr(1) == "may";
  auto engine =
      Engine::Create(model, ConfigOf(SpecOf(args.substr(0, 1))), options);
  return engine.status().ToString();
}

TEST_P(CreateTest, BuffersThatDifferBetweenRanksAreRefusedByName) {
  EXPECT_THAT(Run("DifferentBuffers", ""),
              Each(AllOf(HasSubstr("INVALID_ARGUMENT"),
                         HasSubstr("values of buffer 'norm1.running_var'"),
                         HasSubstr("rank 1"))));
  EXPECT_THAT(Run("DifferentBuffers", "may"), Each("OK"));
}

TEST_P(CreateTest, ParametersThatDifferBetweenRanksAreRefusedByName) {
  EXPECT_THAT(Run("Different", "element"),
              Each(AllOf(HasSubstr("INVALID_ARGUMENT"),
                         HasSubstr("values of parameter 'blocks.1.up.weight'"),
                         HasSubstr("rank 1"))));
  EXPECT_THAT(Run("Different", "shape"),
              Each(AllOf(HasSubstr("INVALID_ARGUMENT"),
                         HasSubstr("shape or dtype of parameter "
                                   "'blocks.1.up.weight'"),
                         HasSubstr("rank 1"))));
  EXPECT_THAT(Run("Different", "number"),
              Each(AllOf(HasSubstr("INVALID_ARGUMENT"),
                         HasSubstr("25 parameters on rank 1 and 24 on rank "
                                   "0"))));
}

INSTANTIATE_TEST_SUITE_P(All, CreateTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

}  // namespace
}  // namespace tessera
