// Writes the data file of one rank of a save.
#ifndef CHECKPOINT_SAVE_WRITE_DATA_FILE_H_
#define CHECKPOINT_SAVE_WRITE_DATA_FILE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/format/manifest.pb.h"
#include "checkpoint/save/saved_pieces.h"

namespace tessera {

struct DataFileOptions {
  std::string dir;  // of the checkpoint
  uint64_t id = 0;  // of the save
  int rank = 0;
  // The most bytes written in a second; 0: no limit.
  int64_t max_bandwidth = 0;
};

// Writes `pieces` and `values` (names and bytes) and syncs them. LOCAL; takes
// as long as the disk does. Errors are those of FileError, and Cancelled if the
// pieces were abandoned.
absl::StatusOr<proto::CheckpointFile> WriteDataFile(
    const DataFileOptions& options,
    const std::vector<std::pair<std::string, std::string>>& values,
    SavedPieces* pieces);

}  // namespace tessera
#endif  // CHECKPOINT_SAVE_WRITE_DATA_FILE_H_
