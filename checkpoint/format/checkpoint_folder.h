// Saving turns a save into the checkpoint of a folder, and removes what
// interrupted saves have left. No torch, and nothing of ranks: rank 0 begins
// and commits, all write data files in between.
//
//   TESSERA_ASSIGN_OR_RETURN(auto saving, Saving::Begin(path, files));
//   ... every rank: DataFileWriter::Create(*folder, saving.id(), rank) ...
//   TESSERA_RETURN_IF_ERROR(saving.Commit(manifest));
//
// Note [Commit]: why the steps have this order. A process, or the machine, may
// stop at any point, and what is then found must be a whole checkpoint, the old
// or the new.
//  - Data files have a save's id in their names. So they never replace files
//    that a manifest names, and whoever reads the old checkpoint meanwhile
//    finds its files or, later, an error; never others' bytes.
//  - They are synced, and so are the folder's entries, before the manifest gets
//    its name: a file system may keep a rename and lose what was written before
//    it.
//  - One rename of one file is the commit. Every file system has that, NFS too,
//    where two folders cannot change names.
//  - The folder is synced again before the old files are removed: the rename
//    may be lost in a power failure, and their removal not.
//  - Only the holder of the lock removes files that the manifest does not name,
//    so they do not belong to another save in progress.
#ifndef CHECKPOINT_FORMAT_CHECKPOINT_FOLDER_H_
#define CHECKPOINT_FORMAT_CHECKPOINT_FOLDER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/format/manifest.h"

namespace tessera {

class Saving {
 public:
  // Creates the folder if it is not there, locks it until this is destroyed,
  // and removes what interrupted saves have left. Returns Unavailable if
  // another process saves to it, and FailedPrecondition if it has a file
  // "manifest" that is not one (and is no folder of checkpoints, see
  // ReadManifest), or one of another format. Something that is no folder, but
  // has the name of a run's step, gets another name. LOCAL.
  static absl::StatusOr<Saving> Begin(const std::string& path,
                                      FileSystem* files);
  // Does what Begin does for a folder that is one of several, each with a part
  // of the same save. It removes nothing yet: what looks like a leftover may be
  // a part of what another folder has committed. Returns FailedPrecondition if
  // the folder holds a checkpoint and `replace` is false. LOCAL.
  static absl::StatusOr<Saving> BeginPart(const std::string& path, bool replace,
                                          FileSystem* files);
  // Sets, after BeginPart, the save's id and the ranks whose data files come
  // here.
  void TakePart(uint64_t id, std::vector<int> ranks) {
    id_ = id;
    ranks_ = std::move(ranks);
  }
  // Removes all leftovers. Call it when all folders have begun: then nothing
  // that is there is a part of anything that is to stay. LOCAL.
  absl::Status ClearPart();
  uint64_t id() const { return id_; }
  const Folder& folder() const { return folder_; }
  // Makes what has been written the checkpoint, and removes the one before. It
  // first checks that every data file is there, of the size that the manifest
  // says, and that the manifest can be read back (otherwise InvalidArgument).
  // `*committed` says whether the new checkpoint is in place, or may be. That
  // can be so after an error, too: then the disk could not confirm that it
  // stays. LOCAL.
  absl::Status Commit(const proto::CheckpointManifest& manifest,
                      bool* committed);
  // Removes what this save has written, including what it has committed, and
  // the folder if this save has created it. LOCAL.
  void Abandon();

 private:
  Saving(Folder folder, File lock, uint64_t id)
      : folder_(std::move(folder)), lock_(std::move(lock)), id_(id) {}
  static absl::StatusOr<Saving> Locked(const std::string& path,
                                       FileSystem* files);
  absl::Status CheckFiles(const proto::CheckpointManifest& manifest) const;
  bool OldIsThere() const;

  Folder folder_;
  File lock_;  // held until its descriptor is closed
  uint64_t id_ = 0;
  bool made_ = false;  // whether this save has created the folder
  std::optional<std::vector<int>> ranks_;
};

// Returns the manifest of the checkpoint in `folder`. Errors are NotFound if
// there is none, and those of DecodeManifest. Something that is no manifest, or
// no file, is DataLoss too where it must have been one: beside data files, or
// in the folder of a run's step. LOCAL.
absl::StatusOr<proto::CheckpointManifest> ReadManifest(const Folder& folder);

// Writes the manifest that the others have to a folder that is one of several
// and has lost its part of the commit. Does nothing if the folder has a
// manifest or is being saved to. LOCAL.
absl::Status AddManifest(const Folder& folder,
                         const proto::CheckpointManifest& manifest);

// Removes the checkpoint in a folder, damaged or not, and the folder if nothing
// else is in it. Files that belong to no checkpoint stay. Returns NotFound if
// it holds none. LOCAL.
absl::Status RemoveCheckpoint(const std::string& path, FileSystem* files);

// Removes what saves have left in a folder that holds no checkpoint, and the
// folder if nothing else is in it. Returns FailedPrecondition if it holds one
// or something that cannot be read, and Unavailable if another process is
// saving there. LOCAL.
absl::Status RemoveUnfinished(const std::string& path, FileSystem* files);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_CHECKPOINT_FOLDER_H_
