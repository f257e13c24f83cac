// Traces against the truth: what libtorch's allocator was asked for in a plain
// forward and backward of the same model, at its most and in between.
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "sharding/trace/construct_fake.h"
#include "sharding/trace/counted_tensors_test_util.h"
#include "sharding/trace/trace.h"
#include "sharding/trace/traced_models_test_util.h"

namespace tessera {
namespace {

using at::Tensor;

double OffPercent(int64_t traced, int64_t measured) {
  return 100.0 *
         (static_cast<double>(traced) / static_cast<double>(measured) - 1.0);
}

class TraceAccuracyTest : public ::testing::TestWithParam<std::string> {};

TEST_P(TraceAccuracyTest, PeakAndSavedBytesAreTheAllocators) {
  CountedTensors& counted = CountedTensors::Global();
  const auto make = TracedModels().at(GetParam());
  TracedModel real = make();
  real.loss().backward();  // what libtorch keeps for good
  real.module->zero_grad(/*set_to_none=*/true);

  const int64_t before = counted.held_bytes();
  counted.ResetPeak();
  Tensor loss = real.loss();
  const int64_t saved = counted.held_bytes() - before;
  loss.backward();
  const int64_t peak = counted.peak_bytes() - before;
  loss.reset();

  absl::StatusOr<TracedModel> fake = ConstructFake(make);
  ASSERT_TRUE(fake.ok()) << fake.status();
  const absl::StatusOr<Trace> trace = TakeTrace(*fake->module, fake->loss);
  ASSERT_TRUE(trace.ok()) << trace.status();
  const TracePeak traced = trace->Peak();
  std::cout << absl::StrCat(
      GetParam(), ": peak traced ", traced.bytes, " measured ", peak, " ",
      OffPercent(traced.bytes, peak), " %; saved traced ", trace->saved_bytes,
      " measured ", saved, " ", OffPercent(trace->saved_bytes, saved), " %\n");
  EXPECT_LE(std::abs(OffPercent(traced.bytes, peak)), 5);
  EXPECT_LE(std::abs(OffPercent(trace->saved_bytes, saved)), 2);
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const auto& model : TracedModels()) names.push_back(model.first);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, TraceAccuracyTest, ::testing::ValuesIn(Names()),
                         [](const ::testing::TestParamInfo<std::string>& info) {
                           return info.param;
                         });

}  // namespace
}  // namespace tessera
