// SaveCourse is one save of all ranks, from the first byte to its end;
// "tessera-save" runs it. checkpoint/save/pending_save.h says which rank does
// what.
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

// SavePlan is what the ranks have agreed on before.
struct SavePlan {
  std::string dir;
  int rank = 0;
  int world_size = 1;
  uint64_t id = 0;
  int64_t begun_micros = 0;
  // By rank, the leader of the folder that it writes to. Empty: there is one
  // folder, which rank 0 leads.
  std::vector<int> leaders;
  ReplicaLinks* replicas = nullptr;  // null: there are none
  // The save of the folder that this rank leads; null: it leads none.
  std::unique_ptr<Saving> saving;
  PendingSaveOptions options;
  proto::CheckpointManifest head;
  std::vector<std::pair<std::string, std::string>> values;
};

class SaveCourse {
 public:
  // `pieces` and `board` outlive this. LOCAL.
  SaveCourse(SavePlan plan, SavedPieces* pieces, NoteBoard* board);
  // Runs the save and returns its result, as PendingSave::Wait does. LOCAL,
  // blocking.
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
  proto::CheckpointFile file_;  // from WriteFile
  bool committed_ = false;
  bool undone_ = false;  // rank 0 says that nothing of it may stay
};

}  // namespace tessera
#endif  // CHECKPOINT_SAVE_SAVE_COURSE_H_
