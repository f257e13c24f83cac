#include "engine/parts/engine_parts.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {

absl::Status EngineParts::CheckOpen() const {
  if (closed) return absl::FailedPreconditionError("the engine was closed");
  TESSERA_RETURN_IF_ERROR(lost);
  if (gradients != nullptr && gradients->runs()) {
    return absl::FailedPreconditionError(
        "called within an Engine::Backward, by a hook or another thread: call "
        "it when that has returned");
  }
  return absl::OkStatus();
}

absl::Status EngineParts::CheckNotAveraged() const {
  if (!averages_in) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the parameters are their averages; call Engine::SwapOutAverages before");
}

absl::Status EngineParts::CheckNotSummoned() const {
  if (summoned.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("[", (*summoned.begin())->name(),
                   "] a scope of Engine::Summon is open; Close() it before"));
}

absl::StatusOr<ParameterRef> EngineParts::Find(absl::string_view name) const {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  const auto place = places.find(std::string(name));
  if (place != places.end()) return place->second;
  return absl::NotFoundError(absl::StrCat(
      "the engine has no parameter '", name,
      "' (ignored ones, and those without elements, are the "
      "module's own; names are those of named_parameters(); a tied one goes "
      "by its first)"));
}

absl::StatusOr<FlatParameter*> EngineParts::FindFlat(
    absl::string_view name) const {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  for (const auto& flat : flats) {
    if (flat->name() == name) return flat.get();
  }
  return absl::NotFoundError(absl::StrCat(
      "there is no unit '", name, "'; Engine::DescribeUnits lists them"));
}

void EngineParts::FailTiers(const absl::Status& status) {
  if (stream != nullptr) stream->Fail(status);
  if (stream == nullptr && moved) Lose(status);
}

void EngineParts::Lose(const absl::Status& status) {
  lost.Update(absl::Status(
      status.code(),
      absl::StrCat(
          status.message(),
          " (so the model's states are neither those of before nor "
          "those of after: go on from a checkpoint, in a new engine)")));
}

void EngineParts::SetRequiresGrad(const at::Tensor& parameter,
                                  bool requires_grad) {
  requires_grad_before.try_emplace(parameter.unsafeGetTensorImpl(), parameter,
                                   parameter.requires_grad());
  parameter.requires_grad_(requires_grad);
}

void EngineParts::RestoreRequiresGrad() {
  for (const auto& [impl, before] : requires_grad_before) {
    before.first.requires_grad_(before.second);
  }
  requires_grad_before.clear();
}

double EngineParts::divisor() const {
  const double scale = scaler.has_value() ? scaler->scale() : 1;
  return weighted.value_or(false) ? scale * gradients->weight_divisor() : scale;
}

at::Device EngineParts::device() const {
  return flats.empty() ? at::Device(at::kCPU) : flats[0]->device();
}

}  // namespace tessera
