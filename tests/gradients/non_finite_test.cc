// Reports which gradients are not finite: on request before a step, in the
// report of a skipped step, and in the error where no scale is left or too many
// steps in a row were skipped; the same on all ranks, at every stage. And tests
// what is logged once about losses.
#include "optim/gradients/non_finite.h"

#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
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
using ::testing::HasSubstr;
using ::testing::Not;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// "parameter NaNs infinities @ranks", without units, which stages cut
// otherwise.
std::string TextOf(const std::vector<NonFiniteGradient>& gradients) {
  std::string text;
  for (const NonFiniteGradient& g : gradients) {
    absl::StrAppend(&text, g.parameter, " ", g.nan_numel, " ", g.infinite_numel,
                    " @");
    for (const int rank : g.ranks) absl::StrAppend(&text, rank);
    absl::StrAppend(&text, g.unit.empty() ? " of no unit; " : "; ");
  }
  return text;
}

// args: "stage dtype [disk | twice]"; twice: the scale can be halved once. Of a
// model with two layers: in, [14, 9] and [14], and out, [4, 14] and [4].
absl::StatusOr<Trainee> Make(absl::string_view args, const World& world,
                             bool names,
                             const std::string& model_name = "Overflows") {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TrainingSpec spec;
  spec.model = model_name;
  TESSERA_CHECK(absl::SimpleAtoi(words[0], &spec.stage));
  spec.dtype = words[1];
  spec.initial_scale_power = words.back() == "twice" ? 1 : 0;
  spec.hysteresis = 1;
  if (words.back() == "disk") {
    spec.states_on_disk = 1;
    spec.gradients_on_disk = true;
  }
  proto::Config config = ConfigOf(spec);
  config.mutable_fp16()->set_name_overflows(names);
  config.mutable_bf16()->set_name_overflows(names);
  return Trainee::Make(BuildModel(spec.model, world.rank()), config,
                       world.communicator());
}

// Checks that each element of NaN gradients counts once, wherever shards are
// cut; some are on two ranks, if there are two.
absl::Status CheckAllAreCounted(Trainee* t) {
  const auto parameters = t->model->named_parameters();
  size_t with_gradient = 0;
  for (const auto& p : parameters) {
    TESSERA_ASSIGN_OR_RETURN(at::Tensor gradient, t->engine->Gradient(p.key()));
    if (!gradient.defined()) continue;
    ++with_gradient;
    TESSERA_RETURN_IF_ERROR(
        t->engine->SetGradient(p.key(), gradient.fill_(kNan)));
  }
  TESSERA_ASSIGN_OR_RETURN(const auto found, t->engine->NonFiniteGradients());
  if (found.size() != with_gradient) {
    return absl::InternalError(absl::StrCat(found.size(), " are not finite"));
  }
  size_t most_ranks = 0;
  for (const NonFiniteGradient& g : found) {
    most_ranks = std::max(most_ranks, g.ranks.size());
    if (g.nan_numel == parameters[g.parameter].numel()) continue;
    return absl::InternalError(
        absl::StrCat(g.parameter, " has ", g.nan_numel, " NaNs"));
  }
  const int world_size = t->engine->communicator()->world_size();
  if (most_ranks == static_cast<size_t>(world_size)) return absl::OkStatus();
  return absl::InternalError("no parameter is of all ranks");
}

// In one gradient all elements except the last are not finite, in another some.
TESSERA_RANK_FUNCTION(AskedFor) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, Make(args, world, false, "Mlp"));
  const auto none = t.engine->NonFiniteGradients();
  TESSERA_RETURN_IF_ERROR(
      ExpectCode(absl::StatusCode::kFailedPrecondition, none.status()));
  TESSERA_RETURN_IF_ERROR(t.Backward(0));
  TESSERA_ASSIGN_OR_RETURN(const auto finite, t.engine->NonFiniteGradients());
  if (!finite.empty()) return "something is not finite";
  for (const auto& [name, nans] : {std::pair("blocks.1.up.weight", 1000),
                                   std::pair("blocks.0.up.bias", 2)}) {
    TESSERA_ASSIGN_OR_RETURN(at::Tensor gradient, t.engine->Gradient(name));
    const at::Tensor all = gradient.view({-1});
    all.fill_(-kInfinity);
    all.slice(0, 0, std::min<int64_t>(nans, all.numel())).fill_(kNan);
    all.slice(0, all.numel() - 1).fill_(1);
    TESSERA_RETURN_IF_ERROR(t.engine->SetGradient(name, gradient));
  }
  TESSERA_ASSIGN_OR_RETURN(const auto found, t.engine->NonFiniteGradients());
  TESSERA_RETURN_IF_ERROR(CheckAllAreCounted(&t));
  TESSERA_RETURN_IF_ERROR(t.engine->ZeroGrad());
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));  // it goes on
  return absl::StrCat(TextOf(found),
                      t.parameter("blocks.1.up.weight").numel() - 1, " ",
                      t.parameter("blocks.0.up.bias").numel() - 3);
}

class NonFiniteTest : public ::testing::TestWithParam<int> {
 protected:
  std::string stage() const { return absl::StrCat(GetParam()); }
};

TEST_P(NonFiniteTest, IsToldBeforeAStep) {
  for (const int world_size : {1, 2}) {
    for (const std::string dtype : {" fp32", " bf16"}) {
      const std::vector<std::string> told =
          RunOnRanks(world_size, "AskedFor", stage() + dtype);
      const std::vector<std::string> words = absl::StrSplit(told[0], ' ');
      ASSERT_EQ(words.size(), 10u) << told[0];
      const std::string weights = words[8], biases = words[9];
      EXPECT_THAT(
          told,
          Each(AllOf(
              HasSubstr(absl::StrCat("blocks.0.up.bias 2 ", biases, " @")),
              HasSubstr(absl::StrCat("; blocks.1.up.weight ", weights, " 0 @")),
              Not(HasSubstr("no unit")))));
      EXPECT_EQ(told, RunOnRanks(world_size, "AskedFor", "2" + dtype));
    }
  }
}

// Micro-batch 4 has one element of a gradient that overflows, 1 all.
TESSERA_RANK_FUNCTION(Reported) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, Make(args, world, true));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  if (!t.engine->last_step().non_finite.empty()) return "of a step";
  const absl::Status status = t.TrainStep(4);
  std::string text = TextOf(t.engine->last_step().non_finite);
  absl::StrAppend(&text, status.ToString());
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  if (!t.engine->last_step().non_finite.empty()) return "of an older step";
  return text;
}

TEST_P(NonFiniteTest, IsInTheReportOfASkippedStep) {
  EXPECT_THAT(
      RunOnRanks(2, "Reported", stage() + " fp16"),
      Each(AllOf(HasSubstr("out.bias 0 1 @"), HasSubstr("OUT_OF_RANGE"))));
}

// Without the key the error alone names the gradients, after a skip that a
// warning has told of.
TESSERA_RANK_FUNCTION(LeastScaleNames) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, Make(args, world, false));
  for (const int micro_batch : {0, 4}) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(micro_batch));
  }
  return t.TrainStep(4).ToString();
}

TEST_P(NonFiniteTest, IsNamedWhereNoScaleIsLeft) {
  EXPECT_THAT(
      RunOnRanks(2, "LeastScaleNames", stage() + " fp16 twice"),
      Each(AllOf(HasSubstr("OUT_OF_RANGE"),
                 HasSubstr("in this step the gradients of 'out.bias' of unit "
                           "'"),
                 HasSubstr("' (0 NaN, 1 infinite; in the shard of rank "))));
}

INSTANTIATE_TEST_SUITE_P(Stages, NonFiniteTest, ::testing::Range(0, 4),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

TEST(NonFiniteOnDiskTest, IsFound) {
  EXPECT_THAT(RunOnRanks(2, "Reported", "3 fp16 disk"),
              Each(HasSubstr("out.bias 0 1 @")));
}

// ---- runs in which nothing is trained any more

int Count(absl::string_view text, absl::string_view what) {
  int count = 0;
  for (size_t at = text.find(what); at != text.npos;
       at = text.find(what, at + 1)) {
    ++count;
  }
  return count;
}

// args: "stage dtype", with a static scale. Losses of rank 1 are NaN ("!") or
// not ("."); the codes of the steps, and the first error.
TESSERA_RANK_FUNCTION(SkipsInARow) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TrainingSpec spec;
  TESSERA_CHECK(absl::SimpleAtoi(words[0], &spec.stage));
  spec.dtype = words[1];
  spec.loss_scale = 8;
  proto::Config config = ConfigOf(spec);
  config.mutable_precision()->set_max_skipped_in_a_row(3);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()), config,
                               world.communicator()));
  std::string codes, message;
  for (const char how : std::string(".!!.!!!!.!!!")) {
    at::Tensor loss = t.Loss(0);
    if (how == '!' && t.rank == 1) loss = loss * kNan;
    TESSERA_RETURN_IF_ERROR(t.engine->Backward(loss));
    const absl::Status status = t.engine->Step();
    absl::StrAppend(&codes, status.ok() ? "." : "E");
    if (message.empty()) message = std::string(status.message());
  }
  absl::StrAppend(&codes, " ", t.engine->step(), " ",
                  t.engine->last_step().skipped_steps, "\n");
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(codes, message);
}

TEST_P(NonFiniteTest, TooManyStepsSkippedInARowAreAnError) {
  for (const std::string dtype : {" bf16", " fp16"}) {
    EXPECT_THAT(
        RunOnRanks(2, "SkipsInARow", stage() + dtype),
        Each(AllOf(HasSubstr("......EE...E 3 9\n"),
                   HasSubstr("Step: 3 optimizer steps in a row were skipped"),
                   HasSubstr("(after step 2)"),
                   HasSubstr("precision.max_skipped_in_a_row"),
                   HasSubstr("; in this step the gradients of 'in.weight' of "
                             "unit '"),
                   HasSubstr(" NaN, 0 infinite; in the shard"))));
    // Said once by rank 0, with the parameters; the loss by the rank whose it
    // is.
    const std::string& first = RankPool::Get(2)->stderr_of(0);
    const std::string& second = RankPool::Get(2)->stderr_of(1);
    EXPECT_EQ(Count(first, "optimizer step 2 was skipped"), 1) << first;
    EXPECT_EQ(Count(first, " was skipped"), 1) << first;
    EXPECT_THAT(first, HasSubstr("gradients of 'in.weight' of unit"));
    EXPECT_EQ(Count(first, "the loss of this rank"), 0) << first;
    EXPECT_EQ(Count(second, " was skipped"), 0) << second;
    EXPECT_EQ(Count(second, "the loss of this rank in optimizer step 2 is nan"),
              1)
        << second;
  }
}

// args: "dtype as". Where no step is skipped, and of what dtype the loss is.
TESSERA_RANK_FUNCTION(LossesOfAKind) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TrainingSpec spec;
  spec.dtype = words[0];
  spec.check_overflow = false;
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  for (const float factor : {1.0f, kInfinity, kNan, 1.0f}) {
    at::Tensor loss = t.Loss(0) * factor;
    if (words[1] != "fp32") {
      loss = loss.to(words[1] == "bf16" ? at::kBFloat16 : at::kHalf);
    }
    TESSERA_RETURN_IF_ERROR(t.engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
  }
  return std::to_string(t.engine->step());
}

TEST(LossTest, OneThatIsNotFiniteIsSaidOnceInAnyPrecision) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    EXPECT_THAT(RunOnRanks(1, "LossesOfAKind", dtype + " fp32"), Each("4"));
    const std::string& said = RankPool::Get(1)->stderr_of(0);
    EXPECT_EQ(Count(said, "the loss of this rank in optimizer step 2 is inf"),
              1)
        << said;
    EXPECT_EQ(Count(said, "the loss of this rank"), 1) << said;
    EXPECT_THAT(said, HasSubstr("the parameters become NaN, too"));
    EXPECT_THAT(said, Not(HasSubstr("significant bits")));
  }
}

TEST(LossTest, OneOf16BitsIsSaidOnce) {
  for (const auto& [dtype, name] :
       {std::pair("bf16", "bfloat16, which has 8 "),
        std::pair("fp16", "float16, which has 11 ")}) {
    RunOnRanks(1, "LossesOfAKind", absl::StrCat("fp32 ", dtype));
    const std::string& said = RankPool::Get(1)->stderr_of(0);
    EXPECT_EQ(Count(said, "significant bits"), 1) << said;
    EXPECT_THAT(said, AllOf(HasSubstr(absl::StrCat("the loss is ", name)),
                            HasSubstr("logits.to(at::kFloat)")));
  }
}

TEST(DescribeNonFiniteTest, NamesTheFirst) {
  const NonFiniteGradient one = {"w", "block", 2, 1, {0, 3}};
  const NonFiniteGradient other = {"b", "block", 0, 4, {1}};
  EXPECT_EQ(DescribeNonFinite({one, other, one}, 2),
            "'w' of unit 'block' (2 NaN, 1 infinite; in the shards of ranks 0, "
            "3), 'b' of unit 'block' (0 NaN, 4 infinite; in the shard of rank "
            "1) and 1 more");
}

}  // namespace
}  // namespace tessera
