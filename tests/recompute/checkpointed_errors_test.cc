// What a checkpointed region's function may not do, and what is said of it.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "comm/group/self_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/recompute/checkpointed/checkpointed_sequential.h"
#include "tests/dispatch/held_bytes.h"
#include "tests/recompute/checkpointed_util.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;

// What backward says of a region whose function is `f`, run a second time.
std::string BackwardError(const std::function<Tensor(const Tensor&, bool)>& f,
                          CheckpointOptions options = {}) {
  options.name = "block";
  bool again = false;
  const Tensor x = torch::ones({2, 3}).requires_grad_(true);
  const Tensor y = Checkpointed(
      options, [&](const Tensor& t) { return f(t, again); }, x);
  again = true;
  return ErrorOf([&] { y.sum().backward(); });
}

TEST(CheckpointedErrorTest, OtherSizesDtypesAndNumbers) {
  EXPECT_THAT(
      BackwardError([](const Tensor& x, bool again) {
        return (again ? x.narrow(0, 0, 1) : x).exp().sin();
      }),
      AllOf(HasSubstr("[block] the function of a checkpointed region must do "
                      "the same each time: tensor 0 of those that autograd "
                      "saves (by aten::exp) was Float [2, 3] with strides"),
            HasSubstr("in forward and is Float [1, 3] with strides [3, 1] on "
                      "cpu (by aten::exp) when it is run again"),
            HasSubstr("(for node SinBackward0)")));
  EXPECT_THAT(BackwardError([](const Tensor& x, bool again) {
                return x.to(again ? at::kDouble : at::kFloat).exp().sum();
              }),
              HasSubstr("and is Double [2, 3]"));
  EXPECT_THAT(BackwardError([](const Tensor& x, bool again) {
                return again ? x + 1 : x.exp().sin();
              }),
              HasSubstr("autograd saved 2 tensors in forward and only 0 when "
                        "it is run again (for node SinBackward0)"));
  // All that is needed comes before what is more.
  EXPECT_EQ(BackwardError([](const Tensor& x, bool again) {
              return again ? x.exp().sin().exp() : x.exp().sin();
            }),
            "");
}

TEST(CheckpointedErrorTest, OtherValues) {
  const auto f = [](const Tensor& x, bool) {
    static auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    return (x * torch::rand({2, 3}, generator)).exp();
  };
  CheckpointOptions always, never;
  always.check = CheckpointOptions::Check::kAlways;
  never.check = CheckpointOptions::Check::kNever;
  EXPECT_THAT(BackwardError(f, always),
              HasSubstr("tensor 0 of those that autograd saves (by aten::mul), "
                        "Float [2, 3], has other values when it is run again "
                        "than in forward: is there randomness that does not "
                        "come from the default generators"));
  EXPECT_EQ(BackwardError(f, never), "");
}

TEST(CheckpointedErrorTest, ValuesOfTheFirstRegionsOnly) {
  const auto f = [](const Tensor& x) {
    static float factor = 1;
    return (x * (factor += 1)).sin();
  };
  int errors = 0;
  for (int i = 0; i < 70; ++i) {
    const Tensor x = torch::ones({2}, torch::requires_grad());
    const Tensor y = Checkpointed(f, x);
    errors += ErrorOf([&] { y.sum().backward(); }).empty() ? 0 : 1;
  }
  EXPECT_EQ(errors, 64);
}

TEST(CheckpointedErrorTest, FunctionsThatThrow) {
  EXPECT_THAT(BackwardError([](const Tensor& x, bool again) {
                TORCH_CHECK(!again, "the file is gone");
                return x.exp();
              }),
              AllOf(HasSubstr("[block] the function of a checkpointed region, "
                              "which backward runs again (for node "
                              "ExpBackward0): "),
                    HasSubstr("the file is gone")));
  // In forward it is the function's own, and all is as before.
  const Tensor x = torch::ones({2}, torch::requires_grad());
  EXPECT_EQ(ErrorOf([&] {
              Checkpointed(
                  [](const Tensor& t) -> Tensor {
                    const Tensor y = t.exp().sin();
                    throw std::runtime_error("mine");
                  },
                  x);
            }),
            "test: mine");
  EXPECT_EQ(OperatorWatch::Current(), nullptr);
  EXPECT_FALSE(FollowsAll());
}

TEST(CheckpointedErrorTest, ChangesBetweenForwardAndBackward) {
  Tensor x = torch::ones({2, 3}), bias = torch::ones({3});
  const Tensor w = torch::ones({3}, torch::requires_grad());
  const auto f = [&](const Tensor& t) { return (t * w + bias).exp(); };
  Tensor y = Checkpointed(f, x);
  x.add_(1);
  EXPECT_THAT(ErrorOf([&] { y.sum().backward(); }),
              AllOf(HasSubstr("modified by an inplace operation"),
                    HasSubstr("is at version 1; expected version 0")));
  // What autograd itself would not have kept.
  y = Checkpointed(f, x);
  bias.add_(1);
  EXPECT_THAT(ErrorOf([&] { y.sum().backward(); }),
              HasSubstr("[checkpoint] a tensor of sizes [3], which operator "
                        "aten::add reads in there, was changed in place "
                        "between forward and backward: it is at version 1, "
                        "expected version 0"));
}

TEST(CheckpointedErrorTest, WritesThatAutogradForbidsAreErrorsHere) {
  EXPECT_THAT(BackwardError([](const Tensor& x, bool) {
                Tensor y = x.exp();
                const Tensor z = y.sin();
                y.add_(1);
                return z.exp();
              }),
              AllOf(HasSubstr("modified by an inplace operation"),
                    HasSubstr("[block]")));
}

}  // namespace
}  // namespace tessera
