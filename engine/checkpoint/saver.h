// Saver: saves the checkpoints of an engine, one at a time; at most one is
// being written while training goes on.
#ifndef ENGINE_CHECKPOINT_SAVER_H_
#define ENGINE_CHECKPOINT_SAVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/save/pending_save.h"
#include "comm/note_board.h"
#include "engine/checkpoint/training_state.h"

namespace tessera {

class Saver {
 public:
  using OnEnd = std::function<void(const absl::Status&)>;

  // Waits for the previous save; if that failed, returns its error and does not
  // begin. With `on_end`, errors of other saves are not returned here, nor is
  // this one's by another save: see SaveOptions. With `options.async` returns
  // when what may change is copied. COLLECTIVE.
  absl::Status Save(const std::string& dir, const TrainingState& state,
                    absl::string_view client_state, PendingSaveOptions options,
                    OnEnd on_end = nullptr);
  // Waits until nothing is being written. Returns the error of a save that no
  // call has returned yet, else that of the last save. LOCAL, blocking.
  absl::Status Wait();
  // Waits until nothing is being written; an error is kept for Wait. LOCAL,
  // blocking.
  void Settle();
  bool saving() const { return pending_ != nullptr && !pending_->done(); }
  // Must be called before masters or optimizer states change: a save that still
  // reads them gets copies. LOCAL.
  void BeforeChange();
  // As BeforeChange, for callers that must not run what a finished save still
  // has to run (OnEnd).
  void Detach() {
    if (pending_ != nullptr) pending_->Detach();
  }

 private:
  absl::Status MakeLinks(Communicator* comm, const PendingSaveOptions& options);
  absl::Status End();

  SaveLinks links_;
  std::unique_ptr<PendingSave> pending_;
  std::string pending_name_;
  OnEnd on_end_;                  // of `pending_`
  absl::Status failed_;           // to be returned by Save or Wait
  absl::Status failed_and_told_;  // given to `on_end`; to be returned by Wait
};

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_SAVER_H_
