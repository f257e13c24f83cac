// PendingSave is a save from its beginning, in a call of all ranks, to its end
// on threads of its own ("tessera-save", "tessera-disk"). These exchange notes
// (comm/note_board.h), so that no collective of the training waits for a disk,
// nor a disk for the training.
//
//   rank 1   writes its file --> "written"        .--> "seen"
//   rank 0   writes its file --> reads all --> commits --> "ended"
//
// Where each host has a folder of its own, the leaders of the other hosts
// commit, too:
//
//   rank 8   "written" --> reads all --> commits --> "committed"
//   rank 0   "written" --> reads all --> commits --> reads those --> "ended"
//
// A rank says each second that it is at work, so that a slow disk does not look
// like a rank that has stopped. A rank that is silent for the collectives'
// timeout, or whose process ends before its file is written, fails the save on
// all ranks; the previous checkpoint stays.
#ifndef CHECKPOINT_SAVE_PENDING_SAVE_H_
#define CHECKPOINT_SAVE_PENDING_SAVE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/format/manifest.pb.h"
#include "checkpoint/save/replica_links.h"
#include "checkpoint/save/saved_pieces.h"
#include "comm/communicator.h"
#include "comm/note_board.h"

namespace tessera {

// CheckpointContent is what a rank writes. Each element of each state of each
// storage is in one rank's pieces.
struct CheckpointContent {
  // Identical on all ranks; PendingSave fills in version, id and files.
  proto::CheckpointManifest head;
  std::vector<SavedPiece> pieces;
  // The values that this rank stores for itself.
  std::vector<std::pair<std::string, std::string>> values;
};

struct PendingSaveOptions {
  // Whether training goes on meanwhile: pieces whose memory does not last are
  // copied at once, and the rest by Detach.
  bool async = false;
  // The most bytes that a rank writes in a second; 0: no limit.
  int64_t max_bandwidth = 0;
  // Whether each host has a folder of its own (checkpoint/local_folders.h). A
  // rank of each host commits there once all data files are written on all
  // hosts, and the save has succeeded when all have committed. The folder must
  // hold no checkpoint before, except with `replace`.
  bool node_local = false;
  // With node_local: each data file is also written on the next host, if there
  // is one (checkpoint/save/replica_links.h).
  bool replicas = false;
  // Called on rank 0 once the checkpoint is in its place to stay; with
  // node_local on one rank of each host.
  std::function<void()> after_commit;
  // With node_local: removes an existing checkpoint once all ranks are ready to
  // write.
  bool replace = false;
  // The checkpoint's time as rank 0 gives it; 0: now, by rank 0's clock.
  int64_t saved_unix_micros = 0;
};

// SaveLinks is what the saves of a group of ranks share.
struct SaveLinks {
  std::unique_ptr<NoteBoard> notes;  // of Communicator::ShareNotes
  // Made by the first save with replicas. Drop it after a save that failed.
  std::unique_ptr<ReplicaLinks> replicas;
};

class PendingSave {
 public:
  // Locks the folder `dir`, which is created if it is not there, and starts to
  // write the `content` of all ranks. COLLECTIVE, blocking until that has
  // begun. Returns InvalidArgument where ranks name different folders, the
  // errors of Saving::Begin and ReplicaLinks::Connect, and ResourceExhausted
  // (no memory for copies, no thread); the same error on all ranks. `links`
  // outlives the result and serves one save at a time.
  static absl::StatusOr<std::unique_ptr<PendingSave>> Begin(
      const std::string& dir, CheckpointContent content, Communicator* comm,
      SaveLinks* links, PendingSaveOptions options);

  // Waits for the end of the save. LOCAL.
  ~PendingSave();

  // When it returns the pieces' tensors may change; see SavedPieces. LOCAL.
  void Detach();
  bool done() const;
  // Waits for the end and returns the result. It is the same on all ranks,
  // except that a rank whose peers have ended may not learn it. After any error
  // the previous checkpoint stays in the folder, unless the new one is in its
  // place already, which the message says. Blocking, LOCAL.
  absl::Status Wait();

 private:
  class Impl;
  explicit PendingSave(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#endif  // CHECKPOINT_SAVE_PENDING_SAVE_H_
