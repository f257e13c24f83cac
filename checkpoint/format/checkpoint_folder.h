// How a save becomes the checkpoint of a folder, and what is left of saves that
// did not. No torch, and nothing of ranks: rank 0 begins and commits, all write
// data files between.
//
//   TESSERA_ASSIGN_OR_RETURN(auto saving, Saving::Begin(path, files));
//   ... every rank: DataFileWriter::Create(*folder, saving.id(), rank) ...
//   TESSERA_RETURN_IF_ERROR(saving.Commit(manifest));
//
// Note [Commit]: why in this order. A process, or the machine, may stop at any
// point, and what is then found must be a whole checkpoint, the old or the new.
//  - Data files have a save's id in their names. So they never take the place
//    of files that a manifest names, and whoever reads the old checkpoint
//    meanwhile finds its files or, later, an error; never others' bytes.
//  - They are synced, and so are the folder's entries, before the manifest gets
//    its name: a file system may keep a rename and lose what was written before
//    it.
//  - One rename of one file is the commit. Every file system has that, NFS too,
//    where two folders cannot change names.
//  - The folder is synced again before the old files are removed: the rename
//    may be lost in a power failure, and their removal not.
//  - What is not named by the manifest is swept only by who holds the lock, so
//    it is no other's that is being written.
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
  // Makes the folder if it is not there, locks it until this is destroyed, and
  // removes what saves left that did not end. Unavailable: another process
  // saves to it; FailedPrecondition: it has a file "manifest" that is none (and
  // is no folder of checkpoints, see ReadManifest), or one of another format.
  // What is no folder, and has the name of a run's step, gets another name.
  // LOCAL.
  static absl::StatusOr<Saving> Begin(const std::string& path,
                                      FileSystem* files);
  // The same of a folder that is one of several, each with a part of the same
  // save. Nothing is removed yet: what looks like left over may be a part of
  // what another folder has committed. FailedPrecondition: it holds a
  // checkpoint, and none that is to be replaced. LOCAL.
  static absl::StatusOr<Saving> BeginPart(const std::string& path, bool replace,
                                          FileSystem* files);
  // Of such a one: the save's id, and whose data files come here.
  void TakePart(uint64_t id, std::vector<int> ranks) {
    id_ = id;
    ranks_ = std::move(ranks);
  }
  // All folders have begun, so nothing that is there is a part of anything that
  // is to stay: removes it. LOCAL.
  absl::Status ClearPart();
  uint64_t id() const { return id_; }
  const Folder& folder() const { return folder_; }
  // Makes what has been written the checkpoint, and removes the one before.
  // Checks first that every data file is there, of the size that the manifest
  // says, and that the manifest can be read back (else InvalidArgument).
  // `*committed`: whether the new checkpoint is in place, or may be; also
  // after an error, and then the disk could not say that it stays so. LOCAL.
  absl::Status Commit(const proto::CheckpointManifest& manifest,
                      bool* committed);
  // Removes what this save has written, also what it has committed, and the
  // folder if it has made it. LOCAL.
  void Abandon();

 private:
  Saving(Folder folder, File lock, uint64_t id)
      : folder_(std::move(folder)), lock_(std::move(lock)), id_(id) {}
  static absl::StatusOr<Saving> Locked(const std::string& path,
                                       FileSystem* files);
  absl::Status CheckFiles(const proto::CheckpointManifest& manifest) const;
  bool OldIsThere() const;

  Folder folder_;
  File lock_;  // until its descriptor is closed
  uint64_t id_ = 0;
  bool made_ = false;  // the folder
  std::optional<std::vector<int>> ranks_;
};

// The manifest of the checkpoint in `folder`. NotFound: there is none; DataLoss
// and so on as DecodeManifest. What is no manifest, or no file, is DataLoss too
// where it must have been one: beside data files, or in the folder of a run's
// step. LOCAL.
absl::StatusOr<proto::CheckpointManifest> ReadManifest(const Folder& folder);

// Of a folder that is one of several, and had lost its part of the commit: the
// manifest that the others have. Nothing where it has one, or is being saved
// to. LOCAL.
absl::Status AddManifest(const Folder& folder,
                         const proto::CheckpointManifest& manifest);

// Removes the checkpoint in a folder, damaged or not, and the folder if nothing
// else is in it. What is no checkpoint's file stays. NotFound: it holds none.
// LOCAL.
absl::Status RemoveCheckpoint(const std::string& path, FileSystem* files);

// Removes what saves left in a folder that holds no checkpoint, and the folder
// if nothing else is in it. FailedPrecondition: it holds one, or what cannot be
// read; Unavailable: another process is saving there. LOCAL.
absl::Status RemoveUnfinished(const std::string& path, FileSystem* files);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_CHECKPOINT_FOLDER_H_
