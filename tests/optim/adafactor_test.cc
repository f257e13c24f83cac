// Tests Adafactor with an engine: against torch.optim's formula on whole
// parameters in float64; that bits do not depend on the number of ranks, the
// stage, the number of threads, or a checkpoint of others; its states by name.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/bits.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// A loss that is linear in each parameter: its gradients are what is given.
struct Net : TestModel {
  explicit Net(at::ScalarType dtype = at::kFloat) {
    torch::manual_seed(3);
    const auto add = [&](const char* name, const at::Tensor& t) {
      register_parameter(name, t.to(dtype));
    };
    add("tall", torch::randn({37, 11}));
    add("wide", torch::randn({5, 203}));
    add("row", torch::randn({1, 131}));
    add("column", torch::randn({67, 1}));
    add("zero", torch::zeros({3, 4}));
    add("kernel", torch::randn({6, 2, 3, 5}));
    add("stack", torch::randn({3, 7, 13}).transpose(0, 2));
    add("vector", torch::randn({71}));
    add("scalar", torch::randn({}));
    add("transposed", torch::randn({9, 31}).t());
    add("still", torch::randn({8, 9}));
  }
  // Rows and columns of very different sizes, zeros among them; of five bits,
  // so that the mean of three ranks' is the same in 16 bits, too. What is named
  // "still" has none.
  static at::Tensor GradientOf(const at::Tensor& like, int64_t step) {
    torch::manual_seed(static_cast<uint64_t>(100 * step + like.numel()));
    at::Tensor g = torch::randn(like.sizes());
    if (like.dim() > 0) {
      g = g * torch::logspace(-3, 1, like.size(-1), 10);
      if (like.size(0) > 2) g[1].zero_();
    }
    const auto [mantissa, exponent] = torch::frexp(g);
    return torch::ldexp((mantissa * 32).round() / 32, exponent);
  }
  at::Tensor Loss(int, int64_t step) override {
    at::Tensor loss = torch::zeros({}, parameters()[0].dtype());
    for (const auto& p : named_parameters()) {
      if (p.key() == "still") continue;
      loss = loss +
             (p.value() * GradientOf(p.value(), step).to(loss.dtype())).sum();
    }
    return loss;
  }
};

constexpr double kRate = 0.02, kDecay = 0.1;
constexpr int kSteps = 50;

// Plain makes torch.optim.Adafactor's step of one parameter, in float64.
struct Plain {
  explicit Plain(const at::Tensor& start, double eps)
      : master(start.detach().to(at::kDouble).contiguous().clone()),
        eps1(eps) {}
  static double Rms(const at::Tensor& t) {
    return t.square().mean().sqrt().item<double>();
  }
  void Step(const at::Tensor& g, int step) {
    const double weight = std::pow(step, -0.8);
    const double rho = std::min(kRate, 1 / std::sqrt(step));
    const double alpha = std::max(1e-3, Rms(master)) * rho;
    at::Tensor v;
    if (step == 1) {
      states = {torch::zeros({}, at::kDouble), torch::zeros({}, at::kDouble)};
    }
    const auto approach = [&](size_t s, const at::Tensor& mean) {
      states[s] = states[s] + (mean - states[s]) * weight;
    };
    if (g.dim() > 1) {
      approach(0, g.square().mean(-1, true));
      approach(1, g.square().mean(-2, true));
      v = states[0].matmul(states[1]) /
          states[0].mean(-2, true).clamp_min(eps1);
    } else {
      approach(0, g.square());
      v = states[0];
    }
    const at::Tensor update = g / v.clamp_min(eps1 * eps1).sqrt();
    master = master * (1 - kRate * kDecay) -
             alpha / std::max(1.0, Rms(update)) * update;
  }
  at::Tensor master;
  std::vector<at::Tensor> states;
  double eps1;
};

proto::Config ConfigOf(int stage, const std::string& dtype = "fp32") {
  TrainingSpec spec;
  spec.stage = stage;
  spec.dtype = dtype;
  proto::Config config = tessera::ConfigOf(spec);
  config.clear_optimizer();
  TORCH_CHECK(google::protobuf::TextFormat::ParseFromString(
      absl::StrCat("type: 'Adafactor' params { lr: ", kRate,
                   " weight_decay: ", kDecay, " }"),
      config.mutable_optimizer()));
  return config;
}

// The largest distances from the plain one, in all steps: of masters the root
// mean square, relative to the largest of the parameter's so far, or 1e-3, and
// of states, each to itself.
struct Apart {
  double masters = 0, states = 0;
};
absl::StatusOr<Apart> ApartOf(const World& world, at::ScalarType dtype) {
  auto model = std::make_shared<Net>(dtype);
  std::map<std::string, Plain> plain;
  for (const auto& p : model->named_parameters()) {
    plain.emplace(p.key(),
                  Plain(p.value(), dtype == at::kFloat ? 0x1p-23 : 0x1p-52));
  }
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(model, ConfigOf(3), world.communicator()));
  Apart apart;
  std::map<std::string, double> sizes;
  for (int step = 1; step <= kSteps; ++step) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(step));
    for (auto& [name, p] : plain) {
      if (name == "still") continue;
      p.Step(Net::GradientOf(p.master, step).to(at::kDouble), step);
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, t.engine->Master(name));
      double& size = sizes[name];
      size = std::max({size, 1e-3, Plain::Rms(p.master)});
      apart.masters = std::max(
          apart.masters, Plain::Rms(master.to(at::kDouble) - p.master) / size);
      const bool matrix = p.master.dim() > 1;
      for (size_t s = 0; s < (matrix ? 2 : 1); ++s) {
        TESSERA_ASSIGN_OR_RETURN(
            const at::Tensor state,
            t.engine->OptimizerStateOf(name, !matrix  ? "variance"
                                             : s == 0 ? "row_var"
                                                      : "col_var"));
        if (state.sizes() != p.states[s].sizes()) {
          return absl::InternalError(
              absl::StrCat("shape of a state of ", name));
        }
        const at::Tensor relative =
            ((state.to(at::kDouble) - p.states[s]) / p.states[s])
                .nan_to_num(0)  // both are 0
                .abs();
        apart.states = std::max(apart.states, relative.max().item<double>());
      }
    }
  }
  return apart;
}

TESSERA_RANK_FUNCTION(FromPlain) {
  TESSERA_ASSIGN_OR_RETURN(
      const Apart apart,
      ApartOf(world, args == "fp64" ? at::kDouble : at::kFloat));
  return absl::StrCat(apart.masters, " ", apart.states);
}

// Bounds the distances, where u is the unit roundoff.
// States: each step rounds them once, earlier values decay, and all terms have
// one sign, so the total is kSteps * u. (Gradients are the same numbers in
// both, and float64's error is far below.)
// Masters: a change has a root mean square of at most kRate * size. The second
// moment comes from three states, and its root has half of their error. The
// change's size is divided by that of the direction, with the same error. That
// makes 3 * kSteps * u, ten operations' roundings, and three of the master
// itself. An earlier distance, in root mean squares, changes the master's root
// mean square by at most as much, and so the next change by kRate of it: a
// factor of (1 + kRate).
void ExpectClose(const char* dtype, double u) {
  const double states = kSteps * u;
  const double step = kRate * (3 * states + 10 * u) + 3 * u;
  const double masters = step * (std::pow(1 + kRate, kSteps) - 1) / kRate;
  for (const std::string& answer : RunOnRanks(2, "FromPlain", dtype)) {
    const std::vector<std::string> apart = absl::StrSplit(answer, ' ');
    ASSERT_EQ(apart.size(), 2u) << answer;
    EXPECT_LT(std::stod(apart[0]), masters) << dtype;
    EXPECT_LT(std::stod(apart[1]), states) << dtype;
  }
}

TEST(AdafactorTest, IsTorchsInFloat32) { ExpectClose("fp32", 0x1p-24); }
// In float64 both sides round.
TEST(AdafactorTest, IsTorchsInFloat64) { ExpectClose("fp64", 3 * 0x1p-53); }

// args: "key=value" words: stage, dtype, threads, save, load, first, steps;
// async: a save during which another step is made.
// Fingerprints of masters and states at the end.
TESSERA_RANK_FUNCTION(BitsOf) {
  std::map<std::string, std::string> words = {{"stage", "1"},
                                              {"dtype", "fp32"},
                                              {"threads", "1"},
                                              {"steps", "4"},
                                              {"first", "1"}};
  for (absl::string_view word : absl::StrSplit(args, ' ')) {
    const std::vector<std::string> pair = absl::StrSplit(word, '=');
    words[pair[0]] = pair[1];
  }
  torch::set_num_threads(std::stoi(words["threads"]));
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(std::make_shared<Net>(),
                    ConfigOf(std::stoi(words["stage"]), words["dtype"]),
                    world.communicator()));
  if (!words["load"].empty()) {
    TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(words["load"]).status());
  }
  const int first = std::stoi(words["first"]);
  for (int i = first; i < first + std::stoi(words["steps"]); ++i) {
    TESSERA_RETURN_IF_ERROR(t.TrainStep(i));
  }
  if (!words["save"].empty()) {
    SaveOptions options;
    options.async = words["async"] == "1";
    TESSERA_RETURN_IF_ERROR(
        t.engine->SaveCheckpoint(words["save"], "", options));
    if (options.async) {
      TESSERA_RETURN_IF_ERROR(t.TrainStep(100));
      TESSERA_RETURN_IF_ERROR(t.engine->WaitForCheckpoint());
    }
  }
  std::string bits;
  const auto add = [&](const std::string& what, const at::Tensor& value) {
    const at::Tensor plain = value.contiguous();
    absl::StrAppend(
        &bits, what, " ",
        absl::Hex(Fingerprint(plain.const_data_ptr(),
                              static_cast<int64_t>(plain.nbytes()))),
        "\n");
  };
  for (const auto& p : Net().named_parameters()) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master,
                             t.engine->Master(p.key()));
    add(p.key(), master);
    for (const char* state : {"row_var", "col_var", "variance"}) {
      const auto value = t.engine->OptimizerStateOf(p.key(), state);
      if (value.ok()) add(absl::StrCat(p.key(), " ", state), *value);
    }
  }
  torch::set_num_threads(1);
  return bits;
}

TEST(AdafactorTest, HasTheSameBitsOnAnyNumberOfRanks) {
  for (const char* dtype : {"fp32", "bf16"}) {
    const std::string alone =
        RunOnRanks(1, "BitsOf", absl::StrCat("stage=0 dtype=", dtype))[0];
    EXPECT_THAT(alone, AllOf(HasSubstr("kernel col_var"),
                             HasSubstr("vector variance")));
    for (const int world_size : {1, 2, 3}) {
      // Each pair of these and a dtype.
      const int stage = (world_size + (*dtype == 'b' ? 1 : 0)) % 2 == 0 ? 1 : 3;
      EXPECT_THAT(RunOnRanks(world_size, "BitsOf",
                             absl::StrCat("stage=", stage, " dtype=", dtype,
                                          " threads=", world_size)),
                  Each(alone))
          << world_size << " ranks, stage " << stage << " " << dtype;
    }
  }
}

TEST(AdafactorTest, GoesOnFromACheckpointOfOthers) {
  const std::string whole = RunOnRanks(1, "BitsOf", "stage=0 steps=5")[0];
  for (const int saved : {1, 3}) {
    const TempFolder folder;
    const std::string dir = folder.path() + "/checkpoint";
    RunOnRanks(saved, "BitsOf",
               absl::StrCat("stage=1 steps=2 save=", dir,
                            saved == 1 ? " async=1" : ""));
    for (const int world_size : {1, 2}) {
      EXPECT_THAT(
          RunOnRanks(world_size, "BitsOf",
                     absl::StrCat("stage=3 first=3 steps=3 load=", dir)),
          Each(whole))
          << saved << " to " << world_size;
    }
  }
}

// Other optimizers load only the model, and refuse the rest.
TESSERA_RANK_FUNCTION(LoadWithAdamW) {
  proto::Config config = ConfigOf(2);
  config.mutable_optimizer()->Clear();
  config.mutable_optimizer()->set_type("AdamW");
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t,
      Trainee::Make(std::make_shared<Net>(), config, world.communicator()));
  const absl::Status refused =
      t.engine->LoadCheckpoint(std::string(args)).status();
  LoadCheckpointOptions options;
  options.model_only = true;
  TESSERA_RETURN_IF_ERROR(
      t.engine->LoadCheckpoint(std::string(args), options).status());
  return std::string(refused.message());
}

TEST(AdafactorTest, OthersLoadTheModelAlone) {
  const TempFolder folder;
  const std::string dir = folder.path() + "/checkpoint";
  RunOnRanks(2, "BitsOf", absl::StrCat("stage=3 steps=1 save=", dir));
  EXPECT_THAT(RunOnRanks(2, "LoadWithAdamW", dir),
              Each(HasSubstr("holds states of the optimizer 'adafactor'")));
}

// A state is set, read, and is what the next step is made from.
TESSERA_RANK_FUNCTION(SetAndGet) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(std::make_shared<Net>(), ConfigOf(3),
                                         world.communicator()));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  const at::Tensor rows = torch::arange(1, 38, at::kFloat).view({37, 1});
  TESSERA_RETURN_IF_ERROR(t.engine->SetOptimizerState("tall", "row_var", rows));
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor read,
                           t.engine->OptimizerStateOf("tall", "row_var"));
  if (!at::equal(rows, read)) return "not what was set";
  TESSERA_RETURN_IF_ERROR(t.TrainStep(2));
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor after,
                           t.engine->OptimizerStateOf("tall", "row_var"));
  const double weight = std::pow(2, -0.8);
  const at::Tensor g = Net::GradientOf(torch::zeros({37, 11}), 2);
  const at::Tensor expected = rows + (g.square().mean(1, true) - rows) * weight;
  if (!at::allclose(after, expected, 1e-6, 0)) return "not what was made of it";
  return absl::StrCat(
      t.engine->SetOptimizerState("tall", "row_var", torch::zeros({37, 11}))
          .message(),
      "; ", t.engine->OptimizerStateOf("vector", "row_var").status().message());
}

TEST(AdafactorTest, StatesAreSetAndReadInTheirShapes) {
  EXPECT_THAT(
      RunOnRanks(2, "SetAndGet", ""),
      Each(AllOf(HasSubstr("state 'row_var' of parameter 'tall' is 6|37,1,"),
                 HasSubstr("optimizer state 'row_var': expected variance"))));
}

struct Waves : TestModel {
  Waves() {
    register_parameter("waves", torch::zeros({3, 4}, at::kComplexFloat));
  }
  at::Tensor Loss(int, int64_t) override { return torch::zeros({}); }
};

TESSERA_RANK_FUNCTION(Refused) {
  return std::string(Trainee::Make(std::make_shared<Waves>(), ConfigOf(1),
                                   world.communicator())
                         .status()
                         .message());
}

TEST(AdafactorTest, ComplexParametersAreRefused) {
  EXPECT_THAT(RunOnRanks(1, "Refused", ""),
              Each(HasSubstr("parameter 'waves' is complex")));
}

}  // namespace
}  // namespace tessera
