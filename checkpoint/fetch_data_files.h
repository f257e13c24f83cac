// FetchDataFiles: what ranks load and their hosts lack comes from other hosts
// (checkpoint/local_folders.h).
#ifndef CHECKPOINT_FETCH_DATA_FILES_H_
#define CHECKPOINT_FETCH_DATA_FILES_H_

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "comm/communicator.h"

namespace tessera {

// Copies data files to the hosts that lack them, as far as a rank there wants
// elements of them, and the index of the file of rank `values_of`; each rank
// passes its own wishes. The files are sent to all ranks, through `device`, and
// stay in the folder. DataLoss names a file that no host has. COLLECTIVE,
// blocking.
absl::Status FetchDataFiles(CheckpointReader* reader,
                            absl::Span<const WantedElements> wanted,
                            int values_of, at::Device device,
                            Communicator* comm);

}  // namespace tessera
#endif  // CHECKPOINT_FETCH_DATA_FILES_H_
