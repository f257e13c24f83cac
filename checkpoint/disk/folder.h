// Folder and File are what checkpoints need of a file system, with errors that
// name the path. A folder is opened once and its files by their names in it: if
// another folder is put in its place, whoever has opened it is not affected. No
// torch.
//
// Threads: several may read and write a File, at different places.
#ifndef CHECKPOINT_DISK_FOLDER_H_
#define CHECKPOINT_DISK_FOLDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/disk/file_system.h"

namespace tessera {

// A descriptor, closed at the end, and the path for messages.
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
  // Returns the FileError of a system call's result, which is -errno.
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
  // Returns the size when it was opened.
  int64_t bytes() const { return bytes_; }
  // Writes all of `from`, in as many calls as that takes.
  absl::Status WriteAt(int64_t offset, absl::string_view from) const;
  // Returns DataLoss if the file ends too early.
  absl::Status ReadAt(int64_t offset, char* to, int64_t bytes) const;
  absl::Status Sync() const { return open_.Sync(); }
  // Calls FileSystem::StartSync.
  void StartSync(int64_t begin, int64_t bytes) const {
    open_.files()->StartSync(open_.fd(), begin, bytes);
  }
  // Locks the file until it is closed. Returns AlreadyExists if another process
  // has locked or removed it.
  absl::Status Lock() const;

 private:
  OpenPath open_;
  int64_t bytes_ = 0;
};

// Returns whether an error says that a disk, or a quota, is full; it also
// recognises the error of another rank by its text.
bool IsDiskFull(const absl::Status& status);

class Folder {
 public:
  Folder() = default;
  // Returns NotFound, or FailedPrecondition if it is no folder.
  static absl::StatusOr<Folder> Open(const std::string& path,
                                     FileSystem* files);
  // Creates the folder and its parents if they are not there; they survive a
  // power failure.
  static absl::StatusOr<Folder> Make(const std::string& path,
                                     FileSystem* files);

  const std::string& path() const { return open_.path(); }
  FileSystem* files() const { return open_.files(); }
  // Opens a file for reading, following a link. Returns FailedPrecondition
  // where there is no regular file: a FIFO or a device is not opened, and a
  // link to nothing is not NotFound.
  absl::StatusOr<File> OpenFile(const std::string& name) const;
  // Opens a file for reading and writing; a link is not followed. Returns
  // NotFound.
  absl::StatusOr<File> OpenFileToWrite(const std::string& name) const;
  // Creates a file for writing. Returns AlreadyExists.
  absl::StatusOr<File> CreateFile(const std::string& name) const;
  // Opens a file for writing, and creates it where it is not there.
  absl::StatusOr<File> OpenOrCreateFile(const std::string& name) const;
  // Renames a file or a folder, replacing `to`.
  absl::Status Rename(const std::string& from, const std::string& to) const;
  // Removes a file; no error where it is not there.
  absl::Status Remove(const std::string& name) const;
  // Frees the name, whatever has it. A folder that is not empty stays under the
  // name NAME.aside-...
  absl::Status Clear(const std::string& name) const;
  // Returns the names in the folder, sorted.
  absl::StatusOr<std::vector<std::string>> Names() const;
  absl::Status Sync() const { return open_.Sync(); }
  // Returns a text that identifies the folder on this system, whatever path led
  // to it.
  absl::StatusOr<std::string> Identity() const;
  // Returns the bytes that this user can still write to the folder's disk, as
  // far as the system knows; quotas may leave fewer.
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
