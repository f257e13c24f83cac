// Runs an engine with each of the optimizers, from and to checkpoints, for
// tests.
#ifndef TESTS_OPTIM_OPTIMIZER_RUN_H_
#define TESTS_OPTIM_OPTIMIZER_RUN_H_

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {

struct OptimizerCase {
  const char* name;
  const char* optimizer;  // a proto::Optimizer
};
inline constexpr OptimizerCase kOptimizerCases[] = {
    {"Adam", "type: 'Adam' params { adam_w_mode: false weight_decay: 0.1 }"},
    {"AmsGrad", "type: 'AdamW' params { amsgrad: true weight_decay: 0.1 }"},
    {"NoCorrection", "type: 'AdamW' params { bias_correction: false }"},
    {"Sgd", "type: 'SGD' params { lr: 0.1 weight_decay: 0.1 }"},
    {"Nesterov", "type: 'SGD' params { lr: 0.1 momentum: 0.9 nesterov: true }"},
    {"Adagrad", "type: 'Adagrad' params { lr_decay: 0.1 }"},
    {"RmsProp", "type: 'RMSprop' params { momentum: 0.5 centered: true }"},
    {"Lion", "type: 'Lion' params { weight_decay: 0.1 }"},
    {"ScheduleFree",
     "type: 'AdamWScheduleFree' params { lr: 0.01 weight_decay: 0.1 } "
     "no_decay: 'auto'"},
    {"NarrowStates", "type: 'AdamW' params { state_dtype: 'bf16' }"},
    {"EightBits", "type: 'AdamW' params { state_dtype: '8bit' }"},
    {"EightBitMomentum",
     "type: 'SGD' params { lr: 0.1 momentum: 0.9 state_dtype: '8bit' }"},
    {"Lamb", "type: 'Lamb' params { lr: 0.01 weight_decay: 0.1 }"},
    {"Muon", "type: 'Muon' params { lr: 0.01 weight_decay: 0.1 }"},
    {"StandardMuon",
     "type: 'Muon' params { lr: 0.01 ns_method: 'standard' ns_steps: 3 "
     "nesterov: false adjust_lr_fn: 'match_rms_adamw' } no_decay: 'auto' "
     "param_groups { parameters: 'blocks.0.*.weight' params { lr: 0.02 } }"},
    {"Adafactor",
     "type: 'Adafactor' params { weight_decay: 0.1 ema_decay: 0.75 }"},
    {"Averages",
     "type: 'AdamW' params { weight_decay: 0.1 ema_decay: 0.75 state_dtype: "
     "'bf16' }"},
    {"MuonsAverages", "type: 'Muon' params { lr: 0.01 ema_decay: 0.75 }"},
    {"AmsGradAverages",
     "type: 'AdamW' params { amsgrad: true ema_decay: 0.75 }"},
    {"EightBitMuon",
     "type: 'Muon' params { lr: 0.01 ema_decay: 0.75 state_dtype: '8bit' }"},
    {"Groups",
     "type: 'AdamW' params { weight_decay: 0.1 } no_decay: 'auto' "
     "param_groups { name: 'first' parameters: '*0*weight' params { lr: 0.01 "
     "betas: 0.5 betas: 0.9 } }"},
};

// Parses "key=value" words: optimizer (an index of kOptimizerCases), states
// (its state_dtype), stage, dtype, offload, steps, first, save, load; async: a
// save during which another step is made; moved: to nvme for a step; data
// (same: all ranks have rank 0's); warmup: steps, after which the rate is
// halved each step.
class Words {
 public:
  explicit Words(absl::string_view text) {
    for (absl::string_view word : absl::StrSplit(text, ' ')) {
      words_.push_back(absl::StrSplit(word, absl::MaxSplits('=', 1)));
    }
  }
  std::string Get(absl::string_view key, const std::string& other = "") const {
    for (const auto& [name, value] : words_) {
      if (name == key) return value;
    }
    return other;
  }

 private:
  std::vector<std::pair<std::string, std::string>> words_;
};

inline proto::Config ConfigOf(const Words& words) {
  TrainingSpec spec;
  spec.stage = std::stoi(words.Get("stage", "0"));
  spec.dtype = words.Get("dtype", "fp32");
  spec.accumulation = std::stoi(words.Get("accumulation", "1"));
  if (words.Get("offload") == "nvme") spec.states_on_disk = 1;
  spec.optimizer =
      kOptimizerCases[std::stoul(words.Get("optimizer", "0"))].optimizer;
  proto::Config config = ConfigOf(spec);
  proto::OptimizerParams* const params =
      config.mutable_optimizer()->mutable_params();
  if (!words.Get("states").empty()) {
    params->set_state_dtype(words.Get("states"));
  }
  if (params->state_dtype() == "8bit") {
    config.mutable_sharding()->mutable_offload()->set_slice_numel(65536);
  }
  if (!words.Get("warmup").empty()) {
    proto::Scheduler* const scheduler = config.mutable_scheduler();
    scheduler->set_type("StepLR");
    scheduler->mutable_params()->set_step_size(1);
    scheduler->mutable_params()->set_gamma(0.5);
    scheduler->mutable_warmup()->set_num_steps(std::stoi(words.Get("warmup")));
  }
  return config;
}

}  // namespace tessera
#endif  // TESTS_OPTIM_OPTIMIZER_RUN_H_
