#include "engine/train/known_parameters.h"

#include "absl/strings/str_cat.h"
#include "sharding/partition/module_walk.h"
#include "torch/nn/module.h"

namespace tessera {

void KnownParameters::Note(const torch::nn::Module& module) {
  for (const at::Tensor& p : module.parameters()) {
    known_.insert(p.unsafeGetTensorImpl());
  }
  fingerprint_ = FingerprintOfParameters(module);
}

absl::Status KnownParameters::Check(const torch::nn::Module& module) const {
  if (FingerprintOfParameters(module) == fingerprint_) {
    return absl::OkStatus();
  }
  for (const auto& p : module.named_parameters()) {
    if (known_.contains(p.value().unsafeGetTensorImpl())) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "parameter '", p.key(),
        "' was registered after Engine::Create, which does not see it; Close() "
        "the engine and Create another"));
  }
  return absl::FailedPreconditionError(
      "some of the module's parameters were unregistered after Engine::Create; "
      "Close() the engine and Create another");
}

}  // namespace tessera
