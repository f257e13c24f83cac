// What became of a step on a device is known to the device first: that no call
// of a step waits for it, who learns of it when, and that errors and
// checkpoints are right although it came late. On a device without hardware
// (testing/device/test_device.h), with its kernels.
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/support/device_group.h"
#include "tests/support/device_kernels.h"
#include "tests/support/rank_pool.h"
#include "tests/support/recording_communicator.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr double kOverflow = std::numeric_limits<double>::infinity();
constexpr int kFp32 = -1, kBf16 = -2;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    a = register_module("a", torch::nn::Linear(6, 9));
    b = register_module("b", torch::nn::Linear(9, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = torch::tanh(a(x.to(a->weight.scalar_type())));
    return b(h).to(at::kFloat).square().mean();
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Net);

// Of a run.
struct Way {
  std::string device = "1";  // "" (the CPU), "1", "1/workers"
  int stage = 0;
  double clipping = 0;
  int fp16 = kFp32;  // the power of the first scale, or one of these
  int shard_group = 0;
};

std::string TextOf(const Way& way) {
  return absl::StrJoin(
      {way.device, absl::StrCat(way.stage), absl::StrCat(way.clipping),
       absl::StrCat(way.fp16), absl::StrCat(way.shard_group)},
      " ");
}

Way WayOf(absl::string_view text) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  return {words[0], std::stoi(words[1]), std::stod(words[2]),
          std::stoi(words[3]), std::stoi(words[4])};
}

proto::Config ConfigOf(const Way& way) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.set_gradient_clipping(way.clipping);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_zero_optimization()->set_stage(way.stage);
  config.mutable_zero_optimization()->set_stage3_max_reuse_distance(0);
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  if (way.shard_group > 0) {
    config.mutable_sharding()->set_shard_group_size(way.shard_group);
  }
  if (way.fp16 == kBf16) {
    config.mutable_bf16()->set_enabled(true);
    config.mutable_bf16()->set_check_grad_overflow(true);
  }
  if (way.fp16 < 0) return config;
  proto::Fp16* const fp16 = config.mutable_fp16();
  fp16->set_enabled(true);
  fp16->set_initial_scale_power(way.fp16);
  fp16->set_hysteresis(1);
  fp16->set_loss_scale_window(2);
  return config;
}

// The ranks of `world`, whose collectives are the device's where there is one.
absl::StatusOr<std::shared_ptr<Communicator>> GroupOf(const Way& way,
                                                      const World& world) {
  if (way.device.empty()) return world.communicator();
  testdevice::Register({});
  return DeviceGroup(world.communicator(), testdevice::TestDevice(1));
}

// A net, its engine and its input, which is the same in all steps.
struct Run {
  static absl::StatusOr<Run> Make(const Way& way, const World& world) {
    TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> comm,
                             GroupOf(way, world));
    return Make(way, std::move(comm));
  }
  static absl::StatusOr<Run> Make(const Way& way,
                                  std::shared_ptr<Communicator> comm) {
    torch::manual_seed(1);
    Run run;
    EngineOptions options;
    if (!way.device.empty()) {
      RegisterTestDeviceKernels();
      testdevice::SetMode(way.device == "1" ? testdevice::Mode::kAtOnce
                                            : testdevice::Mode::kWorkers);
      testdevice::ClearFaults();
      options.device = testdevice::TestDevice(1);
    }
    options.communicator = std::move(comm);
    TESSERA_ASSIGN_OR_RETURN(
        run.engine, Engine::Create(run.net.ptr(), ConfigOf(way), options));
    run.x = torch::randn({4, 6});
    if (options.device.has_value()) run.x = run.x.to(*options.device);
    return run;
  }

  // The loss is multiplied with `factor`.
  absl::Status Backward(double factor = 1) {
    return engine->Backward(net->forward(x) * factor);
  }
  absl::Status TrainStep(double factor = 1) {
    TESSERA_RETURN_IF_ERROR(Backward(factor));
    return engine->Step();
  }
  // What there is to know of the engine.
  absl::StatusOr<std::string> State() {
    TESSERA_ASSIGN_OR_RETURN(Record record, ParametersOf(*engine, *net));
    const StepReport& last = engine->last_step();
    record.push_back(absl::StrCat("steps ", engine->step(), " skipped ",
                                  last.skipped_steps, " last ", last.skipped,
                                  " scale ", last.loss_scale, " norm ",
                                  last.grad_norm, " ", last.clipped_norm));
    return ToText(record);
  }
  // The same, closes the engine.
  absl::StatusOr<std::string> Finish() {
    TESSERA_ASSIGN_OR_RETURN(const std::string state, State());
    TESSERA_RETURN_IF_ERROR(engine->Close());
    if (!x.is_cpu()) {
      testdevice::CheckFreed();
      testdevice::SetMode(testdevice::Mode::kAtOnce);
      for (const auto& fault : testdevice::Faults()) {
        return absl::InternalError(fault.message);
      }
    }
    return state;
  }

  Net net;
  std::unique_ptr<Engine> engine;
  at::Tensor x;
};

// How often a thread of any kind has waited for the device since the last call.
std::string TakeWaits() {
  std::string waits;
  for (const auto& each : testdevice::HostWaits()) {
    absl::StrAppend(&waits, each.times, " ", each.what, ";");
  }
  testdevice::ResetHostWaits();
  return waits;
}

// "way|reads": the waits of six steps, with "loss" the last of which reads it.
TESSERA_RANK_FUNCTION(Waits) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(WayOf(words[0]), world));
  testdevice::ResetHostWaits();
  for (int step = 0; step < 6; ++step) {
    const at::Tensor loss = run.net->forward(run.x);
    TESSERA_RETURN_IF_ERROR(run.engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(run.engine->Step());
    if (words[1] == "loss" && step == 5) loss.item();
  }
  const std::string waits = TakeWaits();
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  return waits;
}

TEST(WaitsTest, NoThreadWaitsForTheDevice) {
  for (int world_size : {1, 2}) {
    for (int stage : {0, 1, 2, 3}) {
      for (const double clipping : {0.0, 0.5}) {
        // 2^30 overflows in all of these steps.
        for (const int fp16 : {kFp32, kBf16, 30}) {
          const Way way{"1", stage, clipping, fp16};
          EXPECT_THAT(
              RankPool::Get(world_size)->Run("Waits", TextOf(way) + "|"),
              Each(IsOkAndHolds("")))
              << "W " << world_size << ": " << TextOf(way);
        }
      }
    }
  }
}

TEST(WaitsTest, ReadingALossWaitsForIt) {
  EXPECT_THAT(
      RankPool::Get(2)->Run("Waits", TextOf(Way{"1", 3, 0.5, 8}) + "|loss"),
      Each(IsOkAndHolds("1 item;")));
}

// Of a device that comes to its work later: what asking waits for.
TESSERA_RANK_FUNCTION(Asks) {
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(WayOf(args), world));
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  testdevice::ResetHostWaits();
  const bool skipped = run.engine->last_step().skipped;
  const double norm = run.engine->last_step().clipped_norm;
  const int64_t step = run.engine->step();
  const std::string waits = TakeWaits();
  TESSERA_RETURN_IF_ERROR(run.Finish().status());
  const bool once = waits.empty() || waits == "1 synchronize event;";
  return absl::StrCat(once ? "at most once" : waits, skipped, step,
                      norm <= 0.5);
}

TEST(WaitsTest, AskingForTheLastStepWaitsAtMostOnce) {
  EXPECT_THAT(
      RankPool::Get(2)->Run("Asks", TextOf(Way{"1/workers", 3, 0.5, 8})),
      Each(IsOkAndHolds("at most once011")));
}

class OutcomeTest : public ::testing::TestWithParam<std::string> {
 protected:
  OutcomeTest() {
    way_.device = GetParam();
    way_.stage = 3;
  }
  Way way_;
};

INSTANTIATE_TEST_SUITE_P(All, OutcomeTest, ::testing::Values("1", "1/workers"),
                         [](const auto& info) {
                           return info.param == "1" ? "AtOnce" : "Workers";
                         });

std::string CodeOf(const absl::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(status.code()), " ");
}

// An overflow at the least scale; rank 0 asks what came of it.
TESSERA_RANK_FUNCTION(LeastScale) {
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(WayOf(args), world));
  std::string codes = CodeOf(run.TrainStep(kOverflow));
  if (world.rank() == 0 && !run.engine->last_step().skipped) return "made";
  TESSERA_RETURN_IF_ERROR(run.Backward());
  absl::StrAppend(&codes, CodeOf(run.engine->Step()));
  absl::StrAppend(&codes, CodeOf(run.engine->Step()));
  absl::StrAppend(&codes, run.engine->step(), " ",
                  run.engine->last_step().skipped_steps, " ");
  TESSERA_RETURN_IF_ERROR(run.TrainStep(kOverflow));
  return absl::StrCat(codes, CodeOf(run.engine->Close()));
}

TEST_P(OutcomeTest, AnErrorOfAStepIsTheNextOnesOrCloses) {
  way_.fp16 = 0;
  EXPECT_THAT(RankPool::Get(2)->Run("LeastScale", TextOf(way_)),
              Each(IsOkAndHolds("OK OUT_OF_RANGE OK 1 1 OUT_OF_RANGE ")));
}

// "way|folder|what": the state after four steps, of which the second and the
// third overflow, and the gradient of the fourth; with "resumed" saved after
// the third, whose outcome nobody has asked for, and gone on from there by
// another engine.
TESSERA_RANK_FUNCTION(Overflows) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  const Way way = WayOf(words[0]);
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(way, world));
  for (const double factor : {1.0, kOverflow, kOverflow}) {
    TESSERA_RETURN_IF_ERROR(run.TrainStep(factor));
  }
  if (words[2] == "resumed") {
    TESSERA_RETURN_IF_ERROR(run.engine->SaveCheckpoint(words[1]));
    TESSERA_RETURN_IF_ERROR(run.Finish().status());
    TESSERA_ASSIGN_OR_RETURN(run, Run::Make(way, world));
    TESSERA_RETURN_IF_ERROR(run.TrainStep(kOverflow));  // to be forgotten
    TESSERA_RETURN_IF_ERROR(run.engine->LoadCheckpoint(words[1]).status());
  }
  TESSERA_RETURN_IF_ERROR(run.Backward());
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor gradient,
                           run.engine->Gradient("a.weight"));
  TESSERA_RETURN_IF_ERROR(run.engine->Step());
  TESSERA_ASSIGN_OR_RETURN(const std::string state, run.Finish());
  return absl::StrCat(PrintOf(gradient), "\n", state);
}

TEST_P(OutcomeTest, ACheckpointAfterASkippedStepIsRight) {
  way_.fp16 = 8;
  way_.clipping = 0.5;
  const TempFolder folder;
  Way plain = way_;
  plain.device = "";
  const auto run = [&](const Way& way, const char* what) {
    return RankPool::Get(2)->Run(
        "Overflows",
        absl::StrCat(TextOf(way), "|", folder.path(), "/checkpoint|", what));
  };
  const auto expected = run(plain, "");
  ASSERT_THAT(
      expected,
      Each(IsOkAndHolds(HasSubstr("steps 2 skipped 2 last 0 scale 64 norm "))));
  EXPECT_THAT(run(way_, ""), Each(IsOkAndHolds(*expected[0])));
  EXPECT_THAT(run(way_, "resumed"), Each(IsOkAndHolds(*expected[0])));
}

// Losses and steps on streams of their own, which overflow by turns.
TESSERA_RANK_FUNCTION(TakesTurns) {
  const Way way = WayOf(args);
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(way, world));
  for (const double factor : {1.0, kOverflow, 1.0, 1.0, kOverflow, 1.0}) {
    TESSERA_RETURN_IF_ERROR(run.Backward(factor));
    std::optional<c10::StreamGuard> aside;
    if (!way.device.empty()) {
      aside.emplace(c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1)
                        .getStreamFromGlobalPool(testdevice::TestDevice(1)));
    }
    TESSERA_RETURN_IF_ERROR(run.engine->Step());
  }
  return run.Finish();
}

TEST_P(OutcomeTest, StepsThatAreSkippedOnOtherStreamsChangeNothing) {
  way_.clipping = 0.5;
  for (const int fp16 : {8, kBf16}) {
    way_.fp16 = fp16;
    Way plain = way_;
    plain.device = "";
    const auto expected = RankPool::Get(2)->Run("TakesTurns", TextOf(plain));
    ASSERT_THAT(expected, Each(IsOkAndHolds(HasSubstr("steps 4 skipped 2"))));
    EXPECT_THAT(RankPool::Get(2)->Run("TakesTurns", TextOf(way_)),
                Each(IsOkAndHolds(*expected[0])));
  }
}

// A gradient of elsewhere is multiplied with the scale, which an overflow has
// halved.
TESSERA_RANK_FUNCTION(AddsOutside) {
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(WayOf(args), world));
  TESSERA_RETURN_IF_ERROR(run.TrainStep());
  TESSERA_RETURN_IF_ERROR(run.TrainStep(kOverflow));
  run.net->forward(run.x * 2).backward();
  BackwardOptions options;
  options.add_outside = true;
  TESSERA_RETURN_IF_ERROR(
      run.engine->Backward(run.net->forward(run.x), options));
  TESSERA_RETURN_IF_ERROR(run.engine->Step());
  return run.Finish();
}

TEST_P(OutcomeTest, GradientsOfElsewhereHaveTheScaleOfTheLoss) {
  way_.fp16 = 8;
  Way plain = way_;
  plain.device = "";
  const auto expected = RankPool::Get(2)->Run("AddsOutside", TextOf(plain));
  ASSERT_THAT(expected, Each(IsOk()));
  EXPECT_THAT(RankPool::Get(2)->Run("AddsOutside", TextOf(way_)),
              Each(IsOkAndHolds(*expected[0])));
}

// An all-reduce over replicas that gives rank 1 other bits.
class Damaged : public RecordingCommunicator {
 public:
  Damaged(std::shared_ptr<Communicator> inner, bool reduces)
      : RecordingCommunicator(std::move(inner)), reduces_(reduces) {}
  absl::StatusOr<std::shared_ptr<Communicator>> Split(int color,
                                                      CommTag name) override {
    const bool damaged = name.what == "replicas" && rank() == 1;
    TESSERA_ASSIGN_OR_RETURN(auto part,
                             RecordingCommunicator::Split(color, name));
    return std::make_shared<Damaged>(std::move(part), damaged);
  }
  CommFuture AllReduceSum(at::Tensor tensor, CommTag tag) override {
    CommFuture done = RecordingCommunicator::AllReduceSum(tensor, tag);
    if (reduces_ && done.Wait().ok()) tensor.add_(1);
    return done;
  }

 private:
  const bool reduces_;
};

TESSERA_RANK_FUNCTION(ReplicasPart) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  const Way way = WayOf(words[0]);
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> group,
                           GroupOf(way, world));
  TESSERA_ASSIGN_OR_RETURN(
      Run run,
      Run::Make(way, std::make_shared<Damaged>(std::move(group), false)));
  std::string codes = CodeOf(run.TrainStep());
  absl::StrAppend(&codes, CodeOf(run.engine->SaveCheckpoint(words[1])));
  TESSERA_RETURN_IF_ERROR(run.Backward());
  return absl::StrCat(codes, run.engine->Step().ToString());
}

TEST_P(OutcomeTest, ReplicasThatDifferAreNamedByAllThatComesAfter) {
  way_.stage = 1;
  way_.clipping = 0.5;
  way_.shard_group = 1;
  const TempFolder folder;
  RankPoolOptions options;
  options.world_size = 2;
  RankPool pool(options);
  EXPECT_THAT(
      pool.Run("ReplicasPart",
               absl::StrCat(TextOf(way_), "|", folder.path(), "/checkpoint")),
      Each(IsOkAndHolds(
          AllOf(HasSubstr("OK INTERNAL INTERNAL: "),
                HasSubstr("gradients of rank 1 are not those of rank 0")))));
}

}  // namespace
}  // namespace tessera
