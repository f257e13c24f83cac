// Lora: low-rank adapters on chosen linear layers of any model, whose class
// knows nothing of them.
//
//   y = x W^T + b   becomes   y = x W^T + b + alpha / rank * x A^T B^T
//
// W and b are frozen, and so is all else; A [rank, in] and B [out, rank], zeros
// at first, are trained. They are registered in the Linear itself, as
// `lora_A` and `lora_B`, so a module's children, names and shards show them,
// and an engine trains them as it does any parameter.
//
// Note [How the class stays as it is]. LinearImpl::forward is no virtual
// function, and the parent holds a LinearImpl: nothing that takes its place in
// the tree of modules would be called. But every Linear ends in one operator
// with a view of its weight, matmul or addmm, and libtorch's dispatcher lets a
// mode have an operator before all else does, autograd and engines included.
// While a Lora::Scope lives, one does: it knows the weight by its storage, and
// adds the adapter's part. The mode's key is TESTING_ONLY_GenericMode, the only
// one for which libtorch has no code of its own: two libraries that used it
// would meet. Where a model's source is yours, a subclass of LinearImpl in the
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
#include "engine/tessera.h"
#include "torch/nn/modules/linear.h"

struct LoraOptions {
  int64_t rank = 8;   // peft's r
  double alpha = 16;  // peft's lora_alpha
  // peft's target_modules: a Linear whose path is one of these, or ends in one
  // after a dot, has an adapter. `*` stands for a part without a dot.
  std::vector<std::string> targets = {"q_proj", "v_proj"};
};

class Lora {
 public:
  // Adds adapters to the Linears of `model` that fit, and freezes all other
  // parameters. A is drawn from torch's default generator. Before
  // Engine::Create. InvalidArgument: a target that no Linear fits, a rank below
  // 1. LOCAL; the same on all ranks.
  static absl::StatusOr<std::unique_ptr<Lora>> Add(torch::nn::Module* model,
                                                   const LoraOptions& options);

  // While it lives, forwards of this thread have the adapters' parts. Backward
  // needs none.
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

  // Names for Engine::LoadSafetensors and SaveSafetensors of the base, which
  // has no adapters, and of the adapters alone, as peft calls them.
  absl::StatusOr<tessera::NameMap> BaseNames() const;
  absl::StatusOr<tessera::NameMap> AdapterNames() const;

  // Writes peft's adapter_model.safetensors and adapter_config.json into `dir`;
  // `base` is what the latter says of where the base is. COLLECTIVE. Errors:
  // Engine::SaveSafetensors's; Unavailable.
  absl::Status Save(tessera::Engine* engine, const std::string& dir,
                    const std::string& base) const;

  // W += alpha / rank * B A and then B = 0, layer by layer: the model says the
  // same, except for rounding, without a Scope. COLLECTIVE.
  absl::Status Merge(tessera::Engine* engine) const;

  // The paths of the layers that have adapters, in the model's order.
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
