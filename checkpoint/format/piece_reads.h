// PieceReads is one thread's part of a read: it reads ranges of pieces into
// their places and verifies each block. While it verifies one, the kernel reads
// the next ones, where it has io_uring; elsewhere it reads them in turn. No
// torch.
//
// Threads: one.
#ifndef CHECKPOINT_FORMAT_PIECE_READS_H_
#define CHECKPOINT_FORMAT_PIECE_READS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/disk/disk_ring.h"
#include "base/disk/file_system.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/format/manifest.pb.h"

namespace tessera {

struct PieceRange {
  std::shared_ptr<const DataFileReader> file;
  const proto::CheckpointPiece* piece = nullptr;
  int64_t piece_bytes = 0;
  int64_t begin = 0, end = 0;  // bytes of the piece
  char* to = nullptr;          // null: only to be verified
  std::string what;            // for messages
};

class PieceReads {
 public:
  // Returns the next range; nullopt if there is none left.
  using Source = std::function<absl::StatusOr<std::optional<PieceRange>>()>;

  explicit PieceReads(FileSystem* files);

  // Reads until `next` has no more, or until the first error: of the disk, or
  // DataLoss. Memory of the ranges may be written to until this is destroyed.
  // LOCAL, blocking.
  absl::Status Run(const Source& next);
  int64_t bytes_read() const { return bytes_read_; }

 private:
  // One system call.
  struct Slot {
    PieceRange range;
    DataFileReader::Call call;
    char* into = nullptr;
    std::string buffer;  // for a read that does not go to its place as a whole
  };

  absl::StatusOr<bool> Fill(const Source& next);
  absl::Status Begin(size_t s);
  absl::Status Finish(size_t s, int64_t done);

  PieceRange now_;  // the range that is being read, from `at_` on
  int64_t at_ = 0;
  bool over_ = false;
  std::vector<Slot> slots_;
  std::vector<size_t> free_;
  int64_t bytes_read_ = 0;
  std::unique_ptr<DiskRing> ring_;  // destroyed first: it reads into slots
};

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_PIECE_READS_H_
