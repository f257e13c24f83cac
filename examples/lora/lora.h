// Lora adds low-rank adapters to chosen linear layers of any model, whose class
// need not change.
//
//   y = x W^T + b   becomes   y = x W^T + b + alpha / rank * x A^T B^T
//
// W and b are frozen, and so is all else; A [rank, in] and B [out, rank], zeros
// at first, are trained. They are registered in the Linear itself, as `lora_A`
// and `lora_B`, so a module's children, names and shards show them, and an
// engine trains them as it does any parameter.
//
// Note [How the class stays as it is]. LinearImpl::forward is not virtual, and
// the parent holds a LinearImpl: nothing that replaced it in the module tree
// would be called. But every Linear ends in one operator with its weight or a
// view of it, linear, matmul or addmm, and libtorch's dispatcher lets a mode
// handle an operator before everything else, autograd and engines included. A
// Lora::Scope installs such a mode: it recognises the weight by its storage,
// and adds the adapter's part. The mode's key is TESTING_ONLY_GenericMode, the
// only one for which libtorch has no code of its own: two libraries that used
// it would collide. If you own the model's source, a subclass of LinearImpl in
// place of Linear does the same in five lines and needs no Scope.
//
// Source: Hu et al., 2021. Names, files and initial values are those of Hugging
// Face's peft (adapter_model.safetensors, adapter_config.json).
#ifndef EXAMPLES_LORA_LORA_H_
#define EXAMPLES_LORA_LORA_H_

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tessera/tessera.h"
#include "torch/nn/modules/linear.h"

struct LoraOptions {
  int64_t rank = 8;   // peft's r
  double alpha = 16;  // peft's lora_alpha
  // peft's target_modules: a Linear has an adapter if its path is one of these,
  // or ends in one after a dot. `*` stands for a part without a dot.
  std::vector<std::string> targets = {"q_proj", "v_proj"};
};

class Lora {
 public:
  // Adds adapters to the Linears of `model` that match, and freezes all other
  // parameters. Draws A from torch's default generator. Call it before
  // Engine::Create. Returns InvalidArgument for a target that no Linear
  // matches, or a rank below 1. LOCAL; the same on all ranks.
  static absl::StatusOr<std::unique_ptr<Lora>> Add(torch::nn::Module* model,
                                                   const LoraOptions& options);

  // While it lives, forwards of this thread include the adapters' parts.
  // Backward does not need it.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const Lora& lora);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

  // Return the names for Engine::LoadSafetensors and SaveSafetensors: those of
  // the base, which has no adapters, and those of the adapters alone, as peft
  // names them.
  absl::StatusOr<tessera::NameMap> BaseNames() const;
  absl::StatusOr<tessera::NameMap> AdapterNames() const;

  // Writes peft's adapter_model.safetensors and adapter_config.json into `dir`;
  // the latter names `base` as the base model. COLLECTIVE. Errors are those of
  // Engine::SaveSafetensors, and Unavailable.
  absl::Status Save(tessera::Engine* engine, const std::string& dir,
                    const std::string& base) const;

  // Sets W += alpha / rank * B A and then B = 0, layer by layer: without a
  // Scope the model then gives the same results, except for rounding.
  // COLLECTIVE.
  absl::Status Merge(tessera::Engine* engine) const;

  // Returns the paths of the layers that have adapters, in the model's order.
  std::vector<std::string> paths() const;

 private:
  struct Layer {
    std::string path;
    std::shared_ptr<torch::nn::LinearImpl> base, a, b;
  };
  Lora(const torch::nn::Module* model, const LoraOptions& options)
      : model_(model), options_(options) {}
  double scale() const {
    return options_.alpha / static_cast<double>(options_.rank);
  }

  const torch::nn::Module* const model_;  // not owned, outlives this
  const LoraOptions options_;
  std::vector<Layer> layers_;
};

#endif  // EXAMPLES_LORA_LORA_H_
