#include "checkpoint/checkpoint.h"

#include <algorithm>

#include "ATen/Parallel.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/dtype_names.h"
#include "checkpoint/fetch_data_files.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/local_folders.h"
#include "checkpoint/together.h"
#include "comm/all_gather_values.h"

namespace tessera {
namespace {

// Uses as many threads as the rank computes with: the system reads ahead of
// each thread, and fewer threads mean longer runs of reads on the disk.
int NumReadThreads() {
  constexpr int kMost = 4;
  return std::clamp(at::get_num_threads(), 1, kMost);
}

}  // namespace

absl::StatusOr<CheckpointReader> OpenCheckpoint(const std::string& dir,
                                                const ReadOptions& options,
                                                Communicator* comm) {
  if (options.node_local) {
    return OpenLocalCheckpoint(dir, options.device, comm);
  }
  absl::StatusOr<CheckpointReader> reader = absl::UnknownError("not opened");
  TESSERA_RETURN_IF_ERROR(
      RunTogether(comm, "LoadCheckpoint", [&]() -> absl::Status {
        reader = CheckpointReader::Open(dir, FileSystem::Real());
        return reader.status();
      }));
  // The ids are compared, since a checkpoint may have several paths, and if it
  // is being replaced some ranks may have found the next one.
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<uint64_t> ids,
      AllGatherValue(comm, reader->manifest().id(), CommTag{"checkpoint id"}));
  if (std::count(ids.begin(), ids.end(), ids[0]) !=
      static_cast<int64_t>(ids.size())) {
    TESSERA_RETURN_IF_ERROR(comm->AgreeEqual(dir, "checkpoint's folder"));
    return absl::AbortedError(absl::StrCat(
        dir,
        ": another checkpoint took the place of this one while it was "
        "opened, or it is not one folder; load again"));
  }
  return reader;
}

absl::Status ReadCheckpoint(CheckpointReader* reader,
                            absl::Span<const WantedElements> wanted,
                            const ReadOptions& options, Communicator* comm,
                            std::vector<proto::CheckpointValue>* values) {
  const int own = comm->rank() % reader->manifest().files_size();
  if (options.node_local) {
    TESSERA_RETURN_IF_ERROR(
        FetchDataFiles(reader, wanted, own, options.device, comm));
  }
  const int threads = NumReadThreads();
  return RunTogether(comm, "LoadCheckpoint", [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(reader->Read(wanted, threads));
    TESSERA_ASSIGN_OR_RETURN(*values, reader->ValuesOf(own));
    return absl::OkStatus();
  });
}

absl::Status ReadVerified(CheckpointReader* reader,
                          absl::Span<const WantedElements> wanted) {
  return reader->Read(wanted, NumReadThreads());
}

std::string CheckpointDtype(at::ScalarType dtype) {
  std::string name = NameOfDtype(dtype);
  return DtypeBytes(name) > 0 ? name : "";
}

at::ScalarType DtypeOfCheckpoint(const std::string& dtype) {
  return DtypeBytes(dtype) > 0 ? DtypeNamed(dtype) : at::ScalarType::Undefined;
}

}  // namespace tessera
