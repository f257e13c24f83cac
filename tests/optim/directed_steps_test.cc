// LAMB and Muon with an engine over two ranks, against the same of whole
// parameters in float64.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "optim/matrix/newton_schulz.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;

constexpr int kSteps = 100;

// A loss that is linear in each parameter: its gradients are what is given.
struct Net : TestModel {
  Net() {
    torch::manual_seed(3);
    register_parameter("tall", torch::randn({37, 11}));
    register_parameter("wide", torch::randn({5, 200}));
    register_parameter("zero", torch::zeros({3, 4}));
    register_parameter("kernel", torch::randn({6, 2, 3, 3}));
    register_parameter("vector", torch::randn({70}));
    register_parameter("transposed", torch::randn({9, 31}).t());
  }
  static at::Tensor GradientOf(const at::Tensor& like, int64_t step) {
    torch::manual_seed(static_cast<uint64_t>(100 * step + like.numel()));
    return torch::randn(like.sizes());
  }
  at::Tensor Loss(int, int64_t step) override {
    at::Tensor loss = torch::zeros({});
    for (const at::Tensor& p : parameters()) {
      loss = loss + (p * GradientOf(p, step)).sum();
    }
    return loss;
  }
};

constexpr double kRate = 0.01, kDecay = 0.1;

// One parameter in float64.
struct Plain {
  explicit Plain(const at::Tensor& start)
      : master(start.detach().to(at::kDouble).contiguous()),
        first(torch::zeros_like(master)),
        second(torch::zeros_like(master)) {}
  void Lamb(const at::Tensor& g, int step) {
    first = first * 0.9 + g * 0.1;
    second = second * 0.999 + g * g * 0.001;
    const at::Tensor u =
        first / (1 - std::pow(0.9, step)) /
            ((second / (1 - std::pow(0.999, step))).sqrt() + 1e-8) +
        kDecay * master;
    const double size = master.norm().item<double>();
    const double ratio =
        size > 0 ? std::clamp(size / u.norm().item<double>(), 0.01, 10.0) : 1;
    master = master - kRate * ratio * u;
  }
  // By the very directions' rounding to bfloat16: what is tested is the rest.
  void Muon(const at::Tensor& g) {
    first = first * 0.95 + g * 0.05;
    const at::Tensor direction = g * 0.05 + first * 0.95;
    const int64_t rows = direction.size(0);
    const at::Tensor matrix = direction.reshape({rows, -1});
    const at::Tensor o =
        Orthogonal(matrix.to(at::kFloat), {5, false, at::kBFloat16})
            .to(at::kDouble);
    const double ratio = static_cast<double>(rows) / matrix.size(1);
    master = master * (1 - kRate * kDecay) -
             kRate * std::sqrt(std::max(1.0, ratio)) * o.view(master.sizes());
  }
  void AdamW(const at::Tensor& g, int step) {
    first = first * 0.9 + g * 0.1;
    second = second * 0.95 + g * g * 0.05;
    master = master * (1 - kRate * kDecay) -
             kRate * (first / (1 - std::pow(0.9, step))) /
                 ((second / (1 - std::pow(0.95, step))).sqrt() + 1e-10);
  }
  at::Tensor master, first, second;
};

// args: "Lamb" or "Muon". The largest distance of a master from the plain one
// in all steps, each step's from where the engine was.
TESSERA_RANK_FUNCTION(Apart) {
  TrainingSpec spec;
  spec.stage = 3;
  proto::Config config = ConfigOf(spec);
  google::protobuf::TextFormat::ParseFromString(
      absl::StrCat("type: '", args, "' params { lr: 0.01 weight_decay: 0.1 ",
                   args == "Muon" ? "ns_method: 'standard' " : "", "}"),
      config.mutable_optimizer());
  auto model = std::make_shared<Net>();
  std::vector<std::pair<std::string, Plain>> plain;
  for (const auto& p : model->named_parameters()) {
    plain.emplace_back(p.key(), Plain(p.value()));
  }
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(model, config, world.communicator()));
  double apart = 0;
  for (int step = 1; step <= kSteps; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
    for (auto& [name, p] : plain) {
      const at::Tensor g = Net::GradientOf(p.master, step).to(at::kDouble);
      if (args == "Lamb") {
        p.Lamb(g, step);
      } else if (p.master.dim() >= 2) {
        p.Muon(g);
      } else {
        p.AdamW(g, step);
      }
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, t.engine->Master(name));
      apart = std::max(
          apart,
          (master.to(at::kDouble) - p.master).abs().max().item<double>());
    }
  }
  return absl::StrCat(apart);
}

// Masters are below 4 and are rounded to float32 in each step, as some ten
// numbers on the way to a change of some hundredths.
TEST(DirectedStepsTest, LambIsThatOfWholeParameters) {
  constexpr double kBound = kSteps * (4 * 0x1p-24 + 0.1 * 10 * 0x1p-24);
  for (const std::string& answer : RunOnRanks(2, "Apart", "Lamb")) {
    EXPECT_LT(std::stod(answer), kBound);
  }
}

// A direction's float32 rounding may tip an element to the neighbour in
// bfloat16, one in 2^-8 of it, which five steps of the iteration carry on: it
// stays below 2^-4 of a singular value at a time. Twenty times the change of a
// step is far above.
TEST(DirectedStepsTest, MuonIsThatOfWholeMatrices) {
  constexpr double kBound = kSteps * kRate * 0x1p-4;
  for (const std::string& answer : RunOnRanks(2, "Apart", "Muon")) {
    EXPECT_LT(std::stod(answer), kBound);
  }
}

}  // namespace
}  // namespace tessera
