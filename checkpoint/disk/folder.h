// Folder and File: what checkpoints need of a file system, with errors that
// name the path. A folder is opened once and its files by their names in it:
// whoever puts another folder in its place meanwhile does not reach who has
// opened it. No torch.
//
// Threads: a File may be read and written at different places by several.
#ifndef CHECKPOINT_DISK_FOLDER_H_
#define CHECKPOINT_DISK_FOLDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/disk/file_system.h"

namespace tessera {

// A descriptor, closed at the end, and the path that messages name.
class OpenPath {
 public:
  OpenPath() = default;
  OpenPath(FileSystem* files, int fd, std::string path);
  OpenPath(OpenPath&& other) noexcept;
  OpenPath& operator=(OpenPath&& other) noexcept;
  ~OpenPath();

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  FileSystem* files() const { return files_; }
  // Waits until the bytes, or the entries of a folder, are on the disk.
  absl::Status Sync() const;
  absl::StatusOr<struct stat> Stat() const;
  // FileError of a system call's result, which is -errno.
  absl::Status Error(int64_t result, absl::string_view name = "") const;

 private:
  FileSystem* files_ = nullptr;
  int fd_ = -1;
  std::string path_;
};

// A regular file.
class File {
 public:
  File() = default;
  File(OpenPath open, int64_t bytes) : open_(std::move(open)), bytes_(bytes) {}

  const std::string& path() const { return open_.path(); }
  int fd() const { return open_.fd(); }
  // When it was opened.
  int64_t bytes() const { return bytes_; }
  // All of `from`, in as many calls as that takes.
  absl::Status WriteAt(int64_t offset, absl::string_view from) const;
  // DataLoss where the file ends before.
  absl::Status ReadAt(int64_t offset, char* to, int64_t bytes) const;
  absl::Status Sync() const { return open_.Sync(); }
  // FileSystem::StartSync.
  void StartSync(int64_t begin, int64_t bytes) const {
    open_.files()->StartSync(open_.fd(), begin, bytes);
  }
  // AlreadyExists: another has locked it, or removed it. Held until the file is
  // closed.
  absl::Status Lock() const;

 private:
  OpenPath open_;
  int64_t bytes_ = 0;
};

// Whether an error is that of a disk, or a quota, that is full; also in the
// words of another rank.
bool IsDiskFull(const absl::Status& status);

class Folder {
 public:
  Folder() = default;
  // NotFound, FailedPrecondition where it is no folder.
  static absl::StatusOr<Folder> Open(const std::string& path,
                                     FileSystem* files);
  // Makes it, and those above, if they are not there; it stays after a power
  // failure.
  static absl::StatusOr<Folder> Make(const std::string& path,
                                     FileSystem* files);

  const std::string& path() const { return open_.path(); }
  FileSystem* files() const { return open_.files(); }
  // To read. A link is followed. FailedPrecondition where there is no regular
  // file: a FIFO or a device is not opened, and a link to nothing is not
  // NotFound.
  absl::StatusOr<File> OpenFile(const std::string& name) const;
  // To read and write; a link is not followed. NotFound.
  absl::StatusOr<File> OpenFileToWrite(const std::string& name) const;
  // To write; AlreadyExists.
  absl::StatusOr<File> CreateFile(const std::string& name) const;
  // To write, and made where it is not there.
  absl::StatusOr<File> OpenOrCreateFile(const std::string& name) const;
  // Of a file, or a folder, in the place of another.
  absl::Status Rename(const std::string& from, const std::string& to) const;
  // A file; no error where it is not there.
  absl::Status Remove(const std::string& name) const;
  // Frees the name whatever has it. A folder that is not empty stays, and is
  // renamed to NAME.aside-...
  absl::Status Clear(const std::string& name) const;
  // The names in it, sorted.
  absl::StatusOr<std::vector<std::string>> Names() const;
  absl::Status Sync() const { return open_.Sync(); }
  // The same text for the same folder of this system, by whatever path.
  absl::StatusOr<std::string> Identity() const;
  // Bytes that this user can still write to its disk, as far as the system
  // knows; quotas may leave fewer.
  absl::StatusOr<int64_t> FreeBytes() const;

 private:
  explicit Folder(OpenPath open) : open_(std::move(open)) {}
  absl::StatusOr<File> OpenAs(const std::string& name, int flags,
                              bool follow) const;
  absl::Status OpenError(int result, const std::string& name) const;

  OpenPath open_;
};

}  // namespace tessera
#endif  // CHECKPOINT_DISK_FOLDER_H_
