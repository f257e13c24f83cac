// Every test model is traced, with values of most tensors known and without.
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/trace/trace.h"
#include "tests/models/models.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

class PlanModelsTest
    : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(PlanModelsTest, IsTraced) {
  const auto& [name, known_bytes] = GetParam();
  const auto model = MakeTestModel(name);
  TraceOptions options;
  options.tracer.known_bytes = known_bytes;
  const auto trace = TakeTrace(
      *model, [&] { return model->Loss(/*rank=*/0, /*micro_batch=*/0); },
      options);
  // Its experts take what the router says.
  if (name == "Experts") {
    EXPECT_THAT(trace, StatusIs(absl::StatusCode::kFailedPrecondition,
                                HasSubstr("[router] aten::nonzero")));
    return;
  }
  // This model has a product of a sparse matrix.
  if (name == "GraphNet") {
    EXPECT_THAT(trace, ::testing::Not(IsOk()));
    return;
  }
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_GT(trace->Peak().bytes, 0);
}

std::vector<std::string> Names() {
  auto names = TestModelNames();
  for (const char* name : {"Resnet", "Seq2Seq", "Unet", "Lora", "PackedGru",
                           "Vit", "Autoencoder", "Experts", "GraphNet"}) {
    names.push_back(name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(
    All, PlanModelsTest,
    ::testing::Combine(::testing::ValuesIn(Names()),
                       ::testing::Values(1 << 16, 256)),
    [](const ::testing::TestParamInfo<std::tuple<std::string, int>>& info) {
      return absl::StrCat(std::get<0>(info.param), std::get<1>(info.param));
    });

}  // namespace
}  // namespace tessera
