// A rank's data file: pieces of storages, and at its end an index of them
// (checkpoint/format/manifest.h). Every 64 KiB of a piece has a checksum, so
// that who needs a part of it reads little more than that, and verifies it.
// No torch.
//
// Threads: a writer has one; the methods of a reader may be called by several.
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

// Of a call of the system: as fast as larger ones, and in the caches when its
// checksums are made.
inline constexpr int64_t kPartBytes = 4 << 20;

class DataFileWriter {
 public:
  static absl::StatusOr<DataFileWriter> Create(const Folder& folder,
                                               uint64_t id, int rank);

  // Elements [`begin`, `begin` + n) of a state of a storage, `bytes` of them.
  absl::Status Add(int storage, int state, int64_t begin, int64_t n,
                   absl::string_view bytes);
  // The same in parts: all but the last are whole blocks (kBlockBytes).
  absl::Status BeginPiece(int storage, int state, int64_t begin, int64_t n,
                          int64_t bytes);
  absl::Status AddPart(absl::string_view part);
  void AddValue(const std::string& name, const std::string& value);
  // Waits until what is written is on the disk, so that little is left to
  // Finish.
  absl::Status SyncSoFar();
  // The index, and waits until all is on the disk. What the manifest is to say
  // of the file.
  absl::StatusOr<proto::CheckpointFile> Finish();

 private:
  explicit DataFileWriter(File file) : file_(std::move(file)) {}
  absl::Status Append(absl::string_view bytes);
  absl::Status Flush();
  absl::Status Put(absl::string_view bytes);

  File file_;
  proto::CheckpointIndex index_;
  int64_t written_ = 0;
  int64_t started_ = 0;  // up to where the disk has been told to begin
  std::string buffer_;   // what comes after
};

class DataFileReader {
 public:
  // NotFound; DataLoss where the file has another size than the manifest says,
  // with the tensors that it had elements of.
  static absl::StatusOr<DataFileReader> Open(
      const Folder& folder, const proto::CheckpointManifest& manifest,
      int rank);

  // As it is there, unchecked.
  absl::StatusOr<std::string> IndexBytes(
      const proto::CheckpointManifest& manifest) const;
  absl::StatusOr<proto::CheckpointIndex> ReadIndex(
      const proto::CheckpointManifest& manifest) const;
  // Bytes of a piece that one call of the system reads: whole blocks, or one of
  // which not all is wanted.
  struct Call {
    int64_t begin = 0, end = 0;
    bool whole = false;
  };
  // The first one of bytes [at, end), of `most` at most.
  static Call CallAt(int64_t piece_bytes, int64_t at, int64_t end,
                     int64_t most);
  // Whether `bytes`, which were read, are what was written; DataLoss names the
  // piece as `what` does.
  absl::Status Verify(const proto::CheckpointPiece& piece, const Call& call,
                      const char* bytes, absl::string_view what) const;
  // That bytes [begin, end) of the file, between pieces, are zeros. `*read`:
  // grows by the bytes that were read.
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
