// Tests what FlopsProfile counts of a forward whose operations are known, at
// stages without and with gathers, by operator and by unit.
#include <torch/torch.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "engine/observe/flops_profile.h"
#include "gmock/gmock.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// A convolution, a layer, attention over its result, a head.
class Net : public TestModel {
 public:
  Net() {
    conv_ = register_module(
        "conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(2, 4, 3)));
    qkv_ = register_module("qkv", torch::nn::Linear(4, 12));
    head_ = register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(4, 5).bias(false)));
  }
  at::Tensor Loss(int /*rank*/, int64_t /*micro_batch*/) override {
    at::Tensor h = conv_(torch::ones({3, 2, 8}));  // [3, 4, 6]
    h = qkv_(torch::relu(h).transpose(1, 2));      // [3, 6, 12]
    const auto parts = h.reshape({3, 6, 3, 4}).unbind(2);
    const auto heads = [](const at::Tensor& t) { return t.unsqueeze(1); };
    h = at::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]),
                                         heads(parts[2]));  // [3, 1, 6, 4]
    return head_(h).square().mean();
  }

 private:
  torch::nn::Conv1d conv_{nullptr};
  torch::nn::Linear qkv_{nullptr}, head_{nullptr};
};

constexpr int64_t kConv = 2 * 3 * 6 * (4 * 2 * 3);
constexpr int64_t kQkv = 2 * 3 * 6 * 4 * 12;
constexpr int64_t kAttention = 2 * (2 * 3 * 6 * 6 * 4);
constexpr int64_t kHead = 2 * 3 * 6 * 4 * 5;

std::string ToText(const FlopCounts& counts) {
  std::string text = absl::StrCat("total ", counts.total());
  for (const auto& [unit, sum] : counts.by_unit) {
    absl::StrAppend(&text, ", ", unit, " ", sum.flops);
  }
  return text;
}

TESSERA_RANK_FUNCTION(CountForward) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  torch::manual_seed(1);
  proto::Config config = ConfigOf(spec);
  for (const char* unit : {"torch::nn::Conv1dImpl", "torch::nn::LinearImpl"}) {
    config.mutable_sharding()->add_unit_classes(unit);
  }
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(std::make_shared<Net>(), config, world.communicator()));
  FlopsProfile profile;
  profile.Start();
  const at::Tensor loss = t.Loss(0);
  profile.Stop(0.5);
  // Later operations are not counted.
  TESSERA_RETURN_IF_ERROR(t.engine->Backward(loss));
  TESSERA_RETURN_IF_ERROR(t.engine->Step());
  (void)t.Loss(1);
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return ToText(profile.counts());
}

TEST(FlopsTest, AForwardIsCountedByTheUnitsThatItUses) {
  for (const int stage : {0, 3}) {
    TrainingSpec spec;
    spec.stage = stage;
    EXPECT_THAT(RunOnRanks(2, "CountForward", spec.ToText()),
                Each(absl::StrCat("total ", kConv + kQkv + kAttention + kHead,
                                  ", conv ", kConv, ", head ", kHead, ", qkv ",
                                  kQkv + kAttention)))
        << "stage " << stage;
  }
}

// The configuration alone switches it on.
TESSERA_RANK_FUNCTION(TrainNet) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  torch::manual_seed(1);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(std::make_shared<Net>(), ConfigOf(spec),
                               world.communicator()));
  for (int i = 0; i < 3; ++i) TESSERA_RETURN_IF_ERROR(t.TrainStep(i));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return "trained";
}

TEST(FlopsTest, TheConfigurationWritesATable) {
  const TempFolder folder;
  TrainingSpec spec;
  spec.stage = 2;
  spec.more =
      absl::StrCat("flops_profiler{enabled:true,profile_step:1,output_file:'",
                   folder / "flops", "'}");
  EXPECT_THAT(RunOnRanks(2, "TrainNet", spec.ToText()), Each("trained"));
  const auto table = ReadWholeFile(folder / "flops");
  TESSERA_ASSERT_OK(table.status());
  EXPECT_THAT(*table,
              AllOf(HasSubstr("the first forward of step 2, rank 0 of 2"),
                    HasSubstr("aten::mm"), HasSubstr("aten::convolution"),
                    HasSubstr("unit "), HasSubstr("forward latency")));
}

}  // namespace
}  // namespace tessera
