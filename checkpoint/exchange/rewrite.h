// Checkpoints made into other files, offline, by one process with bounded
// memory: safetensors of Hugging Face's, or a checkpoint of another number of
// files. No torch.
#ifndef CHECKPOINT_EXCHANGE_REWRITE_H_
#define CHECKPOINT_EXCHANGE_REWRITE_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "checkpoint/disk/file_system.h"
#include "checkpoint/exchange/name_map.h"
#include "checkpoint/exchange/safetensors_export.h"

namespace tessera {

// Told now and then how many bytes of how many are done.
using RewriteProgress = std::function<void(int64_t done, int64_t of)>;

// Values of the checkpoint in `dir`, into files in `to`. Each number is read,
// and verified, once. LOCAL.
absl::Status ExportSafetensors(const std::string& dir, const std::string& to,
                               const SafetensorsExportOptions& options,
                               const RewriteProgress& progress,
                               FileSystem* files);

// The checkpoint in `dir`, of `num_files` files, into `to`, in the place of
// what is there. Any number of ranks loads any number of files; what ranks have
// of their own (generators, client_state) stays with the first `num_files`
// ranks. LOCAL. InvalidArgument: `to` is `dir`, or fewer than one file.
absl::Status ReshardCheckpoint(const std::string& dir, const std::string& to,
                               int num_files, const RewriteProgress& progress,
                               FileSystem* files);

// Values of safetensors files (`from` as SafetensorsFiles::Open), as a
// checkpoint in `to`, in the place of what is there: of step 0, without
// optimizer states. A program loads it with LoadCheckpointOptions::model_only.
// `names`: from ours to theirs. Memory for some 16 MiB, or a column of a matrix
// that is transposed. LOCAL. InvalidArgument: a name that the rules do not give
// one of ours; Unimplemented: a dtype; SafetensorsFiles::Open's.
absl::Status ImportSafetensors(const std::string& from, const std::string& to,
                               const NameMap& names,
                               const RewriteProgress& progress,
                               FileSystem* files);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_REWRITE_H_
