#include "data/byte_corpus.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file.h"
#include "data/truncated_files.h"

namespace tessera {

absl::StatusOr<ByteCorpus> ByteCorpus::Open(const std::string& path,
                                            int64_t min_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileError(errno, path);
  const auto closer = absl::MakeCleanup([fd] { close(fd); });
  struct stat info;
  if (fstat(fd, &info) != 0) return FileError(errno, path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": not a regular file"));
  }
  const int64_t wanted_bytes = std::max<int64_t>(min_bytes, 1);
  if (info.st_size < wanted_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected at least ", wanted_bytes,
                     " bytes, the file has ", info.st_size));
  }
  const size_t size = static_cast<size_t>(info.st_size);
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (data == MAP_FAILED) return FileError(errno, path);
  NameIfTruncated(data, size, path);
  return ByteCorpus(path, {static_cast<const uint8_t*>(data), size});
}

ByteCorpus::ByteCorpus(ByteCorpus&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

ByteCorpus& ByteCorpus::operator=(ByteCorpus&& other) noexcept {
  if (this == &other) return *this;
  Unmap();
  path_ = std::move(other.path_);
  bytes_ = std::exchange(other.bytes_, {});
  return *this;
}

ByteCorpus::~ByteCorpus() { Unmap(); }

void ByteCorpus::Unmap() {
  if (bytes_.empty()) return;
  Forget(bytes_.data());
  munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size());
  bytes_ = {};
}

int64_t ByteCorpus::num_samples(int64_t seq_len) const {
  TESSERA_CHECK_GT(seq_len, 0);
  return bytes_.empty() ? 0
                        : (static_cast<int64_t>(bytes_.size()) - 1) / seq_len;
}

absl::Span<const uint8_t> ByteCorpus::sample(int64_t index,
                                             int64_t seq_len) const {
  TESSERA_CHECK_GE(index, 0);
  TESSERA_CHECK_LT(index, num_samples(seq_len));
  return bytes_.subspan(static_cast<size_t>(index * seq_len),
                        static_cast<size_t>(seq_len) + 1);
}

}  // namespace tessera
