// What tests of evaluations have in common: a model, samples, metrics.
#ifndef TESTS_ENGINE_EVALUATE_TEST_UTIL_H_
#define TESTS_ENGINE_EVALUATE_TEST_UTIL_H_

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "evaluation/evaluate.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace evaluate_test {

namespace nn = torch::nn;
using at::Tensor;

inline constexpr int64_t kInputs = 6, kClasses = 5;

// Its second normalization stays in evaluation mode.
struct NetImpl : nn::Module {
  NetImpl() {
    at::manual_seed(1);
    up = register_module("up", nn::Linear(kInputs, 16));
    norm = register_module("norm", nn::BatchNorm1d(16));
    frozen = register_module("frozen", nn::BatchNorm1d(16));
    dropout = register_module("dropout", nn::Dropout(0.5));
    head = register_module("head", nn::Linear(16, kClasses));
    frozen->eval();
  }
  Tensor forward(const Tensor& x) {
    return head(dropout(frozen(norm(torch::relu(up(x))))));
  }
  // Which of the modules are in training mode.
  std::string Modes() const {
    std::string modes;
    for (const auto& each : modules()) modes += each->is_training() ? 'T' : 'e';
    return modes;
  }
  nn::Linear up{nullptr}, head{nullptr};
  nn::BatchNorm1d norm{nullptr}, frozen{nullptr};
  nn::Dropout dropout{nullptr};
};
TORCH_MODULE(Net);

// Returns the samples' inputs and labels, the same on all ranks.
inline std::pair<Tensor, Tensor> SamplesOf(absl::Span<const int64_t> samples) {
  Tensor inputs = torch::empty({static_cast<int64_t>(samples.size()), kInputs});
  Tensor labels =
      torch::empty({static_cast<int64_t>(samples.size())}, torch::kLong);
  for (size_t i = 0; i < samples.size(); ++i) {
    auto random = at::make_generator<at::CPUGeneratorImpl>(samples[i]);
    const auto row = static_cast<int64_t>(i);
    inputs[row].copy_(torch::randn({kInputs}, random));
    labels[row] = samples[i] % kClasses;
  }
  return {inputs, labels};
}

struct Rig {
  static absl::StatusOr<std::unique_ptr<Rig>> Make(const TrainingSpec& spec,
                                                   const World& world,
                                                   bool autocast = false) {
    auto rig = std::make_unique<Rig>();
    proto::Config config = ConfigOf(spec);
    config.mutable_torch_autocast()->set_enabled(autocast);
    EngineOptions options;
    options.communicator = world.communicator();
    TESSERA_ASSIGN_OR_RETURN(rig->engine,
                             Engine::Create(rig->net, config, options));
    return rig;
  }

  absl::Status Train(int rank, int step) {
    at::manual_seed(100 * step + rank);
    const auto [inputs, labels] = SamplesOf({rank, rank + 10, rank + 20});
    Tensor logits;
    {
      const AutocastScope autocast(engine.get());
      logits = net(inputs);
    }
    TESSERA_RETURN_IF_ERROR(engine->Backward(
        nn::functional::cross_entropy(logits.to(at::kFloat), labels)));
    return engine->Step();
  }

  absl::Status Add(const Tensor& inputs, const Tensor& labels) {
    const Tensor logits = net(inputs);
    loss.Add(nn::functional::cross_entropy(
        logits.to(at::kFloat), labels,
        nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone)));
    accuracy.Add(logits, labels);
    perplexity.AddLogits(logits, labels);
    return absl::OkStatus();
  }
  AddSamples add() {
    return [this](absl::Span<const int64_t> samples) {
      ++forwards;
      const auto [inputs, labels] = SamplesOf(samples);
      return Add(inputs, labels);
    };
  }
  std::vector<Metric*> metrics() { return {&loss, &accuracy, &perplexity}; }
  std::string Result() const {
    return absl::StrFormat("loss %a accuracy %a perplexity %a of %g",
                           loss.value(), accuracy.value(), perplexity.value(),
                           loss.weight());
  }

  Net net;
  std::unique_ptr<Engine> engine;
  Mean loss{"loss"};
  Accuracy accuracy;
  Perplexity perplexity;
  int64_t forwards = 0;
};

inline TrainingSpec SpecOf(absl::string_view stage) {
  TrainingSpec spec;
  spec.stage = stage[0] - '0';
  spec.param_persistence_threshold = 0;
  // Gathers are collectives.
  if (stage == "3together") spec.shared = spec.served = "off";
  return spec;
}

}  // namespace evaluate_test
}  // namespace tessera
#endif  // TESTS_ENGINE_EVALUATE_TEST_UTIL_H_
