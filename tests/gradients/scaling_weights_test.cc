// Weights of micro-batches only weigh: training with equal ones, whatever their
// size, is training without; losses of one micro-batch have one weight.
#include <torch/torch.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/gradients/scaling_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// ---- weights only weigh

// args: "<weight>|<spec>[|late]". Trains a model without weights and another
// with `weight` everywhere, or from the second step on. Returns "equal", or how
// far the masters are apart, relative to the largest move of the first.
TESSERA_RANK_FUNCTION(TrainWithAndWithout) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  double weight = 0;
  TORCH_CHECK(absl::SimpleAtod(words[0], &weight));
  const TrainingSpec spec = TrainingSpec::FromText(words[1]);
  std::vector<std::vector<at::Tensor>> masters;
  std::vector<at::Tensor> start;
  std::vector<std::string> outcomes;
  for (const bool weighted : {false, true}) {
    TESSERA_ASSIGN_OR_RETURN(Trainee t,
                             Trainee::Make(spec, world.communicator()));
    const auto all = [&]() -> absl::StatusOr<std::vector<at::Tensor>> {
      std::vector<at::Tensor> values;
      for (const auto& p : t.model->named_parameters()) {
        TESSERA_ASSIGN_OR_RETURN(at::Tensor value, t.engine->Master(p.key()));
        values.push_back(value.clone());
      }
      return values;
    };
    TESSERA_ASSIGN_OR_RETURN(start, all());
    const int first =
        words.size() > 2 ? static_cast<int>(spec.accumulation) : 0;
    for (int i = 0; i < spec.steps * spec.accumulation; ++i) {
      BackwardOptions options;
      if (weighted && i >= first) options.weight = weight;
      TESSERA_RETURN_IF_ERROR(t.Backward(i, options));
      TESSERA_RETURN_IF_ERROR(t.engine->Step());
    }
    const StepReport& report = t.engine->last_step();
    outcomes.push_back(absl::StrCat(t.engine->step(), " steps, ",
                                    report.skipped_steps, " skipped, scale ",
                                    report.loss_scale));
    TESSERA_ASSIGN_OR_RETURN(auto values, all());
    masters.push_back(std::move(values));
    TESSERA_RETURN_IF_ERROR(t.engine->Close());
  }
  if (outcomes[0] != outcomes[1]) {
    return absl::StrCat(outcomes[0], "; with weights ", outcomes[1]);
  }
  double moved = 0, apart = 0;
  for (size_t i = 0; i < start.size(); ++i) {
    const auto most = [](const at::Tensor& a, const at::Tensor& b) {
      return (a - b).abs().max().item<double>();
    };
    moved = std::max(moved, most(masters[0][i], start[i]));
    const double here = most(masters[0][i], masters[1][i]);
    if (!(here <= apart)) apart = here;  // NaN too
  }
  if (moved == 0) return "nothing moved";
  return apart == 0 ? "equal" : absl::StrCat(apart / moved);
}

struct Kind {
  const char* dtype;
  const char* reduce_dtype;
  const char* gradient_dtype;
  double loss_scale;
  double epsilon;
};

// Each combination runs at one stage; at each stage every pair of values does.
TEST_P(ScalingTest, EqualWeightsOfAnySizeTrainAsNoneDo) {
  const char* const weights[] = {"4096", "1e6", "1e-3", "3001"};
  const Kind kinds[] = {
      {"fp32", "", "", 0, 0x1p-24},     {"bf16", "", "", 0, 0x1p-8},
      {"fp16", "", "", 0, 0x1p-11},     {"fp16", "fp32", "", 128, 0x1p-11},
      {"fp32", "fp16", "", 0, 0x1p-11}, {"fp32", "bf16", "fp16", 0, 0x1p-8}};
  auto cell = static_cast<size_t>(GetParam());
  for (const Kind& kind : kinds) {
    ++cell;
    TrainingSpec spec;
    spec.stage = GetParam();
    spec.model = "Mlp";
    spec.optimizer = "type:'SGD',params{lr:0.1}";
    spec.steps = 2;
    spec.dtype = kind.dtype;
    spec.reduce_dtype = kind.reduce_dtype;
    spec.gradient_dtype = kind.gradient_dtype;
    spec.loss_scale = kind.loss_scale;
    spec.initial_scale_power = 12;
    const bool half =
        absl::StrCat(kind.dtype, kind.reduce_dtype, kind.gradient_dtype)
            .find("fp16") != std::string::npos;
    for (const char* way : {"each", "local"}) {
      for (const int world_size : {1, 2}) {
        const char* const weight = weights[cell++ % std::size(weights)];
        // The first way reduces micro-batches one by one, the second all at
        // once.
        spec.accumulation_mode = way;
        spec.accumulation = absl::string_view(way) == "each" ? 1 : 2;
        SCOPED_TRACE(
            absl::StrCat(weight, " ", world_size, " ranks, ", spec.ToText()));
        const std::vector<std::string> answers =
            RunOnRanks(world_size, "TrainWithAndWithout",
                       absl::StrCat(weight, "|", spec.ToText()));
        // Docs/guide.md says where it is to the bit.
        const bool exact =
            absl::string_view(weight) == "4096" ||
            (spec.accumulation == 1 && (world_size == 1 || half));
        for (const std::string& answer : answers) {
          if (exact) {
            EXPECT_EQ(answer, "equal");
            continue;
          }
          // Some 30 roundings a step in a row, of numbers that are up to a few
          // times what is left of them.
          double apart = 0;
          if (answer != "equal") {
            EXPECT_TRUE(absl::SimpleAtod(answer, &apart)) << answer;
          }
          EXPECT_LE(apart, 256 * kind.epsilon);
        }
      }
    }
  }
}

// The unit of a step is one: the ranks learn in its middle that there are
// weights.
TEST_P(ScalingTest, WeightsMayBeginInALaterStep) {
  TrainingSpec spec;
  spec.stage = GetParam();
  spec.model = "Mlp";
  spec.optimizer = "type:'SGD',params{lr:0.1}";
  spec.steps = 3;
  spec.dtype = "fp16";
  spec.loss_scale = 128;
  spec.accumulation = 2;
  EXPECT_THAT(RunOnRanks(2, "TrainWithAndWithout",
                         absl::StrCat("16|", spec.ToText(), "|late")),
              Each("equal"));
}

// A step that overflows float16 is skipped with weights as without, and nothing
// else is; the loss scale follows.
TEST_P(ScalingTest, OverflowsAreThoseOfTheLoss) {
  TrainingSpec spec;
  spec.stage = GetParam();
  spec.model = "Overflows";
  spec.dtype = "fp16";
  spec.steps = 6;
  spec.initial_scale_power = 8;
  spec.loss_scale_window = 2;
  spec.hysteresis = 1;
  spec.clipping = 0.5;
  for (const double loss_scale : {0.0, 24.0}) {
    spec.loss_scale = loss_scale;
    for (const int world_size : {2, 3}) {
      EXPECT_THAT(RunOnRanks(world_size, "TrainWithAndWithout",
                             absl::StrCat("2500|", spec.ToText())),
                  Each("equal"));
    }
  }
}

// ---- losses of one micro-batch

// Two losses with weights that differ; then such as do not, after one that
// failed between them.
TESSERA_RANK_FUNCTION(LossesThatDiffer) {
  auto model = std::make_shared<Places>();
  TrainingSpec spec = TrainingSpec::FromText(args);
  spec.optimizer = "type:'SGD',params{lr:1}";
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(model, ConfigOf(spec), world.communicator()));
  const auto backward = [&](double gradient, double weight, bool more) {
    BackwardOptions options;
    options.weight = weight;
    options.more_losses = more;
    return t.engine->Backward(model->LossOf([&](int64_t) { return gradient; }),
                              options);
  };
  TESSERA_RETURN_IF_ERROR(backward(1, 5, true));
  std::string lines = backward(2, 6, false).ToString();
  TESSERA_RETURN_IF_ERROR(backward(2, 5, false));
  TESSERA_RETURN_IF_ERROR(t.engine->Step());
  {
    // A later failure drops what this leaves on the ranks, and its samples.
    Engine::NoSyncScope no_sync(t.engine.get());
    TESSERA_RETURN_IF_ERROR(backward(100, 7, true));
  }
  TESSERA_RETURN_IF_ERROR(
      ExpectCode(absl::StatusCode::kInvalidArgument, backward(100, 8, false)));
  TESSERA_RETURN_IF_ERROR(backward(1, 7, true));
  TESSERA_RETURN_IF_ERROR(backward(4, 7, true));
  TESSERA_RETURN_IF_ERROR(backward(8, 7, false));
  TESSERA_RETURN_IF_ERROR(t.engine->Step());
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor w, t.engine->Master("unit0.w"));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(lines, " ", w[0].item<double>());
}

TEST_P(ScalingTest, LossesOfOneMicroBatchHaveOneWeight) {
  TrainingSpec spec;
  spec.stage = GetParam();
  for (const int world_size : {1, 2}) {
    const auto answers =
        RunOnRanks(world_size, "LossesThatDiffer", spec.ToText());
    for (const std::string& answer : answers) {
      const std::vector<std::string> words = absl::StrSplit(answer, ' ');
      double change = 0;
      ASSERT_TRUE(absl::SimpleAtod(words.back(), &change)) << answer;
      // 3 and 13, up to roundings of weights that are no powers of two.
      EXPECT_NEAR(change, -16, 0x1p-18) << answer;
      EXPECT_THAT(answer,
                  AllOf(HasSubstr("INVALID_ARGUMENT: "),
                        HasSubstr("Backward: this loss has the weight 6, "),
                        HasSubstr("(more_losses) had 5"),
                        HasSubstr("give all of them the same weight")));
    }
  }
}

}  // namespace
}  // namespace tessera
