#include "checkpoint/fetch_data_files.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/local_folders.h"
#include "checkpoint/send_all.h"
#include "checkpoint/together.h"
#include "comm/all_gather_values.h"

namespace tessera {
namespace {

// Returns whether `f` is one of `files`, which are ascending.
bool Has(const std::vector<int>& files, int f) {
  return std::binary_search(files.begin(), files.end(), f);
}

// Records which data files each leader has.
struct Holdings {
  std::vector<int> leaders;
  std::vector<std::vector<int>> files;  // by rank
  std::vector<std::string> unusable;    // why files there cannot be opened

  bool HasFile(int rank, int f) const {
    const int leader = leaders[static_cast<size_t>(rank)];
    return Has(files[static_cast<size_t>(leader)], f);
  }
  // Describes files that are there but cannot be opened.
  std::string WhyUnusable() const {
    std::string why;
    for (size_t r = 0; r < unusable.size(); ++r) {
      if (unusable[r].empty()) continue;
      absl::StrAppend(&why, "; rank ", r, ": ", unusable[r]);
    }
    return why;
  }
  // Returns the lowest leader that has it; -1: none.
  int OwnerOf(int f) const {
    for (int r = 0; r < static_cast<int>(leaders.size()); ++r) {
      if (HasFile(r, f)) return leaders[static_cast<size_t>(r)];
    }
    return -1;
  }
};

absl::StatusOr<Holdings> FindHoldings(const CheckpointReader& reader,
                                      Communicator* comm) {
  Holdings found;
  TESSERA_ASSIGN_OR_RETURN(found.leaders, FindLeaders(reader.folder(), comm));
  std::vector<int> files;
  absl::Status unusable;
  TESSERA_RETURN_IF_ERROR(
      RunTogether(comm, "LoadCheckpoint", [&]() -> absl::Status {
        const int rank = comm->rank();
        if (found.leaders[static_cast<size_t>(rank)] != rank) {
          return absl::OkStatus();
        }
        const proto::CheckpointManifest& manifest = reader.manifest();
        for (int f = 0; f < manifest.files_size(); ++f) {
          const auto file =
              reader.folder().OpenFile(DataFileName(manifest.id(), f));
          if (!absl::IsNotFound(file.status())) unusable.Update(file.status());
          if (file.ok() && file->bytes() == manifest.files(f).bytes()) {
            files.push_back(f);
          }
        }
        return absl::OkStatus();
      }));
  const CommTag tag("data files that are there");
  TESSERA_ASSIGN_OR_RETURN(found.files, AllGatherLists(comm, files, tag));
  TESSERA_ASSIGN_OR_RETURN(
      found.unusable,
      comm->AllGatherStrings(unusable.ok() ? "" : unusable.ToString(), tag));
  return found;
}

// What is sent to all: a data file, or a part of it.
struct Transfer {
  int file = 0;         // the rank that wrote it
  int owner = 0;        // the rank that sends it
  bool wanted = false;  // whether this rank wants it
};

// Plans transfers of what some rank needs. `needs` is this rank's, ascending;
// it takes what any rank of `takes_for` needs.
absl::StatusOr<std::vector<Transfer>> PlanTransfers(
    const CheckpointReader& reader, const Holdings& holdings,
    const std::vector<int>& needs, const std::vector<int>& takes_for,
    Communicator* comm) {
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::vector<int>> all,
      AllGatherLists(comm, needs, CommTag{"data files that are needed"}));
  std::set<int> needed;
  for (const std::vector<int>& files : all) {
    needed.insert(files.begin(), files.end());
  }
  std::vector<Transfer> transfers;
  for (int f : needed) {
    const int owner = holdings.OwnerOf(f);
    if (owner < 0) {
      return absl::DataLossError(
          absl::StrCat(reader.path(), ": no host has ",
                       DataFileName(reader.manifest().id(), f), ", which rank ",
                       f, " of ", reader.manifest().files_size(),
                       " has written", holdings.WhyUnusable()));
    }
    const bool wanted =
        std::any_of(takes_for.begin(), takes_for.end(),
                    [&](int r) { return Has(all[static_cast<size_t>(r)], f); });
    transfers.push_back({f, owner, wanted});
  }
  return transfers;
}

// Returns those of `files` that this rank's host lacks.
std::vector<int> Lacking(const Holdings& holdings, std::vector<int> files,
                         int rank) {
  files.erase(std::remove_if(files.begin(), files.end(),
                             [&](int f) { return holdings.HasFile(rank, f); }),
              files.end());
  std::sort(files.begin(), files.end());
  return files;
}

// Fetches the indices of files that may be needed and are not here: only they
// say what the files have.
absl::Status FetchIndices(CheckpointReader* reader, const Holdings& holdings,
                          absl::Span<const WantedElements> wanted,
                          int values_of, at::Device device,
                          Communicator* comm) {
  std::vector<int> may = reader->MayHave(wanted);
  may.push_back(values_of);
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<Transfer> transfers,
      PlanTransfers(*reader, holdings,
                    Lacking(holdings, std::move(may), comm->rank()),
                    {comm->rank()}, comm));
  absl::Status mine;
  std::vector<std::string> indices(transfers.size());
  for (size_t i = 0; i < transfers.size(); ++i) {
    const Transfer& transfer = transfers[i];
    absl::StatusOr<std::string> index = std::string();
    if (transfer.owner == comm->rank()) {
      index = reader->IndexBytes(transfer.file);
    }
    mine.Update(SendAll(
        reader->manifest().files(transfer.file).index_bytes(), transfer.owner,
        device, comm,
        [&](int64_t at, char* to, int64_t n) {
          if (!index.ok()) return index.status();
          index->copy(to, static_cast<size_t>(n), static_cast<size_t>(at));
          return absl::OkStatus();
        },
        [&](int64_t, absl::string_view part) {
          if (transfer.wanted) absl::StrAppend(&indices[i], part);
          return absl::OkStatus();
        }));
  }
  // What a rank that could not read it has sent is no index.
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(mine, "LoadCheckpoint"));
  for (size_t i = 0; i < transfers.size(); ++i) {
    if (!transfers[i].wanted) continue;
    mine.Update(reader->KnowIndex(transfers[i].file, indices[i]));
  }
  return comm->AgreeOk(mine, "LoadCheckpoint");
}

absl::Status SendFile(const Transfer& transfer, const CheckpointReader& reader,
                      at::Device device, Communicator* comm) {
  const std::string name = DataFileName(reader.manifest().id(), transfer.file);
  const Folder& folder = reader.folder();
  absl::StatusOr<File> file = absl::UnknownError("not opened");
  if (transfer.owner == comm->rank()) file = folder.OpenFile(name);
  if (transfer.wanted) {
    // A file that is too short is left by a transfer that did not end.
    const absl::Status removed = folder.Remove(name);
    file =
        removed.ok() ? folder.CreateFile(name) : absl::StatusOr<File>(removed);
  }
  absl::Status sent = SendAll(
      reader.manifest().files(transfer.file).bytes(), transfer.owner, device,
      comm,
      [&](int64_t at, char* to, int64_t n) {
        return file.ok() ? file->ReadAt(at, to, n) : file.status();
      },
      [&](int64_t at, absl::string_view part) {
        if (!transfer.wanted) return absl::OkStatus();
        return file.ok() ? file->WriteAt(at, part) : file.status();
      });
  // From now on its size alone says that it is whole.
  if (sent.ok() && transfer.wanted && file.ok()) sent = file->Sync();
  return sent;
}

// Commits where a leader had not: otherwise its host's files would look like
// leftovers of a save, and the next one there would remove them.
void CompletePart(const CheckpointReader& reader, const Holdings& holdings,
                  int rank) {
  if (holdings.leaders[static_cast<size_t>(rank)] != rank) return;
  for (int f = 0; f < reader.manifest().files_size(); ++f) {
    if (holdings.OwnerOf(f) < 0) return;  // it is not whole elsewhere, either
  }
  const absl::Status added = AddManifest(reader.folder(), reader.manifest());
  if (!added.ok()) TESSERA_LOG(WARNING) << added.message();
}

}  // namespace

absl::Status FetchDataFiles(CheckpointReader* reader,
                            absl::Span<const WantedElements> wanted,
                            int values_of, at::Device device,
                            Communicator* comm) {
  TESSERA_ASSIGN_OR_RETURN(const Holdings holdings,
                           FindHoldings(*reader, comm));
  TESSERA_RETURN_IF_ERROR(
      FetchIndices(reader, holdings, wanted, values_of, device, comm));
  const int rank = comm->rank();
  std::vector<int> needs;
  TESSERA_RETURN_IF_ERROR(RunTogether(comm, "LoadCheckpoint", [&] {
    absl::StatusOr<std::vector<int>> files = reader->FilesOf(wanted);
    if (files.ok()) needs = Lacking(holdings, *std::move(files), rank);
    return files.status();
  }));
  // A leader writes what any rank of its host needs.
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<Transfer> transfers,
      PlanTransfers(*reader, holdings, needs,
                    RanksOfLeader(holdings.leaders, rank), comm));
  absl::Status mine;
  for (const Transfer& transfer : transfers) {
    mine.Update(SendFile(transfer, *reader, device, comm));
  }
  mine = comm->AgreeOk(mine, "LoadCheckpoint");
  if (mine.ok()) {
    return RunTogether(comm, "LoadCheckpoint", [&] {
      CompletePart(*reader, holdings, rank);
      return absl::OkStatus();
    });
  }
  // Files may have the right length and yet hold what could not be read.
  for (const Transfer& transfer : transfers) {
    if (!transfer.wanted) continue;
    (void)reader->folder().Remove(
        DataFileName(reader->manifest().id(), transfer.file));
  }
  return mine;
}

}  // namespace tessera
