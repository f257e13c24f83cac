// MappedFile gives the bytes of one file, mapped read-only.
//
// Pages are read when touched and shared between the processes of a host. The
// file must not be truncated while it is mapped: reading on ends the process
// (SIGBUS), with the file's name on stderr. Threads: const methods may run
// concurrently.
#ifndef DATA_MAPPED_FILE_H_
#define DATA_MAPPED_FILE_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tessera {

class MappedFile {
 public:
  // Returns NotFound (and so on) with the path and the system's words;
  // InvalidArgument with path, size and `min_bytes` if the file is shorter than
  // that, and for a folder or a pipe. An empty file is always refused. LOCAL.
  static absl::StatusOr<MappedFile> Open(const std::string& path,
                                         int64_t min_bytes = 1);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  // Returns all bytes, which begin at a page; valid as long as this or what it
  // is moved to. Empty when moved from.
  absl::Span<const uint8_t> bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

 private:
  MappedFile(std::string path, absl::Span<const uint8_t> bytes)
      : path_(std::move(path)), bytes_(bytes) {}
  void Unmap();

  std::string path_;
  absl::Span<const uint8_t> bytes_;  // the mapping
};

}  // namespace tessera
#endif  // DATA_MAPPED_FILE_H_
