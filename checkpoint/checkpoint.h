// Checkpoints of all ranks: each writes a part of the state, and reads any part
// of what others wrote (format: docs/checkpoint_format.md; one rank's side of
// it is checkpoint/format).
#ifndef CHECKPOINT_CHECKPOINT_H_
#define CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/manifest.pb.h"
#include "comm/communicator.h"

namespace tessera {

// What a rank writes. Each element of each state of each storage is in one
// rank's pieces.
struct CheckpointContent {
  struct Piece {
    int storage = 0;
    int state = 0;
    int64_t begin = 0;    // element
    at::Tensor elements;  // contiguous, any device; not changed meanwhile
  };
  // The same on all ranks; version, id and files are filled in.
  proto::CheckpointManifest head;
  std::vector<Piece> pieces;
  // This rank's own.
  std::vector<std::pair<std::string, std::string>> values;
};

// Makes `content` of all ranks the checkpoint in folder `dir`, which is made if
// it is not there. Any rank's error (disk full, no permission, another job that
// saves there) is returned on all, and the checkpoint that was in `dir` stays
// as it was; except where the new one is in its place already, which the
// message says. COLLECTIVE, blocking.
absl::Status WriteCheckpoint(const std::string& dir,
                             const CheckpointContent& content,
                             Communicator* comm);

// The checkpoint in `dir`, the same one on all ranks. NotFound, DataLoss,
// FailedPrecondition (another format), Aborted (replaced meanwhile), and
// InvalidArgument where ranks name different ones. COLLECTIVE, blocking.
absl::StatusOr<CheckpointReader> OpenCheckpoint(const std::string& dir,
                                                Communicator* comm);

// Reads what each rank wants, and the values of its own of rank `rank() modulo
// the number of ranks that saved`. After an error, of any rank, nothing of it
// counts. COLLECTIVE, blocking.
absl::Status ReadCheckpoint(CheckpointReader* reader,
                            absl::Span<const WantedElements> wanted,
                            Communicator* comm,
                            std::vector<proto::CheckpointValue>* values);

// "F32"; "" where checkpoints have no such dtype (complex numbers are pairs).
std::string CheckpointDtype(at::ScalarType dtype);
// Undefined where libtorch has none such.
at::ScalarType DtypeOfCheckpoint(const std::string& dtype);

}  // namespace tessera
#endif  // CHECKPOINT_CHECKPOINT_H_
