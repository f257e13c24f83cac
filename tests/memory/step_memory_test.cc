// The memory of a step as the engine reports it, against what is known of a
// model of large tensors.
#include "base/step_memory/step_memory.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch/tensor_memory.h"
#include "engine/engine.h"
#include "gtest/gtest.h"
#include "tests/memory/step_memory_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

absl::Status Expect(bool holds, absl::string_view what,
                    const StepMemoryReport& report) {
  if (holds) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("not so: ", what, "\n", StepMemoryTable(report, 10)));
}

// `tensors` large ones, and what is small.
bool Is(int64_t bytes, int64_t tensors) {
  return bytes >= tensors * kTensor &&
         bytes <= tensors * (kTensor + kRounding) + kSmall;
}

absl::Status CheckActivations(const StepMemoryReport& report) {
  const auto& units = report.activations;
  TESSERA_RETURN_IF_ERROR(
      Expect(units.size() == kBlocks + 1, "a row for each block", report));
  for (size_t i = 0; i < units.size(); ++i) {
    const std::string unit = i == 0 ? "" : absl::StrCat("block", i - 1);
    TESSERA_RETURN_IF_ERROR(
        Expect(units[i].unit == unit, "rows in order of use", report));
    TESSERA_RETURN_IF_ERROR(
        Expect(Is(units[i].bytes, 1), "one tensor of each", report));
  }
  return absl::OkStatus();
}

// The largest moment is in square's backward, grad * (2 * h.pow(1)): its four
// tensors, before the first block is used.
absl::Status CheckBackwardPeak(const StepMemoryReport& report,
                               const Engine& engine) {
  const HeldMoment& peak = report.at_peak;
  TESSERA_RETURN_IF_ERROR(Expect(peak.phase == MemoryPhase::kBackward,
                                 "the peak is in backward", report));
  TESSERA_RETURN_IF_ERROR(Expect(
      peak.unit == absl::StrCat("block", kBlocks - 1), "the unit", report));
  TESSERA_RETURN_IF_ERROR(
      Expect(Is(peak.held[HeldKind::kActivations], kBlocks + 1),
             "the input and a tensor of each block", report));
  TESSERA_RETURN_IF_ERROR(Expect(Is(peak.held[HeldKind::kTemporary], 4),
                                 "the tensors of square's backward", report));
  const int64_t distance = report.peak_bytes - peak.held.total();
  TESSERA_RETURN_IF_ERROR(Expect(
      distance >= 0 &&
          distance <= std::max<int64_t>(64 << 10, report.peak_bytes >> 10),
      "the moment is near the peak", report));
  const StateBytes state = engine.state_bytes();
  return Expect(peak.held[HeldKind::kOptimizer] >= state.optimizer &&
                    peak.held[HeldKind::kParameters] >= state.parameters,
                "the engine's own", report);
}

// args: stage.
TESSERA_RANK_FUNCTION(TrainChain) {
  CountTensorMemory();
  const int64_t before = StepMemory::Global().tensor_bytes();
  std::shared_ptr<Chain> model;
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, MakeChain(world, std::stoi(std::string(args)), &model));
  for (int step = 0; step < 3; ++step) {
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(world.rank())));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    const StepMemoryReport& report = engine->last_step().memory;
    TESSERA_RETURN_IF_ERROR(CheckActivations(report));
    TESSERA_RETURN_IF_ERROR(CheckBackwardPeak(report, *engine));
  }
  // A moment in the forward that is larger.
  constexpr int64_t kWide = 8;
  TESSERA_RETURN_IF_ERROR(
      engine->Backward(model->Loss(world.rank(), /*wide=*/1, kWide)));
  TESSERA_RETURN_IF_ERROR(engine->Step());
  const StepMemoryReport report = engine->last_step().memory;
  TESSERA_RETURN_IF_ERROR(CheckActivations(report));
  TESSERA_RETURN_IF_ERROR(
      Expect(report.at_peak.phase == MemoryPhase::kForward &&
                 report.at_peak.unit == "block1",
             "the peak is in block1's forward", report));
  TESSERA_RETURN_IF_ERROR(
      Expect(Is(report.at_peak.held[HeldKind::kActivations], 3 + kWide),
             "the input, two blocks, and the wide one", report));
  TESSERA_RETURN_IF_ERROR(
      Expect(report.at_peak.held[HeldKind::kTemporary] == 0, "none", report));
  engine.reset();
  model.reset();
  const int64_t after = StepMemory::Global().tensor_bytes();
  if (after != before) {
    return absl::InternalError(
        absl::StrCat("tensors: ", before, " before, ", after, " after"));
  }
  return "";
}

class StepMemoryTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  int stage() const { return std::get<0>(GetParam()); }
  RankPool* pool() const { return RankPool::Get(std::get<1>(GetParam())); }
};

TEST_P(StepMemoryTest, PeakAndActivationsAreThoseOfTheChain) {
  for (auto& answer : pool()->Run("TrainChain", absl::StrCat(stage()))) {
    TESSERA_EXPECT_OK(answer.status());
  }
}

// ---- nothing is lost in many steps

TESSERA_RANK_FUNCTION(TrainManySteps) {
  CountTensorMemory();
  const int64_t before = StepMemory::Global().tensor_bytes();
  TrainingSpec spec = TrainingSpec::FromText(args);
  auto model = BuildModel(spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  int64_t after_first = 0;
  for (int step = 0; step < 100; ++step) {
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(world.rank(), step)));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    if (step == 3) after_first = StepMemory::Global().tensor_bytes();
  }
  const int64_t after = StepMemory::Global().tensor_bytes();
  engine.reset();
  model.reset();
  const int64_t gone = StepMemory::Global().tensor_bytes();
  // A collective's last scalar may still be on its way.
  if (after <= after_first + 1024 && gone == before) return "";
  return absl::InternalError(absl::StrCat(before, " before, ", after_first,
                                          " after 4 steps, ", after,
                                          " after 100, ", gone, " at the end"));
}

TEST_P(StepMemoryTest, NothingIsLostInManySteps) {
  TrainingSpec spec;
  spec.stage = stage();
  for (auto& answer : pool()->Run("TrainManySteps", spec.ToText())) {
    TESSERA_EXPECT_OK(answer.status());
  }
}

INSTANTIATE_TEST_SUITE_P(All, StepMemoryTest,
                         ::testing::Combine(::testing::Values(0, 3),
                                            ::testing::Values(1, 2)),
                         [](const auto& info) {
                           return absl::StrCat("Stage", std::get<0>(info.param),
                                               "World",
                                               std::get<1>(info.param));
                         });

}  // namespace
}  // namespace tessera
