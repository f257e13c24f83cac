#include "checkpoint/local_folders.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/send_all.h"
#include "checkpoint/together.h"
#include "comm/all_gather_values.h"
#include "comm/rendezvous/local_address.h"

namespace tessera {
namespace {

absl::StatusOr<std::string> IdentityOf(const Folder& folder) {
  TESSERA_ASSIGN_OR_RETURN(const std::string inode, folder.Identity());
  // Device numbers may be the same on identically built hosts, so the host's id
  // is in it.
  return absl::StrCat(HostId(), " ", inode);
}

// What a rank has found.
struct Seen {
  uint64_t id = 0;
  int64_t bytes = 0;  // of the manifest; 0: there is none
  bool there() const { return bytes > 0; }
};

// Returns the first rank that has a checkpoint, if all that have one have the
// same.
absl::StatusOr<int> Owner(const std::vector<Seen>& all,
                          const std::string& dir) {
  int owner = -1;
  for (int r = 0; r < static_cast<int>(all.size()); ++r) {
    const Seen& seen = all[static_cast<size_t>(r)];
    if (!seen.there()) continue;
    if (owner < 0) owner = r;
    if (seen.id == all[static_cast<size_t>(owner)].id) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        dir, ": ranks ", owner, " and ", r,
        " see different checkpoints there; remove the one that is not meant "
        "(checkpoint.use_node_local_storage: the folder is each host's own)"));
  }
  if (owner >= 0) return owner;
  return absl::NotFoundError(
      absl::StrCat(dir, ": no host has a checkpoint there"));
}

}  // namespace

absl::StatusOr<std::vector<int>> FindLeaders(const Folder& folder,
                                             Communicator* comm) {
  const absl::StatusOr<std::string> identity = IdentityOf(folder);
  TESSERA_RETURN_IF_ERROR(
      comm->AgreeOk(identity.status(), "checkpoint's folder"));
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      comm->AllGatherStrings(*identity, CommTag{"checkpoint's folder"}));
  std::vector<int> leaders;
  for (const std::string& one : all) {
    leaders.push_back(
        static_cast<int>(std::find(all.begin(), all.end(), one) - all.begin()));
  }
  return leaders;
}

std::vector<int> RanksOfLeader(const std::vector<int>& leaders, int leader) {
  std::vector<int> ranks;
  for (int r = 0; r < static_cast<int>(leaders.size()); ++r) {
    if (leaders[static_cast<size_t>(r)] == leader) ranks.push_back(r);
  }
  return ranks;
}

absl::StatusOr<CheckpointReader> OpenLocalCheckpoint(const std::string& dir,
                                                     at::Device device,
                                                     Communicator* comm) {
  TESSERA_RETURN_IF_ERROR(comm->AgreeEqual(dir, "checkpoint's folder"));
  absl::StatusOr<CheckpointReader> reader = absl::UnknownError("not opened");
  std::string manifest;
  TESSERA_RETURN_IF_ERROR(
      RunTogether(comm, "LoadCheckpoint", [&]() -> absl::Status {
        reader = CheckpointReader::Open(dir, FileSystem::Real());
        if (absl::IsNotFound(reader.status())) return absl::OkStatus();
        TESSERA_RETURN_IF_ERROR(reader.status());
        TESSERA_ASSIGN_OR_RETURN(manifest, EncodeManifest(reader->manifest()));
        return absl::OkStatus();
      }));
  Seen mine;
  if (reader.ok()) {
    mine = {reader->manifest().id(), static_cast<int64_t>(manifest.size())};
  }
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<Seen> all,
      AllGatherValue(comm, mine, CommTag{"checkpoint id"}));
  TESSERA_ASSIGN_OR_RETURN(const int owner, Owner(all, dir));
  const bool lacking = std::any_of(
      all.begin(), all.end(), [](const Seen& seen) { return !seen.there(); });
  if (!lacking) return reader;
  const int64_t bytes = all[static_cast<size_t>(owner)].bytes;
  const std::string sent = std::exchange(manifest, std::string());
  absl::Status received = SendAll(
      bytes, owner, device, comm,
      [&](int64_t at, char* to, int64_t n) {
        sent.copy(to, static_cast<size_t>(n), static_cast<size_t>(at));
        return absl::OkStatus();
      },
      [&](int64_t, absl::string_view part) {
        absl::StrAppend(&manifest, part);
        return absl::OkStatus();
      });
  if (received.ok() && !reader.ok()) {
    reader = CheckpointReader::WithManifest(dir, manifest, FileSystem::Real());
    received = reader.status();
  }
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(received, "LoadCheckpoint"));
  return reader;
}

absl::StatusOr<std::vector<RunStep>> ListRunSteps(const std::string& dir,
                                                  FolderHolds holds,
                                                  absl::string_view where,
                                                  Communicator* comm) {
  std::vector<RunStep> mine;
  TESSERA_RETURN_IF_ERROR(RunTogether(comm, where, [&]() -> absl::Status {
    // With one folder for all, rank 0's list is everyone's: others may see
    // changes a moment later.
    if (holds == FolderHolds::kAll && comm->rank() != 0) {
      return absl::OkStatus();
    }
    TESSERA_ASSIGN_OR_RETURN(const std::vector<StepFolder> found,
                             ListStepFolders(dir, FileSystem::Real()));
    for (const StepFolder& one : found) {
      mine.push_back({one.step, one.saved_unix_micros});
    }
    return absl::OkStatus();
  }));
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      AllGatherLists(comm, mine, CommTag{"checkpoints to resume from"}));
  std::map<int64_t, int64_t> newest;  // by step
  for (const std::vector<RunStep>& steps : all) {
    for (const RunStep& one : steps) {
      int64_t& micros = newest[one.step];
      micros = std::max(micros, one.saved_unix_micros);
    }
  }
  std::vector<RunStep> sorted;
  for (const auto& [step, micros] : newest) sorted.push_back({step, micros});
  std::sort(sorted.begin(), sorted.end(),
            [](const RunStep& a, const RunStep& b) {
              return std::tie(a.saved_unix_micros, a.step) >
                     std::tie(b.saved_unix_micros, b.step);
            });
  return sorted;
}

}  // namespace tessera
