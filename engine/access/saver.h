// Saver: the checkpoints that an engine saves, one at a time; at most one is
// being written while training goes on.
#ifndef ENGINE_ACCESS_SAVER_H_
#define ENGINE_ACCESS_SAVER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/save/pending_save.h"
#include "comm/note_board.h"
#include "engine/access/training_state.h"

namespace tessera {

class Saver {
 public:
  // Waits for the save before, and returns its error if it failed: this one is
  // not begun then. With `options.async` returns when what may change is
  // copied. COLLECTIVE.
  absl::Status Save(const std::string& dir, const TrainingState& state,
                    absl::string_view client_state, PendingSaveOptions options);
  // Waits until nothing is being written. The error of a save that nobody has
  // been told of. LOCAL, blocking.
  absl::Status Wait();
  // Waits, too; an error is kept for Wait. LOCAL, blocking.
  void Settle();
  bool saving() const { return pending_ != nullptr && !pending_->done(); }
  // Masters and optimizer states are about to change: a save that still reads
  // them gets copies. LOCAL.
  void BeforeChange();

 private:
  SaveLinks links_;
  std::unique_ptr<PendingSave> pending_;
  std::string pending_name_;
  absl::Status failed_;
};

}  // namespace tessera
#endif  // ENGINE_ACCESS_SAVER_H_
