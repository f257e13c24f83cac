// Gradients that no Run has made, in .grad() of parameters, and zero_grad()
// calls of the user's.
//
// Why they are not simply taken: in libtorch's habits most of them are meant to
// be dropped. A look at an input's gradient, or the generator's loss that goes
// through the critic, leave some behind, and zero_grad() follows; a sum that
// held them would train on another loss, and nothing would tell. So they stay
// where libtorch has put them, for zero_grad() to find, and what is there still
// in the next Run is an error unless it was asked for.
//
// Why calls are counted: an engine's own gradients are not in .grad(), where
// zero_grad(), clip_grad_norm_() and optimizers look. They would do nothing,
// and say nothing.
#include <algorithm>
#include <atomic>
#include <string>

#include "ATen/ops/any.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/grad_access.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "sharding/gradient/gradients.h"

namespace tessera {
namespace {

// What FlatGradient takes.
at::Tensor DenseOrSparse(const at::Tensor& gradient) {
  const bool is = gradient.layout() == at::kStrided || gradient.is_sparse();
  return is ? gradient : gradient.to_dense();
}

// zero_grad(set_to_none=false) leaves such.
bool IsZero(const at::Tensor& gradient) {
  const at::Tensor dense =
      gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
  return !at::any(dense).item().toBool();
}

}  // namespace

absl::Status Gradients::TakeOutside() {
  TorchScope scope;
  for (const auto& gradient : flats_) {
    const auto& params = gradient->flat().parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      at::Tensor outside = PeekGrad(params[i].tensor);
      if (!outside.defined()) continue;
      if (running().outside_factor.has_value()) {
        const double factor = *running().outside_factor;
        if (factor != 1) outside = outside * factor;
        // As one of several, which autograd would have added up.
        TESSERA_RETURN_IF_ERROR(gradient->Add(static_cast<int>(i),
                                              DenseOrSparse(outside), HowNow(),
                                              /*partial=*/true));
      } else if (!IsZero(outside)) {
        return absl::FailedPreconditionError(absl::StrCat(
            "Backward: parameter '", params[i].name,
            "' has a gradient that no Backward of this engine made (of a bare "
            "loss.backward(), of another engine's Backward, or .grad() was "
            "set); first call zero_grad() of the module, which drops it, or "
            "set BackwardOptions::add_outside, which adds it"));
      }
      params[i].tensor.mutable_grad().reset();
    }
  }
  return absl::OkStatus();
}

void Gradients::ForgetAccesses() {
  for (const auto& of_flat : accesses_) {
    for (GradAccesses* accesses : of_flat) {
      if (accesses == nullptr) continue;
      accesses->changes.store(0, std::memory_order_relaxed);
      accesses->looks.store(0, std::memory_order_relaxed);
    }
  }
}

absl::StatusOr<bool> Gradients::WasZeroedByUser() const {
  TorchScope scope;
  const std::string* zeroed = nullptr;
  const std::string* kept = nullptr;
  for (size_t f = 0; f < flats_.size(); ++f) {
    const FlatGradient& gradient = *flats_[f];
    for (size_t i = 0; i < gradient.num_parameters(); ++i) {
      const GradAccesses* const accesses = accesses_[f][i];
      const bool has =
          gradient.has_gradient(i) || gradient.arrived(i) || gradient.held(i);
      if (!has || accesses == nullptr) continue;
      const auto& parameter = gradient.flat().parameters()[i];
      const at::Tensor outside = PeekGrad(parameter.tensor);  // set by hand
      const bool asked =
          accesses->changes.load(std::memory_order_relaxed) > 0 &&
          (!outside.defined() || IsZero(outside));
      (asked ? zeroed : kept) = &parameter.name;
    }
  }
  if (zeroed == nullptr) return false;
  if (kept == nullptr) return true;
  return absl::FailedPreconditionError(absl::StrCat(
      "zero_grad() was called for parameter '", *zeroed, "' and not for '",
      *kept,
      "'; the gradients of a step are dropped together: call zero_grad() "
      "of the whole module, or Engine::ZeroGrad"));
}

bool Gradients::AnyUsedWithoutGrad() const {
  return std::any_of(flats_.begin(), flats_.end(), [](const auto& gradient) {
    return gradient->flat().used_without_grad().load();
  });
}

absl::Status Gradients::TakeLooks() {
  const std::string* looked_at = nullptr;
  for (size_t f = 0; f < flats_.size(); ++f) {
    const FlatGradient& gradient = *flats_[f];
    for (size_t i = 0; i < gradient.num_parameters(); ++i) {
      GradAccesses* const accesses = accesses_[f][i];
      if (accesses == nullptr || accesses->looks.exchange(0) == 0) continue;
      if (gradient.has_gradient(i) || gradient.arrived(i) || gradient.held(i)) {
        looked_at = &gradient.flat().parameters()[i].name;
      }
    }
  }
  if (looked_at == nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      ".grad() of parameter '", *looked_at,
      "' was asked for since Backward and is undefined: the engine has the "
      "gradient, and clip_grad_norm_ or a torch::optim over the module's "
      "parameters does nothing; set gradient_clipping, and call Engine::Step; "
      "Engine::Gradient and Engine::last_step().grad_norm tell of gradients"));
}

absl::Status Gradients::CheckNothingPending() const {
  for (const auto& gradient : flats_) {
    const auto& params = gradient->flat().parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      if (!gradient->arrived(i) && !gradient->held(i) &&
          !PeekGrad(params[i].tensor).defined()) {
        continue;
      }
      return absl::FailedPreconditionError(absl::StrCat(
          "parameter '", params[i].name,
          "' has a gradient that is not reduced (of a bare loss.backward(), of "
          "another engine's Backward, of a Backward within a NoSyncScope, or "
          ".grad() was set); call Backward once more, or ZeroGrad to drop "
          "all"));
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
