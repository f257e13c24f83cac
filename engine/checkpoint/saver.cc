#include "engine/checkpoint/saver.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"

namespace tessera {

// Connections are made by all ranks, or by none: after a save that failed here
// and not there some have dropped them.
absl::Status Saver::MakeLinks(Communicator* comm,
                              const PendingSaveOptions& options) {
  if (links_.notes == nullptr) {
    TESSERA_ASSIGN_OR_RETURN(links_.notes,
                             comm->ShareNotes(CommTag{"SaveCheckpoint"}));
  }
  if (!options.node_local || !options.replicas) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> connected,
      comm->AllGatherStrings(links_.replicas == nullptr ? "" : "connected",
                             CommTag{"SaveCheckpoint: replicas"}));
  for (const std::string& one : connected) {
    if (one.empty()) links_.replicas.reset();
  }
  return absl::OkStatus();
}

absl::Status Saver::Save(const std::string& dir, const TrainingState& state,
                         absl::string_view client_state,
                         PendingSaveOptions options, OnEnd on_end) {
  Settle();
  TESSERA_RETURN_IF_ERROR(state.comm()->AgreeOk(
      on_end ? absl::OkStatus() : std::exchange(failed_, absl::OkStatus()),
      "SaveCheckpoint: the save before"));
  failed_and_told_ = absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(MakeLinks(state.comm(), options));
  TESSERA_ASSIGN_OR_RETURN(CheckpointContent content,
                           ContentOf(state, client_state));
  TESSERA_ASSIGN_OR_RETURN(
      pending_, PendingSave::Begin(dir, std::move(content), state.comm(),
                                   &links_, options));
  on_end_ = std::move(on_end);
  if (options.async) {
    pending_name_ =
        absl::StrCat("the checkpoint of step ", state.place.step, " in ", dir);
    return absl::OkStatus();
  }
  return End();
}

// Waits for `pending_` and returns how it ended.
absl::Status Saver::End() {
  const absl::Status status = pending_->Wait();
  pending_.reset();
  if (!status.ok()) links_.replicas.reset();
  if (const OnEnd on_end = std::exchange(on_end_, nullptr)) on_end(status);
  return status;
}

void Saver::Settle() {
  if (pending_ == nullptr) return;
  absl::Status* const failed = on_end_ ? &failed_and_told_ : &failed_;
  const absl::Status status = End();
  if (status.ok()) return;
  *failed = Annotate(status, pending_name_);
  TESSERA_LOG(ERROR) << failed->message();
}

absl::Status Saver::Wait() {
  Settle();
  absl::Status status = std::exchange(failed_, absl::OkStatus());
  status.Update(std::exchange(failed_and_told_, absl::OkStatus()));
  return status;
}

void Saver::BeforeChange() {
  if (pending_ == nullptr) return;
  if (pending_->done()) {
    Settle();
  } else {
    pending_->Detach();
  }
}

}  // namespace tessera
