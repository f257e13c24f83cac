#include "tests/support/training.h"

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

TEST(TrainingSpec, IsWhatItsTextSays) {
  TrainingSpec spec;
  spec.model = "Gpt";
  spec.clipping = 0.1;
  spec.gradients = true;
  spec.reshard = "false";
  spec.prefetch_bucket_size = int64_t{1} << 40;
  const TrainingSpec same = TrainingSpec::FromText(spec.ToText());
  EXPECT_EQ(same.ToText(), spec.ToText());
  EXPECT_EQ(same.model, "Gpt");
  EXPECT_EQ(same.clipping, 0.1);
  EXPECT_EQ(same.gradients, true);
  EXPECT_EQ(same.reshard, "false");
  EXPECT_EQ(same.prefetch_bucket_size, int64_t{1} << 40);
  EXPECT_THAT(spec.ToText(), Not(HasSubstr("\n")));
}

TEST(TrainingSpec, TextHasWhatIsNotTheDefault) {
  EXPECT_EQ(TrainingSpec().ToText(), "");
  const TrainingSpec spec =
      TrainingSpec::FromText("stage=2 reduce_dtype= steps=3 clipping=.5");
  EXPECT_EQ(spec.ToText(), "clipping=0x1p-1 stage=2");
}

TEST(TrainingSpec, TextMustBeOfItsFields) {
  EXPECT_THROW(TrainingSpec::FromText("stages=2"), c10::Error);
  EXPECT_THROW(TrainingSpec::FromText("stage=two"), c10::Error);
  EXPECT_THROW(TrainingSpec::FromText("poison=7"), c10::Error);
}

TEST(TrainWithOracle, TrainsOnceWhatGivesTheSame) {
  TrainingSpec spec;
  const std::vector<Record>& first = TrainWithOracle(spec, 2);
  TrainingSpec other = spec;
  other.stage = 3;
  other.overlap = false;
  other.reshard = "false";
  other.max_live_parameters = 0;
  other.poison = true;
  EXPECT_EQ(&TrainWithOracle(other, 2), &first);
  EXPECT_NE(&TrainWithOracle(spec, 1), &first);
  other.dtype = "bf16";
  EXPECT_NE(TrainWithOracle(other, 2), first);
}

TEST(TrainWithOracle, RecordsWhatBecameOfSteps) {
  TrainingSpec spec;
  spec.model = "Overflows";
  spec.dtype = "fp16";
  spec.initial_scale_power = 6;
  spec.hysteresis = 1;
  spec.outcomes = true;
  const Record record = TrainWithOracle(spec, 2)[1];
  EXPECT_THAT(record,
              Contains(MatchesRegex("step 0: scale 0x1p\\+6, norm 0x1.*")));
  EXPECT_THAT(record, Contains("step 1: skipped, scale 0x1p+6"));
  EXPECT_THAT(record,
              Contains(MatchesRegex("step 2: scale 0x1p\\+5, norm 0x1.*")));
}

TEST(TrainWithOracle, KeepsAFixedScale) {
  TrainingSpec spec;
  spec.model = "Overflows";
  spec.dtype = "fp16";
  spec.loss_scale = 48;
  spec.hysteresis = 1;
  spec.outcomes = true;
  const Record record = TrainWithOracle(spec, 2)[1];
  EXPECT_THAT(record, Contains("step 1: skipped, scale 0x1.8p+5"));
  EXPECT_THAT(record,
              Contains(MatchesRegex("step 2: scale 0x1.8p\\+5, norm 0x1.*")));
}

TEST(TrainWithOracle, DependsOnAllThatIsComputed) {
  const std::string text =
      "model=LargeNorm steps=2 accumulation=2 dtype=bf16 gradients=1";
  const Record& plain = TrainWithOracle(TrainingSpec::FromText(text), 2)[0];
  for (const char* change :
       {"reduce_dtype=fp32", "accumulation_mode=local", "reduction=sum",
        "predivide=3", "clipping=1", "dtype=fp16", "fp32_norms=1",
        "dtype=fp16 loss_scale=4096", "dtype=fp16 initial_scale_power=3"}) {
    // Where a name occurs twice, the first one counts.
    const TrainingSpec spec =
        TrainingSpec::FromText(absl::StrCat(change, " ", text));
    EXPECT_EQ(TrainWithOracle(spec, 2)[0] == plain,
              absl::StartsWith(change, "fp32_norms"))
        << change;
  }
}

}  // namespace
}  // namespace tessera
