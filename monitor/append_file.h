// AppendFile is a file that grows by lines or records.
#ifndef MONITOR_APPEND_FILE_H_
#define MONITOR_APPEND_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

class AppendFile {
 public:
  // Opens the file to write at its end, and creates it if it is not there; its
  // folder must exist. Errors are those of FileError.
  static absl::StatusOr<AppendFile> Open(std::string path);
  AppendFile(AppendFile&& other) noexcept;
  AppendFile& operator=(AppendFile&&) = delete;
  ~AppendFile();

  // Appends all of `bytes`, in one system call if that takes them; after an
  // error a regular file has none of them. Errors are those of FileError. A
  // file has one writer.
  absl::Status Append(absl::string_view bytes);
  // Waits until all is on the disk. Errors are those of FileError.
  absl::Status Sync();

  const std::string& path() const { return path_; }
  // Returns the file's size when it was opened.
  int64_t bytes_before() const { return bytes_before_; }
  // Returns whether the file ended in the middle of a line then, since a writer
  // was killed.
  bool has_torn_line() const { return torn_; }

 private:
  AppendFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  void TakeBack(size_t bytes);

  const std::string path_;
  int fd_;
  int64_t bytes_before_ = 0;
  bool torn_ = false;
};

// Creates the folder and its parents. Errors are those of FileError.
absl::Status MakeFolders(const std::string& path);
// Returns "out/name"; either may be empty, and `folder` may end with a slash.
std::string JoinPath(absl::string_view folder, absl::string_view name);

}  // namespace tessera
#endif  // MONITOR_APPEND_FILE_H_
