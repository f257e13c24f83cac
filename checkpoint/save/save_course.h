// SaveCourse: one save of all ranks, from the first byte to its end; what
// "tessera-save" runs. Which rank does what is in
// checkpoint/save/pending_save.h.
#ifndef CHECKPOINT_SAVE_SAVE_COURSE_H_
#define CHECKPOINT_SAVE_SAVE_COURSE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/manifest.pb.h"
#include "checkpoint/save/pending_save.h"
#include "checkpoint/save/save_notes.h"
#include "checkpoint/save/saved_pieces.h"
#include "comm/note_board.h"

namespace tessera {

// What the ranks have agreed on before.
struct SavePlan {
  std::string dir;
  int rank = 0;
  int world_size = 1;
  uint64_t id = 0;
  int64_t begun_micros = 0;
  // By rank, who leads the folder that it writes to; empty: there is one
  // folder, and rank 0 does.
  std::vector<int> leaders;
  ReplicaLinks* replicas = nullptr;  // null: there are none
  // Of the folder that this rank leads; null: it leads none.
  std::unique_ptr<Saving> saving;
  PendingSaveOptions options;
  proto::CheckpointManifest head;
  std::vector<std::pair<std::string, std::string>> values;
};

class SaveCourse {
 public:
  // Both outlive this. LOCAL.
  SaveCourse(SavePlan plan, SavedPieces* pieces, NoteBoard* board);
  // How it ended, as PendingSave::Wait says. LOCAL, as long as that takes.
  absl::Status Run();

 private:
  using Files = std::vector<proto::CheckpointFile>;

  absl::Status Lead();
  absl::Status Follow();
  absl::Status WriteFile();
  absl::Status GatherFiles(Files* files);
  absl::Status TakeFiles(absl::string_view kind, std::vector<int>* missing,
                         Files* files);
  absl::Status Commit(const Files& files);
  absl::Status CommitBusily(const Files& files);
  std::optional<absl::Status> CommitPart();
  absl::Status AwaitHosts();
  void AwaitSeen();
  void AfterCommit();
  std::optional<absl::Status> HearResult();
  void RemoveFiles() const;
  void EndPart(const absl::Status& result);
  std::vector<int> Others() const;

  SavePlan plan_;
  SavedPieces* const pieces_;
  NoteBoard* const board_;
  SaveNotes notes_;
  proto::CheckpointFile file_;  // by WriteFile
  bool committed_ = false;
  bool undone_ = false;  // rank 0 says so: nothing of it is to stay
};

}  // namespace tessera
#endif  // CHECKPOINT_SAVE_SAVE_COURSE_H_
