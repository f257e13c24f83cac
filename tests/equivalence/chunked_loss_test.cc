// LinearCrossEntropy under an engine (the model ChunkedLoss): the oracle's
// bits, which calls the same, at all stages, in 16 bits, accumulated, computed
// again, and where ranks have different numbers of chunks.
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

TrainingSpec ChunkedLoss(int stage) {
  TrainingSpec spec;
  spec.model = "ChunkedLoss";
  spec.stage = stage;
  spec.gradients = true;
  return spec;
}

class ChunkedLossTest : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Stages, ChunkedLossTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

// Each unit is freed and poisoned after each use.
TEST_P(ChunkedLossTest, EqualsTheOracle) {
  TrainingSpec spec = ChunkedLoss(GetParam());
  spec.poison = true;
  spec.max_live_parameters = 0;
  ExpectEqualsOracle(spec, 2);
}

TEST_P(ChunkedLossTest, InSixteenBitsWithAccumulation) {
  for (const char* dtype : {"bf16", "fp16"}) {
    TrainingSpec spec = ChunkedLoss(GetParam());
    spec.dtype = dtype;
    spec.accumulation = 2;
    spec.clipping = 0.5;
    spec.outcomes = true;
    SCOPED_TRACE(dtype);
    ExpectEqualsOracle(spec, 2);
  }
}

TEST_P(ChunkedLossTest, Recomputed) {
  TrainingSpec spec = ChunkedLoss(GetParam());
  spec.dtype = "bf16";
  spec.recompute = "auto/full/never";
  ExpectEqualsOracle(spec, 2);
}

// Ranks have one chunk and four: a gather for each chunk would be other
// collectives on each.
TEST(ChunkedLossGathersTest, OncePerCall) {
  TrainingSpec spec = ChunkedLoss(3);
  spec.poison = true;
  spec.max_live_parameters = 0;
  spec.max_reuse_distance = 0;
  spec.prefetch_bucket_size = 0;
  spec.served = "off";
  spec.shared = "off";
  ExpectEqualsOracle(spec, 2);
}

}  // namespace
}  // namespace tessera
