// A chain for tests of the memory of a step: each block keeps one tensor of
// kTensor bytes, its tanh.
#ifndef TESTS_MEMORY_STEP_MEMORY_TEST_UTIL_H_
#define TESTS_MEMORY_STEP_MEMORY_TEST_UTIL_H_

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "tests/support/training.h"

namespace tessera {

inline constexpr int kBlocks = 3;
inline constexpr int64_t kRows = 8192, kDim = 64;
inline constexpr int64_t kTensor = kRows * kDim * 4;  // 2 MiB
inline constexpr int64_t kRounding = 8 << 10;         // malloc's, of one tensor
inline constexpr int64_t kSmall = 64 << 10;  // all that is small, in a step

struct ChainBlock : torch::nn::Module {
  ChainBlock()
      : linear(register_module(
            "linear", torch::nn::Linear(
                          torch::nn::LinearOptions(kDim, kDim).bias(false)))),
        shift(register_parameter("shift", torch::zeros({kDim}))) {}
  // The operator that makes what is kept comes after a use of `shift`.
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(linear(x).add_(shift));
  }
  torch::nn::Linear linear;
  at::Tensor shift;
};

struct Chain : torch::nn::Module {
  Chain() {
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module(absl::StrCat("block", i),
                                       std::make_shared<ChainBlock>()));
    }
  }
  // The block `wide` makes `wide_tensors` for a moment.
  at::Tensor Loss(int rank, int wide = 0, int64_t wide_tensors = 0) {
    at::Tensor h = torch::full({kRows, kDim}, 0.1 * (rank + 1));
    for (int i = 0; i < kBlocks; ++i) {
      h = blocks[static_cast<size_t>(i)]->forward(h);
      if (i == wide) torch::empty({wide_tensors * kRows, kDim});
    }
    return h.square().mean();
  }
  std::vector<std::shared_ptr<ChainBlock>> blocks;
};

inline absl::StatusOr<std::unique_ptr<Engine>> MakeChain(
    const World& world, int stage, std::shared_ptr<Chain>* model,
    const std::string& timeline = "", bool planned = false) {
  torch::manual_seed(1);
  at::set_num_threads(1);
  *model = std::make_shared<Chain>();
  TrainingSpec spec;
  spec.stage = stage;
  proto::Config config = ConfigOf(spec);
  config.mutable_sharding()->add_unit_classes((*model)->blocks[0]->name());
  // Each block's `shift` persists, in a flat of all of them.
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(
      kDim);
  if (!timeline.empty()) {
    config.mutable_memory_timeline()->set_path(timeline);
    config.mutable_memory_timeline()->set_step(2);
  }
  EngineOptions options;
  options.communicator = world.communicator();
  if (planned) {
    PlanOptions plan_options;
    plan_options.world_size = world.world_size();
    TESSERA_ASSIGN_OR_RETURN(
        PlanReport report,
        Plan(
            **model, [&] { return (*model)->Loss(0); }, config, plan_options));
    // Stage 2 would not fit into this memory.
    report.memory_bytes = report.stages[3].peak.total();
    options.plan = std::make_shared<PlanReport>(std::move(report));
  }
  return Engine::Create(*model, config, options);
}

}  // namespace tessera
#endif  // TESTS_MEMORY_STEP_MEMORY_TEST_UTIL_H_
