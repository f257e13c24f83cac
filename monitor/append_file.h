// AppendFile: a file that grows, of lines or records.
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
  // Opens the file to write at its end, and makes it if it is not there; its
  // folder has to be. FileError's.
  static absl::StatusOr<AppendFile> Open(std::string path);
  AppendFile(AppendFile&& other) noexcept;
  AppendFile& operator=(AppendFile&&) = delete;
  ~AppendFile();

  // All of `bytes`, in one system call where that takes them, or of a regular
  // file none. FileError's. One writer to a file.
  absl::Status Append(absl::string_view bytes);
  // Until all is on the disk. FileError's.
  absl::Status Sync();

  const std::string& path() const { return path_; }
  // What it had when it was opened.
  int64_t bytes_before() const { return bytes_before_; }
  // It ended in the middle of a line then: a writer was killed.
  bool has_torn_line() const { return torn_; }

 private:
  AppendFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  void TakeBack(size_t bytes);

  const std::string path_;
  int fd_;
  int64_t bytes_before_ = 0;
  bool torn_ = false;
};

// Makes the folder and those above it. FileError's.
absl::Status MakeFolders(const std::string& path);
// "out/name", whatever of them is empty or ends with a slash.
std::string JoinPath(absl::string_view folder, absl::string_view name);

}  // namespace tessera
#endif  // MONITOR_APPEND_FILE_H_
