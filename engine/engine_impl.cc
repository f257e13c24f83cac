#include "engine/engine_impl.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "sharding/dispatch/saved_tensors.h"
#include "sharding/torch/storage_access.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {

Engine::Impl::Impl(std::shared_ptr<torch::nn::Module> module,
                   proto::Config config, std::shared_ptr<Communicator> comm,
                   const EngineOptions& options)
    : module_(std::move(module)),
      config_(std::move(config)),
      comm_(std::move(comm)),
      settings_(SettingsOf(config_, options, comm_->world_size())) {}

Engine::Impl::~Impl() {
  *alive_ = false;
  gradients_.reset();
  if (served_ != nullptr) served_->Stop();
  for (const auto& flat : flats_) flat->Abandon();
}

absl::Status Engine::Impl::CheckOpen() const {
  if (closed_) return absl::FailedPreconditionError("the engine was closed");
  if (gradients_ != nullptr && gradients_->runs()) {
    return absl::FailedPreconditionError(
        "called within an Engine::Backward, by a hook or another thread: call "
        "it when that has returned");
  }
  return absl::OkStatus();
}

absl::StatusOr<Engine::Impl::ParameterRef> Engine::Impl::Find(
    absl::string_view name) const {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  const auto place = places_.find(std::string(name));
  if (place != places_.end()) return place->second;
  return absl::NotFoundError(absl::StrCat(
      "the engine has no parameter '", name,
      "' (ignored ones, and those without elements, are the "
      "module's own; names are those of named_parameters(); a tied one goes "
      "by its first)"));
}

absl::StatusOr<FlatParameter*> Engine::Impl::FindUnit(
    absl::string_view name) const {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  for (const auto& flat : flats_) {
    if (flat->name() == name) return flat.get();
  }
  return absl::NotFoundError(absl::StrCat(
      "there is no unit '", name, "'; Engine::DescribeUnits lists them"));
}

absl::StatusOr<std::string> Engine::Impl::UnitOf(
    absl::string_view parameter) const {
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place, Find(parameter));
  return flats_[static_cast<size_t>(place.flat)]->name();
}

absl::Status Engine::Impl::SetPrefetch(absl::string_view flat, Phase phase,
                                       const std::vector<std::string>& next) {
  TESSERA_ASSIGN_OR_RETURN(FlatParameter* const of, FindUnit(flat));
  std::vector<Gatherable*> flats;
  for (const std::string& name : next) {
    TESSERA_ASSIGN_OR_RETURN(FlatParameter* const one, FindUnit(name));
    flats.push_back(one);
  }
  schedule_->SetPrefetch(of, phase, std::move(flats));
  return absl::OkStatus();
}

absl::Status Engine::Impl::SetReshardAfterForward(absl::string_view flat,
                                                  bool reshard) {
  TESSERA_ASSIGN_OR_RETURN(FlatParameter* const of, FindUnit(flat));
  schedule_->SetReshardAfterForward(of, reshard);
  return absl::OkStatus();
}

TrainingState Engine::Impl::State() {
  return {
      flats_,      optimizer_.get(),           scaler_ ? &*scaler_ : nullptr,
      comm_.get(), shard_group_->world_size(), stage(),
      step_};
}

absl::Status Engine::Impl::Save(const std::string& dir,
                                absl::string_view client_state) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  absl::Status mine;
  if (has_backward_ || micro_steps_ > 0) {
    mine = absl::FailedPreconditionError(
        "in the middle of a step; save after Step at an accumulation boundary");
  }
  TESSERA_RETURN_IF_ERROR(AgreeOnUpdate(mine, "SaveCheckpoint"));
  const absl::Status equal = CheckReplicas();
  TESSERA_RETURN_IF_ERROR(EndUpdate());
  TESSERA_RETURN_IF_ERROR(equal);
  return CatchTorch("SaveCheckpoint",
                    [&] { return SaveState(dir, State(), client_state); });
}

absl::StatusOr<std::string> Engine::Impl::Load(const std::string& dir) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  TESSERA_RETURN_IF_ERROR(AgreeOnUpdate(absl::OkStatus(), "LoadCheckpoint"));
  TESSERA_ASSIGN_OR_RETURN(
      LoadedState loaded,
      CatchTorch("LoadCheckpoint", [&] { return LoadState(dir, State()); }));
  for (size_t u = 0; u < flats_.size(); ++u) {
    TESSERA_RETURN_IF_ERROR(Publish(u, /*only_with_gradient=*/false,
                                    /*working_written=*/false));
  }
  TESSERA_RETURN_IF_ERROR(EndUpdate());
  TESSERA_RETURN_IF_ERROR(ZeroGrad());
  step_ = loaded.step;
  if (scaler_.has_value()) report_.skipped_steps = scaler_->skipped_steps();
  return loaded.client_state;
}

StateBytes Engine::Impl::state_bytes() const {
  StateBytes bytes;
  if (closed_) return bytes;
  for (const auto& flat : flats_) bytes.parameters += flat->resident_bytes();
  bytes.gradients = gradients_->resident_bytes();
  if (optimizer_ != nullptr) bytes.optimizer = optimizer_->resident_bytes();
  return bytes;
}

StateBytes Engine::Impl::replicated_state_bytes() const {
  StateBytes bytes;
  for (const auto& flat : flats_) {
    const auto size = [&](at::ScalarType dtype) {
      return flat->layout().payload_numel() *
             static_cast<int64_t>(c10::elementSize(dtype));
    };
    bytes.parameters += size(flat->dtype());
    if (!flat->trainable()) continue;
    const bool masters = flat->master_dtype() != flat->dtype();
    if (masters) bytes.parameters += size(flat->master_dtype());
    bytes.gradients += size(flat->reduce_dtype());
    if (flat->reduce_dtype() != flat->master_dtype()) {
      bytes.gradients += size(flat->master_dtype());
    }
    if (optimizer_ != nullptr) {
      bytes.optimizer += 2 * size(flat->master_dtype());
    }
  }
  return bytes;
}

std::vector<std::string> Engine::Impl::DescribeUnits() const {
  std::vector<std::string> lines;
  for (const auto& flat : flats_) {
    int64_t numel = 0;
    for (const auto& p : flat->parameters()) numel += p.tensor.numel();
    lines.push_back(absl::StrCat(flat->name(), ": ", flat->parameters().size(),
                                 " parameters, ", numel, " elements"));
  }
  return lines;
}

}  // namespace tessera
