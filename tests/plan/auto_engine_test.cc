// Engines that find out by a plan what their configuration leaves to "auto",
// and engines that go on from what another was trained with.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "examples/gpt/gpt.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int64_t kSeq = 32, kSamples = 4;  // of a rank in a step

std::shared_ptr<GptImpl> MakeGpt() {
  torch::manual_seed(3);
  return std::make_shared<GptImpl>(
      GptOptions().dim(64).layers(4).heads(4).seq(kSeq));
}

at::Tensor LossOf(GptImpl& gpt, int64_t samples) {
  const at::Tensor tokens =
      torch::arange(samples * kSeq).remainder(251).view({samples, kSeq});
  return gpt.loss(tokens, tokens);
}

proto::Config AutoConfigOf(int world_size, int64_t memory_bytes) {
  proto::Config config;
  config.set_train_batch_size(kSamples * world_size);
  config.set_auto_micro_batch(true);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_zero_optimization()->set_auto_stage(true);
  config.mutable_activation_checkpointing()->set_policy("auto");
  config.mutable_sharding()->set_memory_limit_bytes(memory_bytes);
  return config;
}

absl::StatusOr<std::unique_ptr<Engine>> CreateOn(
    const World& world, const std::shared_ptr<GptImpl>& gpt,
    const proto::Config& config, const std::string& resume_from = "",
    bool planned = true) {
  EngineOptions options;
  options.communicator = world.communicator();
  options.resume_from = resume_from;
  if (planned) {
    options.planned_loss = [gpt](int64_t samples) {
      return LossOf(*gpt, samples);
    };
  }
  return Engine::Create(gpt, config, options);
}

std::string WayOf(const Engine& engine) {
  const proto::Config& config = engine.config();
  const auto& recompute = config.activation_checkpointing();
  return absl::StrCat("stage ", engine.stage(), ", ",
                      config.train_micro_batch_size_per_gpu(), " x ",
                      config.gradient_accumulation_steps(), ", ",
                      recompute.units().empty() ? "kept" : recompute.policy());
}

absl::StatusOr<double> Train(GptImpl& gpt, Engine* engine, int steps) {
  double loss_value = 0;
  const proto::Config& config = engine->config();
  for (int i = 0; i < steps * config.gradient_accumulation_steps(); ++i) {
    const at::Tensor loss =
        LossOf(gpt, config.train_micro_batch_size_per_gpu());
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    loss_value = loss.item<double>();
  }
  return loss_value;
}

// `args` is "FOLDER BYTES [SAVE]". Returns the way of an engine that goes on
// from the folder, and the reason; with SAVE, it trains and saves there.
TESSERA_RANK_FUNCTION(WayAndReason) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  int64_t memory = 0;
  (void)absl::SimpleAtoi(words[1], &memory);
  const bool saves = words.size() > 2;
  const auto gpt = MakeGpt();
  TESSERA_ASSIGN_OR_RETURN(
      const auto engine,
      CreateOn(world, gpt, AutoConfigOf(world.world_size(), memory), words[0]));
  const std::string way = WayOf(*engine), reason = engine->auto_reason();
  if (saves) {
    TESSERA_RETURN_IF_ERROR(Train(*gpt, engine.get(), 2).status());
    TESSERA_RETURN_IF_ERROR(
        engine->SaveCheckpoint(absl::StrCat(words[0], "/step-00000002")));
  }
  if (engine->plan() == nullptr) return absl::InternalError("no plan");
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(way, "; ", reason);
}

// A checkpoint of one way goes on in another, and says which it was.
TESSERA_RANK_FUNCTION(StagesOfALoad) {
  const auto gpt = MakeGpt();
  proto::Config config = AutoConfigOf(world.world_size(), int64_t{1} << 32);
  config.mutable_zero_optimization()->set_stage(0);
  config.set_auto_micro_batch(false);
  config.mutable_activation_checkpointing()->clear_policy();
  TESSERA_ASSIGN_OR_RETURN(const auto engine,
                           CreateOn(world, gpt, config, "", /*planned=*/false));
  TESSERA_ASSIGN_OR_RETURN(
      const LoadCheckpointReport report,
      engine->LoadCheckpoint(absl::StrCat(args, "/step-00000002")));
  return absl::StrCat(engine->stage(), " ", report.stage, " of ",
                      report.world_size);
}

// The choices of "auto", written out in another configuration, give the same.
TESSERA_RANK_FUNCTION(LossesOfBoth) {
  int64_t memory = 0;
  (void)absl::SimpleAtoi(args, &memory);
  std::string losses;
  proto::Config config = AutoConfigOf(world.world_size(), memory);
  for (const bool planned : {true, false}) {
    const auto gpt = MakeGpt();
    TESSERA_ASSIGN_OR_RETURN(const auto engine,
                             CreateOn(world, gpt, config, "", planned));
    TESSERA_ASSIGN_OR_RETURN(const double loss, Train(*gpt, engine.get(), 3));
    absl::StrAppend(&losses, absl::StrFormat("%a ", loss), WayOf(*engine),
                    "\n");
    config = engine->config();
    TESSERA_RETURN_IF_ERROR(engine->Close());
  }
  return losses;
}

// `args` is "FOLDER BYTES". Returns what goes to a disk, the losses, and those
// without offload.
TESSERA_RANK_FUNCTION(LossesOffloaded) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  int64_t memory = 0;
  (void)absl::SimpleAtoi(words[1], &memory);
  proto::Config config = AutoConfigOf(world.world_size(), memory);
  config.set_auto_micro_batch(false);
  config.mutable_activation_checkpointing()->clear_policy();
  proto::ZeroOptimization* const zero = config.mutable_zero_optimization();
  zero->set_stage(3);
  zero->set_stage3_param_persistence_threshold(0);
  zero->mutable_offload_optimizer()->set_device("auto");
  zero->mutable_offload_optimizer()->set_nvme_path(words[0]);
  zero->mutable_offload_param()->set_device("auto");
  proto::OffloadTuning* const tuning =
      config.mutable_sharding()->mutable_offload();
  tuning->set_slice_numel(4096);
  tuning->set_min_state_bytes(0);
  zero->mutable_offload_optimizer()->set_buffer_count(1);
  std::string said;
  for (const bool offloads : {true, false}) {
    const auto gpt = MakeGpt();
    if (!offloads) {
      zero->clear_offload_optimizer();
      zero->clear_offload_param();
      config.mutable_sharding()->clear_memory_limit_bytes();
    }
    TESSERA_ASSIGN_OR_RETURN(const auto engine, CreateOn(world, gpt, config));
    TESSERA_ASSIGN_OR_RETURN(const double loss, Train(*gpt, engine.get(), 3));
    const auto& made = engine->config().zero_optimization();
    absl::StrAppend(&said, made.offload_optimizer().device(), "/",
                    made.offload_param().device(),
                    absl::StrFormat(" %a\n", loss));
    TESSERA_RETURN_IF_ERROR(engine->Close());
  }
  return said;
}

TESSERA_RANK_FUNCTION(WithoutPlannedLoss) {
  proto::Config config = AutoConfigOf(world.world_size(), 0);
  config.set_auto_micro_batch(args == "micro_batch");
  if (args != "policy") {
    config.mutable_activation_checkpointing()->set_policy("full");
  }
  return CreateOn(world, MakeGpt(), config, "", /*planned=*/false)
      .status()
      .ToString();
}

TESSERA_RANK_FUNCTION(OfOneRank) {
  return CreateOn(world, MakeGpt(), AutoConfigOf(world.world_size(), 0), "",
                  /*planned=*/world.rank() == 0)
      .status()
      .ToString();
}

TESSERA_RANK_FUNCTION(CannotBePlanned) {
  const auto gpt = MakeGpt();
  EngineOptions options;
  options.communicator = world.communicator();
  options.planned_loss = [gpt](int64_t samples) {
    const at::Tensor loss = LossOf(*gpt, samples);
    return loss.item<double>() > 0 ? loss : -loss;
  };
  proto::Config config = AutoConfigOf(world.world_size(), 0);
  if (args == "nothing left") {
    config.set_auto_micro_batch(false);
    config.mutable_zero_optimization()->set_stage(1);
    config.mutable_activation_checkpointing()->clear_policy();
  }
  const auto engine = Engine::Create(gpt, config, options);
  return engine.ok() && (*engine)->plan() == nullptr
             ? "OK, without a plan"
             : engine.status().ToString();
}

std::string OnAll(int world_size, const std::string& function,
                  const std::string& args) {
  std::string first;
  for (const auto& answer : RankPool::Get(world_size)->Run(function, args)) {
    EXPECT_TRUE(answer.ok()) << answer.status();
    if (!answer.ok()) return "";
    if (first.empty()) first = *answer;
    EXPECT_EQ(*answer, first);
  }
  return first;
}

constexpr int64_t kPlenty = int64_t{1} << 32;
// Below what stage 0 takes, that has some 4 MB of states.
constexpr int64_t kLittle = 4 << 20;
// Below what stage 3 takes without a disk.
constexpr int64_t kLeast = 3530 << 10;

TEST(AutoEngineTest, TrainsAsIfItHadBeenWritten) {
  for (const int64_t memory : {kPlenty, kLittle}) {
    const std::vector<std::string> both =
        absl::StrSplit(OnAll(2, "LossesOfBoth", absl::StrCat(memory)), '\n');
    ASSERT_EQ(both.size(), 3);
    EXPECT_EQ(both[0], both[1]);
  }
}

TEST(AutoEngineTest, ARunThatGoesOnKeepsToWhatItWas) {
  TempFolder folder;
  const std::string dir = folder.path();
  const auto way = [&](int world_size, int64_t memory, const char* save) {
    return OnAll(world_size, "WayAndReason",
                 absl::StrCat(dir, " ", memory, save));
  };
  // Nothing is there yet.
  const std::string saved = way(2, kLittle, " save");
  ASSERT_THAT(saved, StartsWith("stage "));
  EXPECT_THAT(saved, Not(HasSubstr("was trained")));
  EXPECT_THAT(saved, Not(StartsWith("stage 0")));
  // Memory alone would have it otherwise.
  EXPECT_THAT(way(2, kPlenty, ""),
              AllOf(StartsWith(saved.substr(0, saved.find(';'))),
                    HasSubstr(absl::StrCat("as the checkpoint in ", dir,
                                           " was trained"))));
  EXPECT_EQ(OnAll(2, "StagesOfALoad", dir),
            absl::StrCat("0 ", saved.substr(6, 1), " of 2"));
  EXPECT_THAT(way(1, kPlenty, ""),
              AllOf(StartsWith("stage 0"), Not(HasSubstr("was trained"))));
}

TEST(AutoEngineTest, WhatGoesToADiskHasTheSameBits) {
  const TempFolder folder;
  for (const auto& [memory, way] :
       {std::pair(kPlenty, "none/none"), std::pair(kLeast, "nvme/nvme")}) {
    const std::vector<std::string> both = absl::StrSplit(
        OnAll(2, "LossesOffloaded", absl::StrCat(folder.path(), " ", memory)),
        '\n');
    ASSERT_EQ(both.size(), 3);
    EXPECT_THAT(both[0], StartsWith(way));
    EXPECT_EQ(both[0].substr(both[0].find(' ')),
              both[1].substr(both[1].find(' ')));
  }
}

TEST(AutoEngineTest, WhatNeedsAPlanSaysSo) {
  EXPECT_THAT(OnAll(2, "WithoutPlannedLoss", "policy"),
              AllOf(HasSubstr("activation_checkpointing.policy"),
                    HasSubstr("EngineOptions::planned_loss")));
  EXPECT_THAT(OnAll(2, "WithoutPlannedLoss", "micro_batch"),
              AllOf(HasSubstr("train_micro_batch_size_per_gpu"),
                    HasSubstr("EngineOptions::planned_loss")));
  // The stage is found from model states.
  EXPECT_EQ(OnAll(2, "WithoutPlannedLoss", "stage"), "OK");
}

TEST(AutoEngineTest, RanksDecideInTheSameWay) {
  EXPECT_THAT(OnAll(2, "OfOneRank", ""),
              HasSubstr("the way to resolve auto differs between rank 0"));
}

TEST(AutoEngineTest, AModelThatCannotBePlanned) {
  EXPECT_THAT(OnAll(2, "CannotBePlanned", "auto"),
              AllOf(HasSubstr("FAILED_PRECONDITION"),
                    HasSubstr("aten::_local_scalar_dense"),
                    HasSubstr("asks for values")));
  EXPECT_EQ(OnAll(2, "CannotBePlanned", "nothing left"), "OK, without a plan");
}

}  // namespace
}  // namespace tessera
