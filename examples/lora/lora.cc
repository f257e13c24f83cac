#include "examples/lora/lora.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <utility>

#include "ATen/Functions.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/json.h"
#include "c10/core/GradMode.h"
#include "torch/nn/init.h"

namespace {

namespace nn = torch::nn;

// Returns whether the last parts of a path are those of `target`.
bool Fits(absl::string_view path, absl::string_view target) {
  const std::vector<std::string> have = absl::StrSplit(std::string(path), '.');
  const std::vector<std::string> want =
      absl::StrSplit(std::string(target), '.');
  if (want.size() > have.size()) return false;
  for (size_t i = 0; i < want.size(); ++i) {
    const std::string& part = have[have.size() - want.size() + i];
    if (want[i] != "*" && want[i] != part) return false;
  }
  return true;
}

bool IsAdapter(absl::string_view name) {
  return absl::EndsWith(name, ".lora_A.weight") ||
         absl::EndsWith(name, ".lora_B.weight");
}

std::shared_ptr<nn::LinearImpl> MakeMatrix(int64_t in, int64_t out) {
  return std::make_shared<nn::LinearImpl>(
      nn::LinearOptions(in, out).bias(false));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Lora>> Lora::Add(nn::Module* model,
                                                const LoraOptions& options) {
  if (options.rank < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("lora: expected a rank of 1 or more, got ", options.rank));
  }
  auto lora = std::unique_ptr<Lora>(new Lora(model, options));
  for (const auto& parameter : model->parameters()) {
    parameter.requires_grad_(false);
  }
  std::vector<bool> used(options.targets.size());
  for (const auto& item : model->named_modules()) {
    const auto linear = std::dynamic_pointer_cast<nn::LinearImpl>(item.value());
    if (linear == nullptr) continue;
    bool fits = false;
    for (size_t i = 0; i < used.size(); ++i) {
      if (!Fits(item.key(), options.targets[i])) continue;
      used[i] = fits = true;
    }
    if (!fits) continue;
    const int64_t in = linear->options.in_features();
    const int64_t out = linear->options.out_features();
    Layer layer{item.key(), linear, MakeMatrix(in, options.rank),
                MakeMatrix(options.rank, out)};
    nn::init::kaiming_uniform_(layer.a->weight, std::sqrt(5.0));
    nn::init::zeros_(layer.b->weight);
    linear->register_module("lora_A", layer.a);
    linear->register_module("lora_B", layer.b);
    lora->layers_.push_back(std::move(layer));
  }
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("lora: no Linear of the model fits the target '",
                     options.targets[i], "'"));
  }
  return lora;
}

absl::StatusOr<tessera::NameMap> Lora::BaseNames() const {
  std::string rules;
  for (const auto& item : model_->named_parameters()) {
    if (IsAdapter(item.key())) absl::StrAppend(&rules, item.key(), " -\n");
  }
  return tessera::NameMap::Parse(rules, "lora");
}

absl::StatusOr<tessera::NameMap> Lora::AdapterNames() const {
  std::string rules;
  const auto none = [&rules](const std::string& name) {
    absl::StrAppend(&rules, name, " -\n");
  };
  for (const auto& item : model_->named_parameters()) {
    if (!IsAdapter(item.key())) {
      none(item.key());
      continue;
    }
    absl::StrAppend(&rules, item.key(), " base_model.model.", item.key(), "\n");
  }
  for (const auto& item : model_->named_buffers()) none(item.key());
  return tessera::NameMap::Parse(rules, "lora");
}

absl::Status Lora::Save(tessera::Engine* engine, const std::string& dir,
                        const std::string& base) const {
  tessera::SaveSafetensorsOptions options;
  TESSERA_ASSIGN_OR_RETURN(options.names, AdapterNames());
  TESSERA_RETURN_IF_ERROR(engine->SaveSafetensors(dir, options));
  absl::Status wrote;
  if (engine->communicator()->rank() == 0) {
    std::error_code error;
    std::filesystem::rename(dir + "/model.safetensors",
                            dir + "/adapter_model.safetensors", error);
    std::ofstream file(dir + "/adapter_config.json");
    file << "{\n  \"peft_type\": \"LORA\",\n  \"task_type\": \"CAUSAL_LM\",\n"
         << "  \"base_model_name_or_path\": " << tessera::QuoteJson(base)
         << ",\n  \"r\": " << options_.rank
         << ",\n  \"lora_alpha\": " << options_.alpha
         << ",\n  \"lora_dropout\": 0.0,\n  \"bias\": \"none\",\n"
         << "  \"target_modules\": [\"" << absl::StrJoin(paths(), "\", \"")
         << "\"]\n}\n"
         << std::flush;
    if (error || !file) {
      wrote = absl::UnavailableError(
          absl::StrCat(dir, ": the adapters' files could not be written"));
    }
  }
  return engine->communicator()->AgreeOk(wrote, "adapter_config.json");
}

absl::Status Lora::Merge(tessera::Engine* engine) const {
  for (const Layer& layer : layers_) {
    TESSERA_ASSIGN_OR_RETURN(
        auto scope,
        engine->Summon({layer.base->weight, layer.a->weight, layer.b->weight}));
    {
      const c10::NoGradGuard no_grad;
      layer.base->weight.add_(at::matmul(layer.b->weight, layer.a->weight),
                              scale());
      layer.b->weight.zero_();
    }
    TESSERA_RETURN_IF_ERROR(scope.Close());
  }
  return absl::OkStatus();
}

std::vector<std::string> Lora::paths() const {
  std::vector<std::string> paths;
  for (const Layer& layer : layers_) paths.push_back(layer.path);
  return paths;
}
