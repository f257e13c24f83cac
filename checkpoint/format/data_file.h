// A rank's data file holds pieces of storages and, at its end, an index of them
// (checkpoint/format/manifest.h). Every 64 KiB of a piece has a checksum, so
// that a reader of a part reads little more than that part, and verifies it.
// No torch.
//
// Threads: a writer has one; several may call the methods of a reader.
#ifndef CHECKPOINT_FORMAT_DATA_FILE_H_
#define CHECKPOINT_FORMAT_DATA_FILE_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/format/manifest.pb.h"

namespace tessera {

// Bytes of a system call: as fast as larger ones, and still in the caches when
// the checksums are computed.
inline constexpr int64_t kPartBytes = 4 << 20;

class DataFileWriter {
 public:
  static absl::StatusOr<DataFileWriter> Create(const Folder& folder,
                                               uint64_t id, int rank);

  // Adds elements [`begin`, `begin` + n) of a state of a storage; `bytes` holds
  // them.
  absl::Status Add(int storage, int state, int64_t begin, int64_t n,
                   absl::string_view bytes);
  // BeginPiece and AddPart add a piece in parts; all but the last are whole
  // blocks (kBlockBytes).
  absl::Status BeginPiece(int storage, int state, int64_t begin, int64_t n,
                          int64_t bytes);
  absl::Status AddPart(absl::string_view part);
  void AddValue(const std::string& name, const std::string& value);
  // Waits until what has been written is on the disk, so that Finish has little
  // left to do.
  absl::Status SyncSoFar();
  // Writes the index, and waits until all is on the disk. Returns what the
  // manifest must say of the file.
  absl::StatusOr<proto::CheckpointFile> Finish();

 private:
  explicit DataFileWriter(File file) : file_(std::move(file)) {}
  absl::Status Append(absl::string_view bytes);
  absl::Status Flush();
  absl::Status Put(absl::string_view bytes);

  File file_;
  proto::CheckpointIndex index_;
  int64_t written_ = 0;
  int64_t started_ = 0;  // end of what the disk was told to begin writing
  std::string buffer_;   // what comes after written_
};

class DataFileReader {
 public:
  // Returns NotFound, or DataLoss where the file has another size than the
  // manifest says, naming the tensors whose elements it has.
  static absl::StatusOr<DataFileReader> Open(
      const Folder& folder, const proto::CheckpointManifest& manifest,
      int rank);

  // Returns the index as it is in the file, unchecked.
  absl::StatusOr<std::string> IndexBytes(
      const proto::CheckpointManifest& manifest) const;
  absl::StatusOr<proto::CheckpointIndex> ReadIndex(
      const proto::CheckpointManifest& manifest) const;
  // Call is the bytes of a piece that one system call reads: whole blocks, or
  // one of which only a part is wanted.
  struct Call {
    int64_t begin = 0, end = 0;
    bool whole = false;
  };
  // Returns the first call of bytes [at, end), with at most `most` bytes.
  static Call CallAt(int64_t piece_bytes, int64_t at, int64_t end,
                     int64_t most);
  // Checks that `bytes`, which were read, are what was written. DataLoss names
  // the piece as `what` does.
  absl::Status Verify(const proto::CheckpointPiece& piece, const Call& call,
                      const char* bytes, absl::string_view what) const;
  // Checks that bytes [begin, end) of the file, between pieces, are zeros.
  // `*read` grows by the bytes that were read.
  absl::Status CheckZeros(int64_t begin, int64_t end, int64_t* read) const;
  const File& file() const { return file_; }
  const std::string& path() const { return file_.path(); }

 private:
  DataFileReader(File file, int rank) : file_(std::move(file)), rank_(rank) {}

  File file_;
  int rank_;
};

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_DATA_FILE_H_
