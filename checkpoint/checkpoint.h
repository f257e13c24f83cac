// Reading checkpoints of all ranks: each reads any part of what any has written
// (format: docs/checkpoint_format.md; one rank's side of it is
// checkpoint/format). They are written by checkpoint/save/pending_save.h.
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
  // The folder is each host's own (checkpoint/local_folders.h).
  bool node_local = false;
  // By which what other hosts have is sent.
  at::Device device = at::kCPU;
};

// The checkpoint in `dir`, the same one on all ranks. NotFound, DataLoss,
// FailedPrecondition (another format), Aborted (replaced meanwhile), and
// InvalidArgument where ranks name different ones. COLLECTIVE, blocking.
absl::StatusOr<CheckpointReader> OpenCheckpoint(const std::string& dir,
                                                const ReadOptions& options,
                                                Communicator* comm);

// Reads what each rank wants, and the values of its own of rank `rank() modulo
// the number of ranks that saved`. After an error, of any rank, nothing of it
// counts. COLLECTIVE, blocking.
absl::Status ReadCheckpoint(CheckpointReader* reader,
                            absl::Span<const WantedElements> wanted,
                            const ReadOptions& options, Communicator* comm,
                            std::vector<proto::CheckpointValue>* values);
// Once more, and to its place, what ReadCheckpoint has only verified. After an
// error some of it is there. LOCAL, blocking.
absl::Status ReadVerified(CheckpointReader* reader,
                          absl::Span<const WantedElements> wanted);

// "F32"; "" where checkpoints have no such dtype (complex numbers are pairs).
std::string CheckpointDtype(at::ScalarType dtype);
// Undefined where libtorch has none such.
at::ScalarType DtypeOfCheckpoint(const std::string& dtype);

}  // namespace tessera
#endif  // CHECKPOINT_CHECKPOINT_H_
