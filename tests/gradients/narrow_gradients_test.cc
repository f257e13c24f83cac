// The step's gradient of one rank with 16-bit sums: it stays as it came, and is
// widened as soon as more is added to it or it is changed. A predivide of 2
// widens it at once, and changes no bit of these gradients: both ways have the
// same parameters.
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

int64_t GradientBytes() {
  return MemoryLedger::Host().Report()[MemoryKind::kGradients].current_bytes;
}

// What happens between Backward and Step:
//   once     nothing
//   twice    a second loss
//   set      a gradient is replaced
absl::Status Gradients(const std::string& way, int64_t step, Trainee* t) {
  BackwardOptions options;
  options.more_losses = way == "twice";
  TESSERA_RETURN_IF_ERROR(t->Backward(2 * step, options));
  if (way == "twice") return t->Backward(2 * step + 1);
  if (way != "set") return absl::OkStatus();
  const std::string name = t->model->named_parameters().keys().front();
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor gradient,
                           t->engine->Gradient(name));
  return t->engine->SetGradient(name, gradient / 3);  // not of 16 bits
}

// args: a way, '|', a TrainingSpec. Returns the bytes of the first step's
// gradients, after its first Backward and before Step; then the parameters.
TESSERA_RANK_FUNCTION(TrainNarrow) {
  const std::vector<std::string> parts = absl::StrSplit(args, '|');
  const std::string& way = parts[0];
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(TrainingSpec::FromText(parts[1]), world.communicator()));
  const int64_t before = GradientBytes();
  int64_t after = 0;
  for (int64_t step = 0; step < 3; ++step) {
    TESSERA_RETURN_IF_ERROR(Gradients(way, step, &t));
    if (step == 0) after = GradientBytes() - before;
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string parameters, t.Finish());
  return absl::StrCat(after, "\n", parameters);
}

struct Outcome {
  int64_t bytes = 0;
  std::string parameters;
};

Outcome Train(const std::string& way, const TrainingSpec& spec) {
  const std::vector<std::string> answers =
      RunOnRanks(1, "TrainNarrow", absl::StrCat(way, "|", spec.ToText()));
  const std::vector<std::string> parts =
      absl::StrSplit(answers[0], absl::MaxSplits('\n', 1));
  Outcome outcome;
  EXPECT_TRUE(parts.size() == 2 && absl::SimpleAtoi(parts[0], &outcome.bytes))
      << answers[0];
  outcome.parameters = parts.back();
  return outcome;
}

// The parameters are the stage, the dtype, and what happens.
class NarrowGradientsTest : public ::testing::TestWithParam<
                                std::tuple<int, std::string, std::string>> {};

TEST_P(NarrowGradientsTest, HaveTheBitsOfWideOnes) {
  const auto& [stage, dtype, way] = GetParam();
  TrainingSpec spec;
  spec.stage = stage;
  spec.dtype = dtype;
  spec.loss_scale = 1024;
  if (way == "clipped") spec.clipping_value = 0.01;
  const Outcome narrow = Train(way, spec);
  spec.predivide = 2;
  const Outcome wide = Train(way, spec);
  EXPECT_EQ(narrow.parameters, wide.parameters);
  if (way != "once") return;
  // Below stage 2 what came stays, beside a wide gradient.
  EXPECT_EQ(narrow.bytes * (stage >= 2 ? 2 : 3), wide.bytes);
}

INSTANTIATE_TEST_SUITE_P(
    All, NarrowGradientsTest,
    ::testing::Combine(::testing::Values(0, 1, 2, 3),
                       ::testing::Values("bf16", "fp16"),
                       ::testing::Values("once", "twice", "set", "clipped")),
    [](const auto& info) {
      return absl::StrCat("Stage", std::get<0>(info.param), "_",
                          std::get<1>(info.param), "_",
                          std::get<2>(info.param));
    });

}  // namespace
}  // namespace tessera
