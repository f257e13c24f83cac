// Shard groups and their replicas: four ranks, groups {0, 1} and {2, 3}. What
// they hold, that replicas never part without a word, and how all ranks end
// when one of another group fails. Checkpoints:
// shard_groups_checkpoint_test.cc.
#include <signal.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/layout/layout.h"
#include "base/status.h"
#include "comm/fake_communicator_test_util.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/equivalence/shard_groups_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr char kParameter[] = "blocks.1.up.weight";

RankPoolOptions ImpatientRanks() {
  RankPoolOptions options;
  options.world_size = kWorldSize;
  options.announce_grace = absl::Milliseconds(300);
  return options;
}

// Runs on ranks of their own.
std::vector<std::string> RunAndEnd(
    absl::string_view function, absl::string_view args,
    const RankPoolOptions& options = ImpatientRanks()) {
  RankPool pool(options);
  std::vector<std::string> texts;
  for (const auto& answer : pool.Run(function, args)) {
    texts.push_back(answer.ok() ? *answer : answer.status().ToString());
  }
  return texts;
}

INSTANTIATE_TEST_SUITE_P(All, ShardGroupsTest, ::testing::Values(1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

// ---- what they hold

TESSERA_RANK_FUNCTION(Bytes) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  const StateBytes bytes = t.engine->state_bytes();
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(bytes.parameters, " ", bytes.gradients, " ",
                      bytes.optimizer);
}

// Each rank holds as much as without replicas on as many ranks as a group has.
TEST_P(ShardGroupsTest, HoldWhatAGroupShards) {
  spec_.model = "Gpt";
  const std::vector<std::string> in_groups =
      RunOnRanks(kWorldSize, "Bytes", spec_.ToText());
  spec_.shard_group = 0;
  const std::vector<std::string> of_two =
      RunOnRanks(2, "Bytes", spec_.ToText());
  EXPECT_THAT(in_groups, Each(of_two[0]));
  EXPECT_THAT(RunOnRanks(kWorldSize, "Bytes", spec_.ToText()),
              Each(::testing::Ne(of_two[0])));
}

// Ranks 0 and 1 are on one host, 2 and 3 are not.
TEST(ShardGroups, AllShareWorkingCopiesOrNone) {
  RankPoolOptions options = ImpatientRanks();
  options.backend = "hierarchical";
  options.hosts = {0, 0, 1, 2};
  TrainingSpec spec;
  spec.stage = 3;
  spec.shard_group = 2;
  EXPECT_THAT(RunAndEnd("Bytes", spec.ToText(), options),
              Each(::testing::MatchesRegex("[0-9]+ [0-9]+ [0-9]+")));
  spec.shared = "on";
  EXPECT_THAT(RunAndEnd("Bytes", spec.ToText(), options),
              Each(AllOf(HasSubstr("sharding.shared_working_copy"),
                         HasSubstr("rank 2"))));
}

// args: bytes that a rank may use.
TESSERA_RANK_FUNCTION(AutoStage) {
  TrainingSpec spec;
  spec.model = "Gpt";
  spec.shard_group = 2;
  proto::Config config = ConfigOf(spec);
  config.mutable_zero_optimization()->set_auto_stage(true);
  config.mutable_sharding()->set_memory_limit_bytes(
      std::stoll(std::string(args)));
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  const std::string text =
      absl::StrCat(t.engine->stage(), " ", t.engine->auto_reason());
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return text;
}

// Enough for a rank of two at stage 1, and somewhat less than it needs: of four
// it would suffice. Each parameter begins at a multiple of 64 elements, and
// each shard.
TEST(ShardGroups, AutoStageCountsTheRanksOfAGroup) {
  int64_t numel = 0, parameters = 0;
  for (const auto& p : BuildModel("Gpt", 0)->parameters()) {
    numel += AlignUp(p.numel());
    ++parameters;
  }
  const int64_t half = 8 * numel + 8 * numel / 2;
  const int64_t ends = 12 * kAlignElements * parameters;
  ASSERT_LT(ends, 4 * numel);  // what stage 0 needs more
  EXPECT_THAT(
      RunOnRanks(kWorldSize, "AutoStage", absl::StrCat(half + ends)),
      Each(AllOf(::testing::StartsWith("1 "), HasSubstr("on each of 2 ranks"),
                 HasSubstr("; shard groups of 2 of 4 ranks"))));
  EXPECT_THAT(RunOnRanks(kWorldSize, "AutoStage", absl::StrCat(half - 1000)),
              Each(::testing::Not(::testing::StartsWith("1 "))));
}

// ---- replicas do not part

// Ranks of `writers` ("01") write; then Step, SaveCheckpoint and FullStateDict
// refuse, until SetMaster has made the replicas equal. Before that, a write of
// all ranks. args: "<writers> <folder> <spec>".
TESSERA_RANK_FUNCTION(WriteOnSome) {
  const std::vector<std::string> parts =
      absl::StrSplit(args, absl::MaxSplits(' ', 2));
  const TrainingSpec spec = TrainingSpec::FromText(parts[2]);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  const auto write = [&](double value) {
    torch::NoGradGuard no_grad;
    t.parameter(kParameter).fill_(value);
  };
  write(0.25);
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  if (parts[0].find(absl::StrCat(t.rank)) != std::string::npos) write(0.5);
  TESSERA_RETURN_IF_ERROR(t.Backward(1));
  const absl::Status step = t.engine->Step();
  TESSERA_RETURN_IF_ERROR(
      ExpectCode(absl::StatusCode::kFailedPrecondition, t.engine->Step()));
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  TESSERA_RETURN_IF_ERROR(ExpectCode(absl::StatusCode::kFailedPrecondition,
                                     t.engine->SaveCheckpoint(parts[1])));
  TESSERA_RETURN_IF_ERROR(ExpectCode(absl::StatusCode::kFailedPrecondition,
                                     t.engine->FullStateDict({}).status()));
  TESSERA_RETURN_IF_ERROR(t.engine->SetMaster(
      kParameter, torch::full(t.parameter(kParameter).sizes(), 0.75)));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(2));
  TESSERA_ASSIGN_OR_RETURN(const std::string record, t.Finish());
  return absl::StrCat(step.ToString(), "\n", record);
}

TEST_P(ShardGroupsTest, AWriteOfOneGroupAloneIsNamedAtStep) {
  for (const char* dtype : {"fp32", "bf16"}) {
    spec_.dtype = dtype;
    // Whole groups; and one rank, of which others take the whole unit, or not.
    for (const char* writers : {"01", "23", "2"}) {
      std::vector<std::string> answers =
          RunOnRanks(kWorldSize, "WriteOnSome",
                     absl::StrCat(writers, " ", ::testing::TempDir(), "/drift ",
                                  spec_.ToText()));
      const std::vector<std::string> steps = TakeFirstLines(&answers);
      EXPECT_THAT(
          steps, Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                            HasSubstr("what was written into parameters"),
                            HasSubstr("blocks"), HasSubstr("rank 0 and rank 2"),
                            HasSubstr("Engine::SetMaster"))))
          << writers << " " << dtype;
      EXPECT_THAT(answers, Each(answers[0])) << writers;
    }
  }
}

// args: "0 " or "1 " for rank0_only, and the spec.
TESSERA_RANK_FUNCTION(WriteSummoned) {
  const TrainingSpec spec = TrainingSpec::FromText(args.substr(2));
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  SummonOptions options;
  options.rank0_only = args[0] == '1';
  TESSERA_ASSIGN_OR_RETURN(auto scope,
                           t.engine->SummonByName({kParameter}, options));
  if (t.rank == 0 || !options.rank0_only) {
    torch::NoGradGuard no_grad;
    t.parameter(kParameter).fill_(0.5);
  }
  TESSERA_RETURN_IF_ERROR(scope.Close());
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  return t.Finish();
}

TEST_P(ShardGroupsTest, WhatRank0WritesSummonedReachesAllGroups) {
  for (const char* shared : {"auto", "off"}) {
    spec_.shared = shared;
    const std::vector<std::string> by_all =
        RunOnRanks(kWorldSize, "WriteSummoned", "0 " + spec_.ToText());
    EXPECT_THAT(by_all, Each(HasSubstr(kParameter)));
    EXPECT_THAT(RunOnRanks(kWorldSize, "WriteSummoned", "1 " + spec_.ToText()),
                Each(by_all[0]));
  }
}

// An all-reduce over replicas that gives rank 3 other bits.
class Damaged : public FakeCommunicator {
 public:
  Damaged(std::shared_ptr<Communicator> inner, bool reduces)
      : FakeCommunicator(std::move(inner)), reduces_(reduces) {}
  absl::StatusOr<std::shared_ptr<Communicator>> Split(int color,
                                                      CommTag name) override {
    const bool damaged = name.what == "replicas" && rank() == 3;
    TESSERA_ASSIGN_OR_RETURN(auto part, FakeCommunicator::Split(color, name));
    return std::make_shared<Damaged>(std::move(part), damaged);
  }
  CommFuture Start(CommCall call, CommTag tag) override {
    const bool damaged = reduces_ && call.op == CollectiveOp::kAllReduce;
    const at::Tensor sum = call.out;
    CommFuture done = FakeCommunicator::Start(std::move(call), std::move(tag));
    if (damaged && done.Wait().ok()) sum.add_(1);
    return done;
  }

 private:
  const bool reduces_;
};

TESSERA_RANK_FUNCTION(DamagedReduction) {
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(args),
                    std::make_shared<Damaged>(world.communicator(), false)));
  TESSERA_RETURN_IF_ERROR(t.Backward(0));
  return t.engine->Step().ToString();
}

TEST_P(ShardGroupsTest, GradientsThatDifferAreNamedWhereANormIsTaken) {
  spec_.clipping = 1;
  EXPECT_THAT(
      RunAndEnd("DamagedReduction", spec_.ToText()),
      Each(AllOf(HasSubstr("INTERNAL"),
                 HasSubstr("gradients of ranks 2 to 3 are not those of ranks 0 "
                           "to 1"),
                 HasSubstr("sharding.shard_group_size 2"))));
}

// ---- a rank of the other group fails

// args: "killed " or "failed ", and the spec.
TESSERA_RANK_FUNCTION(Rank3Ends) {
  const std::vector<std::string> parts =
      absl::StrSplit(args, absl::MaxSplits(' ', 1));
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(parts[1]), world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  const at::Tensor loss = t.Loss(1);
  if (t.rank == 3 && parts[0] == "killed") raise(SIGKILL);
  return t.engine->Backward(t.rank == 3 ? at::Tensor() : loss).ToString();
}

TEST_P(ShardGroupsTest, AKilledRankEndsAllGroups) {
  const std::vector<std::string> ends =
      RunAndEnd("Rank3Ends", absl::StrCat("killed ", spec_.ToText()));
  for (int rank : {0, 1, 2}) {
    EXPECT_THAT(ends[rank],
                AllOf(HasSubstr("UNAVAILABLE"), HasSubstr("rank 3 has ended")))
        << rank;
  }
}

TEST_P(ShardGroupsTest, AFailedRankEndsAllGroups) {
  for (const char* shared : {"auto", "off"}) {
    spec_.shared = shared;
    spec_.max_reuse_distance = 0;
    const std::vector<std::string> ends =
        RunAndEnd("Rank3Ends", absl::StrCat("failed ", spec_.ToText()));
    EXPECT_THAT(ends, Each(HasSubstr("the loss is undefined")));
    for (int rank : {0, 1, 2}) {
      EXPECT_THAT(ends[rank], HasSubstr("rank 3 failed")) << rank;
    }
  }
}

}  // namespace
}  // namespace tessera
