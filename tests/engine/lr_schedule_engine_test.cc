// Tests the learning rate of each step: by the configuration's schedule, or the
// program's; also after a checkpoint, and where steps are skipped.
#include <torch/torch.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "optim/schedule/deepspeed_schedules.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr int kSteps = 6;

// A cycle of 2 + 2 steps: rate and momentum change at each.
void SetSchedule(proto::Config* config) {
  proto::Scheduler* scheduler = config->mutable_scheduler();
  scheduler->set_type("OneCycle");
  scheduler->mutable_params()->set_cycle_min_lr(0.01);
  scheduler->mutable_params()->set_cycle_max_lr(0.1);
  scheduler->mutable_params()->set_cycle_first_step_size(2);
}

// "<stage> <a folder that all ranks have>", or no folder. Steps by the
// schedule, the last two in another engine if there is a folder; the rates, and
// the parameters at the end.
TESSERA_RANK_FUNCTION(TrainByCycle) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TrainingSpec spec;
  spec.stage = std::stoi(words[0]);
  proto::Config config = ConfigOf(spec);
  SetSchedule(&config);
  const std::string& folder = words[1];
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  std::string record;
  for (int step = 0; step < kSteps; ++step) {
    if (step == 4 && !folder.empty()) {
      TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(folder));
      TESSERA_RETURN_IF_ERROR(t.engine->Close());
      TESSERA_ASSIGN_OR_RETURN(
          t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                           world.communicator()));
      TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(folder).status());
    }
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
    absl::StrAppend(&record, t.engine->last_step().learning_rate, "\n");
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string parameters, t.Finish());
  return record + parameters;
}

TEST(LrScheduleTest, IsTheSameAtEveryStageAndAfterACheckpoint) {
  const std::vector<std::string> replicated =
      RunOnRanks(2, "TrainByCycle", "0 ");
  EXPECT_THAT(replicated,
              Each(HasSubstr("0.01\n0.055\n0.1\n0.055\n0.01\n0.01\n")));
  for (int stage = 1; stage <= 3; ++stage) {
    EXPECT_EQ(RunOnRanks(2, "TrainByCycle", absl::StrCat(stage, " ")),
              replicated)
        << "stage " << stage;
  }
  const std::string folder =
      absl::StrCat(::testing::TempDir(), "lr_schedule_checkpoint");
  EXPECT_EQ(RunOnRanks(2, "TrainByCycle", absl::StrCat("3 ", folder)),
            replicated);
}

// args: "" or "by hand". Steps by a linear warmup, of the configuration or set
// before each step; the parameters at the end.
TESSERA_RANK_FUNCTION(TrainByWarmup) {
  TrainingSpec spec;
  spec.stage = 3;
  proto::Config config = ConfigOf(spec);
  const bool by_hand = !args.empty();
  DeepSpeedScheduleOptions options;
  options.warmup_max_lr = 0.05;
  options.warmup_num_steps = 4;
  options.warmup_linear = true;
  if (!by_hand) {
    config.mutable_scheduler()->set_type("WarmupLR");
    proto::SchedulerParams* params =
        config.mutable_scheduler()->mutable_params();
    params->set_warmup_max_lr(options.warmup_max_lr);
    params->set_warmup_num_steps(options.warmup_num_steps);
    params->set_warmup_type("linear");
  }
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  for (int step = 0; step < kSteps; ++step) {
    if (by_hand) {
      TESSERA_RETURN_IF_ERROR(
          t.engine->SetLearningRate(DeepSpeedSchedule(options).Rate(step, 0)));
    }
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
  }
  return t.Finish();
}

TEST(LrScheduleTest, TheProgramMaySetTheRateItself) {
  EXPECT_EQ(RunOnRanks(2, "TrainByWarmup", "by hand"),
            RunOnRanks(2, "TrainByWarmup", ""));
}

// args: a folder. A rate set by hand, before a checkpoint and after.
TESSERA_RANK_FUNCTION(SaveARate) {
  TrainingSpec spec;
  const auto make = [&] {
    return Trainee::Make(BuildModel(spec.model, world.rank()), ConfigOf(spec),
                         world.communicator());
  };
  std::string rates;
  const auto step = [&](Trainee& t) {
    const absl::Status status = t.TrainStep(0);
    absl::StrAppend(&rates, t.engine->last_step().learning_rate, "\n");
    return status;
  };
  TESSERA_ASSIGN_OR_RETURN(Trainee saver, make());
  TESSERA_RETURN_IF_ERROR(step(saver));
  TESSERA_RETURN_IF_ERROR(saver.engine->SetLearningRate(0.0625));
  TESSERA_RETURN_IF_ERROR(step(saver));
  TESSERA_RETURN_IF_ERROR(saver.engine->SaveCheckpoint(std::string(args)));
  TESSERA_RETURN_IF_ERROR(saver.engine->Close());
  TESSERA_ASSIGN_OR_RETURN(Trainee loader, make());
  TESSERA_RETURN_IF_ERROR(
      loader.engine->LoadCheckpoint(std::string(args)).status());
  TESSERA_RETURN_IF_ERROR(step(loader));
  TESSERA_RETURN_IF_ERROR(loader.engine->Close());
  return rates;
}

TEST(LrScheduleTest, ACheckpointKeepsARateSetByHand) {
  const TempFolder folder;
  EXPECT_THAT(RunOnRanks(2, "SaveARate", folder / "ckpt"),
              Each(::testing::EndsWith("\n0.0625\n0.0625\n")));
}

// Returns the error of each misuse, and the rates of steps of which one is
// skipped.
TESSERA_RANK_FUNCTION(MisuseRates) {
  TrainingSpec spec;
  spec.stage = 2;
  proto::Config config = ConfigOf(spec);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  std::string said;
  const auto say = [&](const absl::Status& status) {
    absl::StrAppend(&said, status.ToString(), "\n");
  };
  say(t.engine->SetLearningRate(-1));
  say(t.engine->SetLearningRate(0.1 * (1 + world.rank())));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  SetSchedule(&config);
  TESSERA_ASSIGN_OR_RETURN(
      t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                       world.communicator()));
  say(t.engine->SetLearningRate(0.1));
  say(t.engine->ReportMetric(0.1));
  return said;
}

TEST(LrScheduleTest, MisuseIsNamedOnAllRanks) {
  EXPECT_THAT(
      RunOnRanks(2, "MisuseRates", ""),
      Each(::testing::AllOf(
          HasSubstr("[SetLearningRate] rank 0: expected a finite number of "
                    "at least 0, got -1"),
          HasSubstr("INVALID_ARGUMENT: the rate of SetLearningRate differs "
                    "between rank 0"),
          HasSubstr("FAILED_PRECONDITION: [SetLearningRate] rank 0: the "
                    "configuration has a scheduler"),
          HasSubstr("FAILED_PRECONDITION: [ReportMetric] rank 0: the "
                    "configuration has no scheduler that follows a "
                    "metric"))));
}

TESSERA_RANK_FUNCTION(SkipOne) {
  TrainingSpec spec;
  spec.model = "Overflows";
  spec.dtype = "fp16";
  spec.initial_scale_power = 8;
  spec.stage = 3;
  proto::Config config = ConfigOf(spec);
  SetSchedule(&config);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  std::string rates;
  for (int step = 0; step < 4; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
    const StepReport& report = t.engine->last_step();
    absl::StrAppend(&rates, report.learning_rate,
                    report.skipped ? " skipped, " : ", ");
  }
  return rates;
}

TEST(LrScheduleTest, SkippedStepsDoNotCount) {
  EXPECT_THAT(RunOnRanks(2, "SkipOne", ""),
              Each("0.01, 0.055 skipped, 0.055, 0.1, "));
}

// args: "cycle" (OneCycleLR with a momentum that stays) or "fixed" (the same as
// the optimizer's betas), and the optimizer; the parameters at the end.
TESSERA_RANK_FUNCTION(TrainWithMomentum) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TrainingSpec spec;
  spec.stage = 3;
  const bool cycle = words[0] == "cycle";
  proto::Config config = ConfigOf(spec);
  config.mutable_optimizer()->set_type(words[1]);
  proto::OptimizerParams* adam = config.mutable_optimizer()->mutable_params();
  adam->clear_betas();
  adam->add_betas(cycle ? 0.1 : 0.75);
  adam->add_betas(0.9);
  config.mutable_scheduler()->set_type("OneCycleLR");
  proto::SchedulerParams* params = config.mutable_scheduler()->mutable_params();
  params->set_max_lr(0.1);
  params->set_total_steps(kSteps);
  params->set_cycle_momentum(cycle);
  params->set_base_momentum(0.75);
  params->set_max_momentum(0.75);
  config.mutable_scheduler()->mutable_warmup()->set_num_steps(2);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  const absl::Status set = t.engine->SetOption("default", "beta1", 0.75);
  if (set.ok() == cycle) return absl::StrCat(args, ": ", set.ToString());
  for (int step = 0; step < kSteps; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
  }
  return t.Finish();
}

TEST(LrScheduleTest, ACycleSetsBeta1Alone) {
  for (const char* type : {" AdamW", " Lamb"}) {
    EXPECT_EQ(RunOnRanks(2, "TrainWithMomentum", absl::StrCat("cycle", type)),
              RunOnRanks(2, "TrainWithMomentum", absl::StrCat("fixed", type)));
  }
}

// args: the type of a scheduler, or none. Rates for a batch of half the size.
TESSERA_RANK_FUNCTION(ScaleRates) {
  TrainingSpec spec;
  proto::Config config = ConfigOf(spec);
  config.clear_train_micro_batch_size_per_gpu();
  config.clear_gradient_accumulation_steps();
  config.set_train_batch_size(8);
  config.mutable_optimizer()->mutable_params()->set_lr(0.25);
  config.mutable_learning_rate_scaling()->set_rule("linear");
  config.mutable_learning_rate_scaling()->set_base_batch_size(4);
  if (!args.empty()) {
    config.mutable_scheduler()->set_type(std::string(args));
    config.mutable_scheduler()->mutable_params()->set_gamma(0.5);
  }
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  std::string rates;
  for (int step = 0; step < 3; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
    absl::StrAppend(&rates, t.engine->last_step().learning_rate, " ");
  }
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(rates, "by ",
                      t.engine->config().learning_rate_scaling().factor());
}

TEST(LrScheduleTest, TheBatchScalesRatesWithAndWithoutASchedule) {
  EXPECT_THAT(RunOnRanks(2, "ScaleRates", ""), Each("0.5 0.5 0.5 by 2"));
  EXPECT_THAT(RunOnRanks(2, "ScaleRates", "ExponentialLR"),
              Each("0.5 0.25 0.125 by 2"));
}

// args: "group" or "alone". All parameters, with a rate of 0.25 for half of the
// batch and half of the rate at each step, as those of a group or without one.
TESSERA_RANK_FUNCTION(TrainInAGroup) {
  TrainingSpec spec;
  spec.stage = 3;
  proto::Config config = ConfigOf(spec);
  config.clear_train_micro_batch_size_per_gpu();
  config.clear_gradient_accumulation_steps();
  config.set_train_batch_size(8);
  config.mutable_learning_rate_scaling()->set_rule("linear");
  config.mutable_learning_rate_scaling()->set_base_batch_size(4);
  config.mutable_scheduler()->set_type("ExponentialLR");
  config.mutable_scheduler()->mutable_params()->set_gamma(0.5);
  const bool group = args == "group";
  config.mutable_optimizer()->mutable_params()->set_lr(group ? 1 : 0.25);
  if (group) {
    proto::ParamGroup* all = config.mutable_optimizer()->add_param_groups();
    all->add_parameters("*");
    all->mutable_params()->set_lr(0.25);
  }
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  for (int step = 0; step < kSteps; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
  }
  return t.Finish();
}

TEST(LrScheduleTest, AScheduleMultipliesEachGroupsOwnRate) {
  EXPECT_EQ(RunOnRanks(2, "TrainInAGroup", "group"),
            RunOnRanks(2, "TrainInAGroup", "alone"));
}

// args: scheduler.params.after. Steps beyond T_max; the rates.
TESSERA_RANK_FUNCTION(TrainBeyondCosine) {
  TrainingSpec spec;
  proto::Config config = ConfigOf(spec);
  proto::Scheduler* const scheduler = config.mutable_scheduler();
  scheduler->set_type("CosineAnnealingLR");
  scheduler->mutable_params()->set_t_max(2);
  if (!args.empty()) {
    scheduler->mutable_params()->set_after(std::string(args));
  }
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  std::string rates;
  for (int step = 0; step < 6; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
    absl::StrAppendFormat(&rates, "%.3f ", t.engine->last_step().learning_rate);
  }
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return rates;
}

TEST(LrScheduleTest, ASecondRiseOfACosineIsSaidOnce) {
  const std::string words = "the learning rate rises again from optimizer step";
  EXPECT_THAT(RunOnRanks(2, "TrainBeyondCosine", ""),
              Each("0.010 0.005 0.000 0.005 0.010 0.005 "));
  const std::string& said = RankPool::Get(2)->stderr_of(0);
  EXPECT_THAT(said, HasSubstr(words + " 4 on, for 2 steps"));
  EXPECT_THAT(said, HasSubstr("scheduler.params.after to \"hold\""));
  EXPECT_EQ(said.find(words), said.rfind(words));
  EXPECT_THAT(RankPool::Get(2)->stderr_of(1), "");
  EXPECT_THAT(RunOnRanks(2, "TrainBeyondCosine", "hold"),
              Each("0.010 0.005 0.000 0.000 0.000 0.000 "));
  EXPECT_THAT(RankPool::Get(2)->stderr_of(0), "");
}

}  // namespace
}  // namespace tessera
