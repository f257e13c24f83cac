// Saver: the checkpoints that an engine saves, one at a time; at most one is
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

  // Waits for the save before, and returns its error if it failed: this one is
  // not begun then. With `on_end` no error of another's is returned, nor is
  // this one's by another: see SaveOptions. With `options.async` returns when
  // what may change is copied. COLLECTIVE.
  absl::Status Save(const std::string& dir, const TrainingState& state,
                    absl::string_view client_state, PendingSaveOptions options,
                    OnEnd on_end = nullptr);
  // Waits until nothing is being written. The error of a save that nobody has
  // been told of, and else that of the last one. LOCAL, blocking.
  absl::Status Wait();
  // Waits, too; an error is kept for Wait. LOCAL, blocking.
  void Settle();
  bool saving() const { return pending_ != nullptr && !pending_->done(); }
  // Masters and optimizer states are about to change: a save that still reads
  // them gets copies. LOCAL.
  void BeforeChange();
  // The same for who must not run what a save that is done still has to
  // (OnEnd).
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
  absl::Status failed_;           // to be told by Save or Wait
  absl::Status failed_and_told_;  // to `on_end`; to be told by Wait
};

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_SAVER_H_
