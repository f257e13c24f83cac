// Truth trains engines, for plans to be compared with.
//
// A case is words: "Gpt stage=3 world=2 dtype=bf16 units=auto". The model is
// Gpt (also as WideGpt, LongGpt, LargeWideGpt, LargeLongGpt) or Llama, one of
// truth_models.cc, or one of sharding/trace/traced_models_test_util.h.
#ifndef TESTS_PLAN_TRUTH_H_
#define TESTS_PLAN_TRUTH_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "torch/nn/module.h"

namespace tessera {

struct TruthCase {
  std::string model = "Gpt";
  int stage = 0;
  int world = 2;
  std::string dtype = "fp32";  // bf16, autocast
  bool fp32_norms = false;     // with bf16
  bool shared = false;         // working copies
  int shard_group = 0;         // ranks; 0: all
  int accumulation = 1;
  bool local = false;      // sharding.accumulation
  bool keeps_heap = true;  // sharding.keep_freed_heap
  std::string backend;     // backend of the ranks, if the configuration has it
  int64_t prefetch = 100'000;  // elements
  // Keys of activation_checkpointing; without units it is off.
  std::string units, policy = "full";
  int every = 1;
  int64_t budget = 0;  // bytes
  // Whether kept activations go to a disk; with policy "keep" these are all
  // that is saved.
  bool moved = false;
  // What goes to a disk: "", "states", "all" (parameters, too), or "gradients"
  // (these, too).
  std::string disk;
  std::string states = "fp32";  // optimizer.params.state_dtype
  std::string optimizer = "AdamW";
  std::string frozen;              // a pattern of optimizer.param_groups
  std::string gradients = "fp32";  // data_types.grad_accum_dtype
  bool in_backward = false;        // sharding.step_in_backward
  std::string masters = "fp32";    // data_types.master_dtype

  // In 16 bits it is ShortGpt that is meant by Gpt, and ShortLlama by Llama.
  static TruthCase FromText(absl::string_view text);
  proto::Config config() const;
  // Returns a name for tests.
  static std::string NameOf(absl::string_view text);
};

struct TruthModel {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor()> loss;
};
const std::map<std::string, std::function<TruthModel()>>& OwnTruthModels();
// Makes a model small enough to train, and large enough that a copy of a unit
// shows.
TruthModel MakeTruthModel(const std::string& name);

// Plans at the case's stage.
absl::StatusOr<PlanReport> PlanOf(const TruthCase& truth);

absl::Status TrainSteps(const TruthModel& model, const TruthCase& truth,
                        Engine* engine, int steps);

// Returns an engine of the case after one step, on one thread. COLLECTIVE.
absl::StatusOr<std::unique_ptr<Engine>> TrainedEngine(
    const TruthCase& truth, std::shared_ptr<Communicator> communicator);

}  // namespace tessera
#endif  // TESTS_PLAN_TRUTH_H_
