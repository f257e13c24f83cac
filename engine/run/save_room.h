// SaveRoom: makes room for a CheckpointManager where the disk of its folder is
// full.
//
// A disk may hold keep_last checkpoints and not one more, or be full for a
// while because of other writers. So a save that finds it full is retried for
// some time, after removing first what interrupted saves left and checkpoints
// beyond keep_last, then older ones that keep_last would keep (MakeRoom says
// which are never removed). After the first such save, room is made before each
// save.
//
// Threads: all calls come from the thread of the manager's calls.
#ifndef ENGINE_RUN_SAVE_ROOM_H_
#define ENGINE_RUN_SAVE_ROOM_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/format/step_folders.h"
#include "comm/communicator.h"

namespace tessera {

struct SaveRoomOptions {
  std::string dir;
  bool leads = false;  // this rank does the work in a folder
  FolderHolds holds = FolderHolds::kAll;
  absl::Duration retry_for;
};

class SaveRoom {
 public:
  SaveRoom(std::shared_ptr<Communicator> comm, SaveRoomOptions options)
      : comm_(std::move(comm)), options_(std::move(options)) {}

  // Runs `save` on all ranks until it does not fail because of a full disk, or
  // until `retry_for` has passed. `before`: how the last async save ended;
  // `good`: a checkpoint known to be whole, or "". The last error says what is
  // needed and what is free. COLLECTIVE, blocking.
  absl::Status Save(absl::Status before, const std::string& good,
                    const Retention& retention,
                    const std::function<absl::Status()>& save);

  // Whether it is time to retry the last async save, which found the disk full
  // (`before`). LOCAL.
  bool IsTimeAgain(const absl::Status& before);

 private:
  absl::StatusOr<std::string> OfRank0(const std::string& mine);
  absl::StatusOr<std::string> Make(const std::string& good,
                                   const Retention& retention, int least,
                                   absl::Duration pause);

  const std::shared_ptr<Communicator> comm_;
  const SaveRoomOptions options_;
  bool tight_ = false;     // the same on all ranks
  int full_in_a_row_ = 0;  // async saves that found the disk full
  bool seemed_enough_ =
      false;  // what this rank's disk had free, when looked at
  // When the first async save found the disk full, and when to save again.
  std::optional<absl::Duration> full_since_;
  absl::Duration pause_, next_;
};

}  // namespace tessera
#endif  // ENGINE_RUN_SAVE_ROOM_H_
