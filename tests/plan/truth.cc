#include "tests/plan/truth.h"

#include <torch/torch.h>

#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/status.h"
#include "comm/communicator.h"
#include "examples/gpt/gpt.h"
#include "examples/llama/llama.h"
#include "gtest/gtest.h"
#include "sharding/trace/traced_models_test_util.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 4, kSeq = 48, kVocab = 512;
// 16-bit products are slow where the processor has none.
constexpr int64_t kShortSeq = 12;

template <typename M>
TruthModel OfTokens(std::shared_ptr<M> model, int64_t batch, int64_t seq) {
  return {model, [model, batch, seq] {
            const at::Tensor tokens =
                torch::randint(kVocab, {batch, seq}, torch::kLong);
            return model->loss(tokens, tokens);
          }};
}

TruthModel GptOf(int64_t dim, int64_t layers, int64_t batch, int64_t seq) {
  return OfTokens(
      std::make_shared<GptImpl>(
          GptOptions().dim(dim).layers(layers).heads(4).seq(seq).vocab(kVocab)),
      batch, seq);
}

TruthModel LlamaOf(int64_t seq) {
  return OfTokens(std::make_shared<LlamaImpl>(LlamaOptions()
                                                  .dim(256)
                                                  .layers(4)
                                                  .heads(4)
                                                  .kv_heads(2)
                                                  .hidden(640)
                                                  .vocab(kVocab)),
                  kBatch, seq);
}

void SetField(const std::string& field, const std::string& value,
              TruthCase* truth) {
  int64_t number = 0;
  (void)absl::SimpleAtoi(value, &number);
  const std::map<std::string, std::string*> texts = {
      {"dtype", &truth->dtype},         {"units", &truth->units},
      {"backend", &truth->backend},     {"policy", &truth->policy},
      {"disk", &truth->disk},           {"states", &truth->states},
      {"gradients", &truth->gradients}, {"optimizer", &truth->optimizer},
      {"frozen", &truth->frozen},       {"masters", &truth->masters},
  };
  const std::map<std::string, int*> numbers = {
      {"stage", &truth->stage},       {"world", &truth->world},
      {"group", &truth->shard_group}, {"accumulation", &truth->accumulation},
      {"every", &truth->every},
  };
  const std::map<std::string, int64_t*> counts = {
      {"prefetch", &truth->prefetch},
      {"budget", &truth->budget},
  };
  const std::map<std::string, bool*> switches = {
      {"fp32_norms", &truth->fp32_norms}, {"shared", &truth->shared},
      {"local", &truth->local},           {"keeps_heap", &truth->keeps_heap},
      {"moved", &truth->moved},           {"inback", &truth->in_backward},
  };
  if (texts.count(field) > 0) {
    *texts.at(field) = value;
  } else if (numbers.count(field) > 0) {
    *numbers.at(field) = static_cast<int>(number);
  } else if (counts.count(field) > 0) {
    *counts.at(field) = number;
  } else {
    *switches.at(field) = number != 0;
  }
}

}  // namespace

TruthModel MakeTruthModel(const std::string& name) {
  if (name == "Gpt") return GptOf(256, 4, kBatch, kSeq);
  if (name == "ShortGpt") return GptOf(256, 4, kBatch, kShortSeq);
  // Mostly parameters, and mostly activations; and each of 100 MB and more.
  if (name == "WideGpt") return GptOf(320, 6, 1, 32);
  if (name == "LongGpt") return GptOf(128, 6, 16, 96);
  if (name == "LargeWideGpt") return GptOf(512, 6, 1, 64);
  if (name == "LargeLongGpt") return GptOf(64, 6, 48, 96);
  if (name == "Llama") return LlamaOf(kSeq);
  if (name == "ShortLlama") return LlamaOf(kShortSeq);
  const auto own = OwnTruthModels().find(name);
  if (own != OwnTruthModels().end()) return own->second();
  const TracedModel model = TracedModels().at(name)();
  return {model.module, model.loss};
}

TruthCase TruthCase::FromText(absl::string_view text) {
  TruthCase truth;
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  truth.model = words[0];
  for (size_t i = 1; i < words.size(); ++i) {
    const std::vector<std::string> word = absl::StrSplit(words[i], '=');
    TESSERA_CHECK(word.size() == 2) << words[i];
    SetField(word[0], word[1], &truth);
  }
  if (truth.dtype != "fp32" &&
      (truth.model == "Gpt" || truth.model == "Llama")) {
    truth.model = absl::StrCat("Short", truth.model);
  }
  return truth;
}

std::string TruthCase::NameOf(absl::string_view text) {
  std::string name;
  bool first = true;
  for (const char c : text) {
    if (!absl::ascii_isalnum(c)) {
      first = c == ' ';
      continue;
    }
    name += first ? absl::ascii_toupper(c) : c;
    first = false;
  }
  return name;
}

proto::Config TruthCase::config() const {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(4);
  config.set_gradient_accumulation_steps(accumulation);
  config.mutable_bf16()->set_enabled(dtype == "bf16");
  config.mutable_torch_autocast()->set_enabled(dtype == "autocast");
  config.mutable_precision()->set_fp32_norms(fp32_norms);
  config.mutable_optimizer()->set_type(optimizer);
  if (!frozen.empty()) {
    proto::ParamGroup* const group =
        config.mutable_optimizer()->add_param_groups();
    group->add_parameters(frozen);
    group->set_frozen(true);
  }
  config.mutable_optimizer()->mutable_params()->set_state_dtype(states);
  config.mutable_data_types()->set_grad_accum_dtype(gradients);
  config.mutable_data_types()->set_master_dtype(masters);
  if (!backend.empty()) config.mutable_communication()->set_backend(backend);
  proto::ZeroOptimization* const zero = config.mutable_zero_optimization();
  zero->set_stage(stage);
  zero->set_stage3_param_persistence_threshold(0);
  zero->set_stage3_prefetch_bucket_size(prefetch);
  zero->set_stage3_max_reuse_distance(0);
  if (!units.empty()) {
    proto::ActivationCheckpointing* const checkpointing =
        config.mutable_activation_checkpointing();
    checkpointing->add_units(units);
    checkpointing->set_policy(policy);
    checkpointing->set_every(every);
    checkpointing->set_budget_bytes(budget);
    if (moved) {
      checkpointing->set_offload("nvme");
      checkpointing->set_nvme_path(::testing::TempDir());
    }
  }
  if (in_backward) {
    config.mutable_sharding()->set_step_in_backward(true);
    config.mutable_bf16()->set_check_grad_overflow(false);
    config.set_gradient_clipping(0);
  }
  if (!disk.empty()) {
    config.set_gradient_clipping(0);  // so that early steps are kept
    proto::OffloadOptimizer* const states = zero->mutable_offload_optimizer();
    states->set_device("nvme");
    states->set_nvme_path(::testing::TempDir());
    if (disk != "states") {
      zero->mutable_offload_param()->set_device("nvme");
      zero->mutable_offload_param()->set_nvme_path(::testing::TempDir());
      zero->mutable_offload_param()->set_max_in_cpu(0);
    }
    config.mutable_sharding()->mutable_offload()->set_gradients(disk ==
                                                                "gradients");
  }
  config.mutable_sharding()->set_shared_working_copy(shared ? "on" : "off");
  config.mutable_sharding()->set_keep_freed_heap(keeps_heap);
  config.mutable_sharding()->set_shard_group_size(shard_group);
  config.mutable_sharding()->set_accumulation(local ? "local" : "each");
  return config;
}

absl::StatusOr<PlanReport> PlanOf(const TruthCase& truth) {
  at::set_num_threads(1);
  TESSERA_ASSIGN_OR_RETURN(const TruthModel model, ConstructFake([&] {
                             return MakeTruthModel(truth.model);
                           }));
  PlanOptions options;
  options.world_size = truth.world;
  options.shared_working_copy = truth.shared;
  return Plan(*model.module, model.loss, truth.config(), options);
}

absl::Status TrainSteps(const TruthModel& model, const TruthCase& truth,
                        Engine* engine, int steps) {
  for (int i = 0; i < steps * truth.accumulation; ++i) {
    at::Tensor loss;
    {
      const Engine::AutocastScope autocast(engine);
      loss = model.loss();
    }
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Engine>> TrainedEngine(
    const TruthCase& truth, std::shared_ptr<Communicator> communicator) {
  at::set_num_threads(1);
  torch::manual_seed(1);
  const TruthModel model = MakeTruthModel(truth.model);
  EngineOptions options;
  options.communicator = std::move(communicator);
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, Engine::Create(model.module, truth.config(), options));
  TESSERA_RETURN_IF_ERROR(TrainSteps(model, truth, engine.get(), 1));
  return engine;
}

}  // namespace tessera
