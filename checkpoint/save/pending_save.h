// PendingSave: a save from its beginning, in a call of all ranks, to its end on
// threads of their own ("tessera-save", "tessera-disk"). What these have to
// tell each other they write on notes (comm/note_board.h), so that no
// collective of the training waits for a disk, nor a disk for the training.
//
//   rank 1   writes its file --> "written"        .--> "seen"
//   rank 0   writes its file --> reads all --> commits --> "ended"
//
// Where each host has a folder of its own, the others' leaders commit, too:
//
//   rank 8   "written" --> reads all --> commits --> "committed"
//   rank 0   "written" --> reads all --> commits --> reads those --> "ended"
//
// While it works a rank says so each second: a slow disk is no rank that has
// stopped. One that is silent for the collectives' timeout, or whose process
// ends before its file is written, fails the save on all ranks; the checkpoint
// before stays.
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

// What a rank writes. Each element of each state of each storage is in one
// rank's pieces.
struct CheckpointContent {
  // The same on all ranks; version, id and files are filled in.
  proto::CheckpointManifest head;
  std::vector<SavedPiece> pieces;
  // This rank's own.
  std::vector<std::pair<std::string, std::string>> values;
};

struct PendingSaveOptions {
  // Training goes on meanwhile: pieces that do not last are copied at once, and
  // the rest by Detach.
  bool async = false;
  // Bytes that a rank writes in a second at most; 0: no limit.
  int64_t max_bandwidth = 0;
  // The folder is each host's own (checkpoint/local_folders.h): a rank of each
  // host commits there, when all data files are written on all hosts, and the
  // save has succeeded when all have. It must hold no checkpoint before.
  bool node_local = false;
  // With it: each data file is also written on the next host, if there is one
  // (checkpoint/save/replica_links.h).
  bool replicas = false;
  // On rank 0, once the checkpoint is in its place to stay; with node_local on
  // one rank of each host.
  std::function<void()> after_commit;
  // With node_local: a checkpoint that is there goes, once all ranks are ready
  // to write.
  bool replace = false;
  // The checkpoint's time, rank 0's; 0: now, by rank 0's clock.
  int64_t saved_unix_micros = 0;
};

// What the saves of a group of ranks have in common.
struct SaveLinks {
  std::unique_ptr<NoteBoard> notes;  // of Communicator::ShareNotes
  // Made by the first save with replicas. To be dropped after one that failed.
  std::unique_ptr<ReplicaLinks> replicas;
};

class PendingSave {
 public:
  // Locks the folder `dir`, which is made if it is not there, and starts to
  // write `content` of all ranks. COLLECTIVE, blocking until that is begun.
  // InvalidArgument where ranks name different folders, Saving::Begin's errors,
  // ResourceExhausted (no memory for copies, no thread),
  // ReplicaLinks::Connect's; the same on all ranks. `links` outlives the
  // result, and is used for one save at a time.
  static absl::StatusOr<std::unique_ptr<PendingSave>> Begin(
      const std::string& dir, CheckpointContent content, Communicator* comm,
      SaveLinks* links, PendingSaveOptions options);

  // Waits for its end. LOCAL.
  ~PendingSave();

  // From its return on the pieces' tensors may change; see SavedPieces. LOCAL.
  void Detach();
  bool done() const;
  // How it ended: the same on all ranks, except that one whose peers have ended
  // may not hear of it. After any error the checkpoint that was in the folder
  // stays; except where the new one is in its place already, which the message
  // says. Blocking, LOCAL.
  absl::Status Wait();

 private:
  class Impl;
  explicit PendingSave(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#endif  // CHECKPOINT_SAVE_PENDING_SAVE_H_
