// SaveRoom: what a CheckpointManager does where the disk of its folder is full.
//
// A disk may hold keep_last checkpoints and not one more, or be full for a
// while of what others write. So a save that finds it full is made again,
// within a time: what interrupted saves left and what is beyond keep_last goes
// first, then older checkpoints that keep_last would keep (MakeRoom says which
// never go). From the first such save on that is done before each one.
//
// Threads: one, that of the manager's calls.
#ifndef ENGINE_SAVE_ROOM_H_
#define ENGINE_SAVE_ROOM_H_

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
  bool leads = false;  // this rank, a folder
  FolderHolds holds = FolderHolds::kAll;
  absl::Duration retry_for;
};

class SaveRoom {
 public:
  SaveRoom(std::shared_ptr<Communicator> comm, SaveRoomOptions options)
      : comm_(std::move(comm)), options_(std::move(options)) {}

  // Runs `save` of all ranks until it does not end by a full disk, or
  // `retry_for` has passed; `before` is how the last async save ended. `good`
  // is known to be whole, or "". The last error says what is needed and what is
  // free. COLLECTIVE, blocking.
  absl::Status Save(absl::Status before, const std::string& good,
                    const Retention& retention,
                    const std::function<absl::Status()>& save);

  // Whether it is time to make the last async save again, which ended so.
  // LOCAL.
  bool IsTimeAgain(const absl::Status& before);

 private:
  absl::StatusOr<std::string> OfRank0(const std::string& mine);
  absl::StatusOr<std::string> Make(const std::string& good,
                                   const Retention& retention, int least,
                                   absl::Duration pause);

  const std::shared_ptr<Communicator> comm_;
  const SaveRoomOptions options_;
  bool tight_ = false;     // the same on all ranks
  int full_in_a_row_ = 0;  // async saves that ended so
  bool seemed_enough_ =
      false;  // what this rank's disk had free, when looked at
  // Of async saves: when the first found the disk full, and when to save again.
  std::optional<absl::Duration> full_since_;
  absl::Duration pause_, next_;
};

}  // namespace tessera
#endif  // ENGINE_SAVE_ROOM_H_
