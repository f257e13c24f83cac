#include "optim/custom/torch_optimizer.h"

#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

namespace optim = torch::optim;
using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <typename Class, typename Options>
TorchFactory Makes(Options options) {
  return [options](std::vector<at::Tensor> parameters) {
    return std::make_unique<Class>(std::move(parameters), options);
  };
}

TEST(FromTorch, NamesTheStatesOfLibtorchsClasses) {
  const auto described = [](const TorchFactory& factory) {
    const auto made = FromTorch(factory);
    return made.ok() ? DescribeCustom(*made) : made.status().ToString();
  };
  EXPECT_EQ(described(Makes<optim::SGD>(optim::SGDOptions(1))),
            "torch::optim::SGD()");
  EXPECT_EQ(described(Makes<optim::SGD>(optim::SGDOptions(1).momentum(0.5))),
            "torch::optim::SGD(momentum_buffer)");
  EXPECT_EQ(described(Makes<optim::AdamW>(optim::AdamWOptions())),
            "torch::optim::AdamW(exp_avg,exp_avg_sq)");
  EXPECT_EQ(described(Makes<optim::Adam>(optim::AdamOptions().amsgrad(true))),
            "torch::optim::Adam(exp_avg,exp_avg_sq,max_exp_avg_sq)");
  EXPECT_EQ(described(Makes<optim::Adagrad>(optim::AdagradOptions())),
            "torch::optim::Adagrad(sum)");
  EXPECT_EQ(described(Makes<optim::RMSprop>(
                optim::RMSpropOptions().momentum(0.5).centered(true))),
            "torch::optim::RMSprop(square_avg,momentum_buffer,grad_avg)");
}

// One that is made of a class may keep more than that.
class Derived : public optim::SGD {
 public:
  using SGD::SGD;
};

TEST(FromTorch, RefusesWhatItCannotCall) {
  EXPECT_THAT(FromTorch(Makes<optim::LBFGS>(optim::LBFGSOptions(1))),
              StatusIs(StatusCode::kUnimplemented, HasSubstr("LBFGS")));
  EXPECT_THAT(FromTorch(nullptr),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("no factory")));
  EXPECT_THAT(FromTorch([](std::vector<at::Tensor>) { return nullptr; }),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("over the parameters that it is given")));
  const auto of_others = [](const std::vector<at::Tensor>&) {
    return std::make_unique<optim::SGD>(std::vector<at::Tensor>{at::zeros({1})},
                                        optim::SGDOptions(1));
  };
  EXPECT_THAT(FromTorch(of_others),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("over the parameters that it is given")));
  EXPECT_THAT(
      FromTorch(Makes<Derived>(optim::SGDOptions(1).momentum(0.5))),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("expected a name")));
  EXPECT_THAT(
      FromTorch(Makes<Derived>(optim::SGDOptions(1)), "derived", TorchStates()),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("TorchStates")));
  EXPECT_THAT(
      FromTorch(Makes<optim::SGD>(optim::SGDOptions(-1))),
      StatusIs(StatusCode::kInternal, HasSubstr("Invalid learning rate: -1")));
}

CustomStep StepOf(int64_t number, int64_t begin, const at::Tensor& master,
                  const OptimizerOptions& options) {
  return {"w",    {},      begin,  begin + master.numel(), 0,
          number, options, master, at::ones_like(master),  {}};
}

// Its states belong to parts, and go on from step to step.
TEST(FromTorch, AnUnknownClassGoesOnWhereItWas) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const CustomOptimizer custom,
      FromTorch(Makes<Derived>(optim::SGDOptions(7).momentum(0.5)), "derived"));
  EXPECT_TRUE(custom.keeps_states);
  OptimizerOptions options;
  options.lr = 1;
  at::Tensor a = at::zeros({1}), b = at::zeros({1});
  TESSERA_EXPECT_OK(custom.step(StepOf(1, 0, a, options)));
  TESSERA_EXPECT_OK(custom.step(StepOf(1, 1, b, options)));
  at::Tensor moved = a.clone();
  TESSERA_EXPECT_OK(custom.step(StepOf(2, 0, moved, options)));
  EXPECT_EQ(a.item<float>(), -1);
  EXPECT_EQ(moved.item<float>(), -2.5);
  EXPECT_THAT(custom.step(StepOf(2, 2, a, options)),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("has made 0 steps of elements [2, 3)")));
  // Another engine begins.
  at::Tensor anew = at::zeros({1});
  TESSERA_EXPECT_OK(custom.step(StepOf(1, 0, anew, options)));
  EXPECT_EQ(anew.item<float>(), -1);
}

}  // namespace
}  // namespace tessera
