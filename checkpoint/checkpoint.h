// Reads checkpoints on all ranks; each rank reads any part of what any rank has
// written. The format is in docs/checkpoint_format.md, one rank's side of it in
// checkpoint/format. checkpoint/save/pending_save.h writes checkpoints.
#ifndef CHECKPOINT_CHECKPOINT_H_
#define CHECKPOINT_CHECKPOINT_H_

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/manifest.pb.h"
#include "comm/communicator.h"

namespace tessera {

struct ReadOptions {
  // Whether each host has a folder of its own (checkpoint/local_folders.h).
  bool node_local = false;
  // The device through which data of other hosts is sent.
  at::Device device = at::kCPU;
};

// Opens the checkpoint in `dir`, the same one on all ranks. Returns NotFound,
// DataLoss, FailedPrecondition (another format), Aborted (replaced meanwhile),
// and InvalidArgument where ranks name different ones. COLLECTIVE, blocking.
absl::StatusOr<CheckpointReader> OpenCheckpoint(const std::string& dir,
                                                const ReadOptions& options,
                                                Communicator* comm);

// Reads the elements that each rank wants, and the values that rank `rank()
// modulo the number of ranks that saved` has stored for itself. After an error
// on any rank the result is invalid on all. COLLECTIVE, blocking.
absl::Status ReadCheckpoint(CheckpointReader* reader,
                            absl::Span<const WantedElements> wanted,
                            const ReadOptions& options, Communicator* comm,
                            std::vector<proto::CheckpointValue>* values);
// Reads again, into its place, what ReadCheckpoint has only verified. After an
// error some of it is there. LOCAL, blocking.
absl::Status ReadVerified(CheckpointReader* reader,
                          absl::Span<const WantedElements> wanted);

// Returns "F32" and so on; "" where checkpoints have no such dtype (complex
// numbers are pairs).
std::string CheckpointDtype(at::ScalarType dtype);
// Returns the dtype of that name; Undefined where libtorch has none.
at::ScalarType DtypeOfCheckpoint(const std::string& dtype);

}  // namespace tessera
#endif  // CHECKPOINT_CHECKPOINT_H_
