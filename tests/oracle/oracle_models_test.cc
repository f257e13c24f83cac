// The oracle with the test models, against plain libtorch where that does the
// same.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/models/models.h"
#include "tests/support/libtorch_adamw.h"
#include "verify/oracle.h"

namespace tessera {
namespace {

using at::Tensor;
using ::testing::ElementsAre;

at::Tensor ModelLoss(torch::nn::Module& module, int rank, int64_t micro_batch) {
  return dynamic_cast<TestModel&>(module).Loss(rank, micro_batch);
}

Oracle OracleOf(const std::string& model, const OracleOptions& options) {
  return Oracle([=] { return MakeTestModel(model); }, options);
}

// ---- One rank in float32 is a plain training loop

struct PlainLoop {
  PlainLoop(const std::string& model, const OracleOptions& with)
      : options(with) {
    torch::manual_seed(options.model_seed);
    module = MakeTestModel(model);
    torch::manual_seed(options.rank_seed);
    for (const auto& p : module->named_parameters()) {
      names.push_back(p.key());
      parameters.push_back(p.value());
      states.push_back(
          {torch::zeros_like(p.value()), torch::zeros_like(p.value())});
    }
  }
  void Backward() {
    Tensor loss = module->Loss(0, micro_batch++);
    loss.backward(torch::full_like(loss, 1.0 / options.accumulation));
  }
  void Step() {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].grad().defined()) continue;
      auto& [exp_avg, exp_avg_sq, steps] = states[i];
      LibtorchAdamW(parameters[i], exp_avg, exp_avg_sq, parameters[i].grad(),
                    ++steps, options.optimizer);
      parameters[i].mutable_grad().reset();
    }
  }
  struct State {
    Tensor exp_avg, exp_avg_sq;
    int64_t steps = 0;
  };
  const OracleOptions options;
  std::shared_ptr<TestModel> module;
  std::vector<std::string> names;
  std::vector<Tensor> parameters;
  std::vector<State> states;
  int64_t micro_batch = 0;
};

class PlainTest : public ::testing::TestWithParam<std::string> {};

TEST_P(PlainTest, FiveSteps) {
  OracleOptions options;
  options.accumulation = 2;
  options.model_seed = 5;
  options.rank_seed = 6;
  options.optimizer.lr = 1e-2;
  options.optimizer.weight_decay = 0.1;
  Oracle oracle = OracleOf(GetParam(), options);
  PlainLoop plain(GetParam(), options);
  for (int step = 0; step < 5; ++step) {
    oracle.TrainStep(ModelLoss);
    plain.Backward();
    plain.Backward();
    plain.Step();
  }
  ASSERT_EQ(oracle.parameter_names(), plain.names);
  for (size_t i = 0; i < plain.names.size(); ++i) {
    EXPECT_TRUE(oracle.parameter(plain.names[i]).equal(plain.parameters[i]))
        << plain.names[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PlainTest,
                         ::testing::Values("Mlp", "Gpt", "ConvNorm",
                                           "SharedStorage", "ChangingRank"),
                         [](const auto& info) { return info.param; });

// Returns the relative error of libtorch's norm. Sums of n squares in float32,
// in any order, are off by n u (u = 2^-24, a term each), so the root by n u /
// 2. The root over k parameters' norms adds k u / 2, and roundings of roots 2
// u.
double NormBound(const std::vector<Tensor>& parameters) {
  int64_t most = 0;
  for (const Tensor& p : parameters) most = std::max(most, p.numel());
  const auto k = static_cast<double>(parameters.size());
  return std::ldexp(static_cast<double>(most) / 2 + k / 2 + 2, -24);
}

// The step is lr * g / (|g| + 1): its slope is lr at most, so a relative error
// in g, that of the norm and two roundings, arrives as lr * |g| of it; then a
// rounding or so of the parameter and of each of five operations.
TEST(Plain, ClippingIsThatOfLibtorch) {
  OracleOptions options;
  options.optimizer.beta1 = options.optimizer.beta2 = 0;
  options.optimizer.eps = 1;
  options.max_norm = 1;
  Oracle oracle = OracleOf("LargeNorm", options);
  PlainLoop plain("LargeNorm", options);
  const double bound = NormBound(plain.parameters);
  for (int step = 0; step < 4; ++step) {
    oracle.TrainStep(ModelLoss);
    plain.Backward();
    const double norm =
        torch::nn::utils::clip_grad_norm_(plain.parameters, options.max_norm);
    std::vector<Tensor> gradients;
    for (const Tensor& p : plain.parameters) gradients.push_back(p.grad());
    plain.Step();
    EXPECT_GT(step % 2 == 0 ? norm : 1 / norm, 10);
    EXPECT_NEAR(oracle.outcome().norm, norm, bound * norm) << "step " << step;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const Tensor& p = plain.parameters[i];
      const Tensor off = (oracle.parameter(plain.names[i]) - p).abs();
      const double u = std::ldexp(1, -24);
      const Tensor most =
          (step + 1) *
          (options.optimizer.lr * gradients[i].abs() * (bound + 7 * u) +
           2 * u * p.abs());
      EXPECT_TRUE((off <= most).all().item<bool>())
          << "step " << step << " " << plain.names[i] << "\n"
          << off << "\n"
          << most;
    }
  }
}

// ---- Ranks

TEST(Ranks, ARankWithoutAGradientCountsAsZeros) {
  OracleOptions options;
  options.world_size = 2;
  Oracle oracle = OracleOf("OneRank", options);
  Tensor expected;
  oracle.TrainStep([&](torch::nn::Module& module, int rank, int64_t i) {
    Tensor loss = ModelLoss(module, rank, i);
    if (rank == 1) {
      expected = torch::autograd::grad(
          {loss}, {module.named_parameters()["own.weight"]}, {}, true)[0];
    }
    return loss;
  });
  EXPECT_TRUE(oracle.gradient("own.weight").equal(expected / 2));
}

TEST(Ranks, StepsThatOverflowOnOneAreSkipped) {
  OracleOptions options;
  options.world_size = 2;
  options.dtype = torch::kHalf;
  options.loss_scaling.emplace().scale = 256;
  options.loss_scaling->window = 2;
  options.loss_scaling->hysteresis = 1;
  Oracle oracle = OracleOf("Overflows", options);
  std::vector<double> scales;
  std::string skipped;
  for (int step = 0; step < 9; ++step) {
    const Tensor before = oracle.parameter("out.weight").clone();
    oracle.TrainStep(ModelLoss);
    scales.push_back(oracle.outcome().scale);
    skipped += oracle.outcome().skipped ? 'x' : '.';
    EXPECT_EQ(oracle.parameter("out.weight").equal(before),
              oracle.outcome().skipped)
        << "step " << step;
  }
  EXPECT_EQ(skipped, ".x..xx...");
  EXPECT_THAT(scales, ElementsAre(256, 256, 128, 128, 256, 128, 64, 64, 128));
  oracle.TrainStep(ModelLoss);
  EXPECT_EQ(oracle.outcome().scale, 128);
}

// ---- Which tensors get which dtype

TEST(Dtypes, NormLayersAreKeptIfAsked) {
  OracleOptions options;
  options.dtype = torch::kBFloat16;
  for (bool keep : {false, true}) {
    options.keep_norms = keep;
    for (const char* model : {"Mlp", "Gpt", "ConvNorm", "Frozen"}) {
      Oracle oracle = OracleOf(model, options);
      for (const std::string& name : oracle.parameter_names()) {
        const bool norm = name.find("norm") != std::string::npos;
        EXPECT_EQ(oracle.parameter(name).scalar_type(),
                  norm && keep ? torch::kFloat : torch::kBFloat16)
            << name;
        EXPECT_EQ(oracle.master(name).scalar_type(), torch::kFloat);
      }
      if (!keep && std::string(model) == "ConvNorm") continue;
      const auto losses = oracle.TrainStep(ModelLoss);
      EXPECT_TRUE(std::isfinite(losses[0][0].item<double>())) << model;
    }
  }
}

TEST(Dtypes, BuffersChangeIfAsked) {
  OracleOptions options;
  options.dtype = torch::kBFloat16;
  auto dtypes = [&] {
    Oracle oracle = OracleOf("ConvNorm", options);
    const auto buffers = oracle.module(0).named_buffers();
    return std::vector<at::ScalarType>{
        buffers["norm1.running_mean"].scalar_type(),
        buffers["norm1.num_batches_tracked"].scalar_type()};
  };
  EXPECT_THAT(dtypes(), ElementsAre(torch::kFloat, torch::kLong));
  options.buffer_dtype = torch::kBFloat16;
  EXPECT_THAT(dtypes(), ElementsAre(torch::kBFloat16, torch::kLong));
}

TEST(Dtypes, ParametersStayAtTheirPlacesInStorages) {
  OracleOptions options;
  options.dtype = torch::kBFloat16;
  Oracle oracle = OracleOf("SharedStorage", options);
  EXPECT_EQ(oracle.parameter("weight").storage_offset(), 3);
  EXPECT_TRUE(oracle.parameter("weight").equal(
      oracle.master("weight").to(torch::kBFloat16)));
}

// ---- All models in all dtypes

class DtypeTest
    : public ::testing::TestWithParam<std::tuple<std::string, at::ScalarType>> {
};

// The function is roughly the same: losses are within a twentieth of float32's.
TEST_P(DtypeTest, TrainsAsInFloat32) {
  const auto& [model, dtype] = GetParam();
  OracleOptions options;
  options.world_size = 2;
  Oracle expected = OracleOf(model, options);
  options.dtype = dtype;
  // BatchNorm's parameters are either float32 or what its buffers are.
  options.buffer_dtype = dtype;
  options.loss_scaling.emplace().dynamic = false;
  options.loss_scaling->scale = 16;
  Oracle oracle = OracleOf(model, options);
  for (int step = 0; step < 3; ++step) {
    const auto want = expected.TrainStep(ModelLoss);
    const auto got = oracle.TrainStep(ModelLoss);
    for (size_t r = 0; r < want.size(); ++r) {
      EXPECT_EQ(got[r][0].scalar_type(), torch::kFloat);
      const auto loss = want[r][0].item<double>();
      EXPECT_NEAR(got[r][0].item<double>(), loss, std::abs(loss) / 20);
    }
    if (model == "Overflows") break;
    EXPECT_FALSE(oracle.outcome().skipped);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, DtypeTest,
    ::testing::Combine(::testing::ValuesIn(TestModelNames()),
                       ::testing::Values(torch::kBFloat16, torch::kHalf)),
    [](const auto& info) {
      return absl::StrCat(std::get<0>(info.param),
                          c10::toString(std::get<1>(info.param)));
    });

}  // namespace
}  // namespace tessera
