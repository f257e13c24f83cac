// Converts checkpoints to other files, offline, in one process with bounded
// memory: to Hugging Face's safetensors, or to a checkpoint of another number
// of files. No torch.
#ifndef CHECKPOINT_EXCHANGE_REWRITE_H_
#define CHECKPOINT_EXCHANGE_REWRITE_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "base/disk/file_system.h"
#include "checkpoint/exchange/name_map.h"
#include "checkpoint/exchange/safetensors_export.h"

namespace tessera {

// Called now and then with the bytes done and the bytes in all.
using RewriteProgress = std::function<void(int64_t done, int64_t of)>;

// Exports the values of the checkpoint in `dir` into files in `to`. Each number
// is read and verified once. LOCAL.
absl::Status ExportSafetensors(const std::string& dir, const std::string& to,
                               const SafetensorsExportOptions& options,
                               const RewriteProgress& progress,
                               FileSystem* files);

// Rewrites the checkpoint in `dir` as `num_files` files into `to`, replacing
// what is there. Any number of ranks loads any number of files; the ranks' own
// values (generators, client_state) stay with the first `num_files` ranks.
// LOCAL. Returns InvalidArgument if `to` is `dir`, or for fewer than one file.
absl::Status ReshardCheckpoint(const std::string& dir, const std::string& to,
                               int num_files, const RewriteProgress& progress,
                               FileSystem* files);

// Imports the values of safetensors files (`from` as for
// SafetensorsFiles::Open) as a checkpoint in `to`, replacing what is there: of
// step 0, without optimizer states. A program loads it with
// LoadCheckpointOptions::model_only. `names` maps our names to theirs. Uses
// some 16 MiB of memory, or a column of a matrix that is transposed. LOCAL.
// Returns InvalidArgument if the rules do not map a name to one of ours,
// Unimplemented for a dtype, and the errors of SafetensorsFiles::Open.
absl::Status ImportSafetensors(const std::string& from, const std::string& to,
                               const NameMap& names,
                               const RewriteProgress& progress,
                               FileSystem* files);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_REWRITE_H_
