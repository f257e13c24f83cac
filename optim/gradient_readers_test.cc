// That an early update does not count once the gradient that it reads is
// another.
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "comm/fake_communicator_test_util.h"
#include "gtest/gtest.h"
#include "offload/update_stream.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/schedule.h"
#include "sharding/gradient/flat_gradient.h"

namespace tessera {
namespace {

// Its unit has a gradient of an earlier micro-batch.
class GradientReadersTest : public ::testing::Test {
 protected:
  GradientReadersTest() {
    UpdateStreamOptions stream;
    stream.most_states = 0;  // there is no disk
    stream_ = UpdateStream::Create(/*disk=*/nullptr, stream).value();
    FlatParameterOptions options;
    options.stage = Stage::Of(1);
    options.stream = stream_;
    named_ = {{"p", torch::ones({128}).requires_grad_(), 0}};
    flat_ =
        FlatParameter::Prepare("unit", named_, options,
                               std::make_shared<FakeCommunicator>(0, 2),
                               std::make_shared<Schedule>(ScheduleOptions()))
            .value();
    TESSERA_EXPECT_OK(flat_->Adopt());
    gradient_ = std::make_unique<FlatGradient>(flat_, std::vector<bool>{true});
    TakeSums();
    TESSERA_EXPECT_OK(gradient_->Commit({true}));
  }
  ~GradientReadersTest() override { flat_->Abandon(); }

  void TakeSums() {
    const at::Tensor whole = gradient_->Outgoing(/*predivide=*/1).value();
    const at::Tensor sums = gradient_->PlaceOfSums(whole).value();
    TESSERA_EXPECT_OK(gradient_->TakeSums(sums, /*divisor=*/1));
  }
  // Whether an update that was begun before `change` can be kept after it.
  template <typename Change>
  bool KeptAfter(const Change& change) {
    StreamedUpdate update;
    update.numel = 1;
    update.compute = [](Range, const std::vector<char*>&) {
      return absl::OkStatus();
    };
    const UpdateStream::Early early = stream_->PushEarly(std::move(update));
    change();
    return stream_->Keep(early, nullptr).has_value();
  }

  std::shared_ptr<UpdateStream> stream_;
  std::vector<NamedParameter> named_;
  std::shared_ptr<FlatParameter> flat_;
  std::unique_ptr<FlatGradient> gradient_;
};

TEST_F(GradientReadersTest, WhoOnlyReadsDropsNone) {
  EXPECT_TRUE(KeptAfter([&] { TESSERA_EXPECT_OK(gradient_->Raise()); }));
}

TEST_F(GradientReadersTest, WhoChangesItDropsThem) {
  EXPECT_FALSE(
      KeptAfter([&] { TESSERA_EXPECT_OK(gradient_->RaiseToChange()); }));
}

TEST_F(GradientReadersTest, AnotherMicroBatchDropsThem) {
  TakeSums();
  EXPECT_FALSE(
      KeptAfter([&] { TESSERA_EXPECT_OK(gradient_->Commit({true})); }));
}

TEST_F(GradientReadersTest, ZeroDropsThem) {
  EXPECT_FALSE(KeptAfter([&] { gradient_->Zero(); }));
}

}  // namespace
}  // namespace tessera
