#include "engine/access/saver.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"

namespace tessera {

absl::Status Saver::Save(const std::string& dir, const TrainingState& state,
                         absl::string_view client_state,
                         PendingSaveOptions options) {
  TESSERA_RETURN_IF_ERROR(
      state.comm->AgreeOk(Wait(), "SaveCheckpoint: the save before"));
  if (links_.notes == nullptr) {
    TESSERA_ASSIGN_OR_RETURN(links_.notes,
                             state.comm->ShareNotes(CommTag{"SaveCheckpoint"}));
  }
  TESSERA_ASSIGN_OR_RETURN(CheckpointContent content,
                           ContentOf(state, client_state));
  TESSERA_ASSIGN_OR_RETURN(
      pending_, PendingSave::Begin(dir, std::move(content), state.comm, &links_,
                                   options));
  if (options.async) {
    pending_name_ =
        absl::StrCat("the checkpoint of step ", state.step, " in ", dir);
    return absl::OkStatus();
  }
  const absl::Status status = pending_->Wait();
  pending_.reset();
  if (!status.ok()) links_.replicas.reset();
  return status;
}

void Saver::Settle() {
  if (pending_ == nullptr) return;
  const absl::Status status = pending_->Wait();
  pending_.reset();
  if (status.ok()) return;
  links_.replicas.reset();
  failed_ = Annotate(status, pending_name_);
  TESSERA_LOG(ERROR) << failed_.message();
}

absl::Status Saver::Wait() {
  Settle();
  return std::exchange(failed_, absl::OkStatus());
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
