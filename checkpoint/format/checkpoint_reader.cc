#include "checkpoint/format/checkpoint_reader.h"

#include <algorithm>
#include <new>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "base/thread/start_thread.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/piece_reads.h"
#include "checkpoint/format/step_name.h"

namespace tessera {
namespace {

// A task has so many bytes: few enough for several threads to share a piece.
constexpr int64_t kTaskBytes = 8 << 20;
constexpr int kMaxOpenFiles = 128;
constexpr int kMostTurns = 16;
constexpr int64_t kProgressBytes = int64_t{1} << 30;

bool Before(const WantedElements& a, const WantedElements& b) {
  return std::tie(a.storage, a.state, a.begin) <
         std::tie(b.storage, b.state, b.begin);
}

// Returns whether a file has pieces of a storage that is wanted.
bool Overlap(const proto::CheckpointFile& file,
             absl::Span<const WantedElements> sorted) {
  int64_t at = 0;
  for (int i = 0; i + 1 < file.storage_ranges_size(); i += 2) {
    const int64_t begin = at + file.storage_ranges(i);
    const int64_t end = begin + file.storage_ranges(i + 1);
    WantedElements first;
    first.storage = static_cast<int>(begin);
    const auto it =
        std::lower_bound(sorted.begin(), sorted.end(), first, Before);
    if (it != sorted.end() && it->storage < end) return true;
    at = end;
  }
  return false;
}

}  // namespace

CheckpointReader::CheckpointReader(Folder folder,
                                   proto::CheckpointManifest manifest)
    : folder_(std::make_unique<Folder>(std::move(folder))),
      manifest_(
          std::make_unique<proto::CheckpointManifest>(std::move(manifest))) {}

absl::StatusOr<CheckpointReader> CheckpointReader::Open(const std::string& path,
                                                        FileSystem* files) {
  absl::StatusOr<Folder> folder = Folder::Open(path, files);
  if (absl::IsNotFound(folder.status())) {
    return absl::NotFoundError(absl::StrCat(path, ": no such checkpoint"));
  }
  // In a run's folder this is a damaged step and nothing else.
  if (absl::IsFailedPrecondition(folder.status()) &&
      StepInPath(path).has_value()) {
    return absl::DataLossError(folder.status().message());
  }
  TESSERA_RETURN_IF_ERROR(folder.status());
  TESSERA_ASSIGN_OR_RETURN(proto::CheckpointManifest manifest,
                           ReadManifest(*folder));
  return CheckpointReader(*std::move(folder), std::move(manifest));
}

absl::StatusOr<CheckpointReader> CheckpointReader::OpenToStay(
    const std::string& path, FileSystem* files) {
  for (int turn = 1;; ++turn) {
    TESSERA_ASSIGN_OR_RETURN(CheckpointReader reader, Open(path, files));
    absl::Status opened;
    for (int r = 0; opened.ok() && r < reader.manifest().files_size(); ++r) {
      opened = reader.SourceOf(r).status();
    }
    if (opened.ok()) return reader;
    if (!absl::IsAborted(opened) || turn == kMostTurns) return opened;
  }
}

absl::StatusOr<CheckpointReader> CheckpointReader::WithManifest(
    const std::string& path, absl::string_view manifest, FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(Folder folder, Folder::Make(path, files));
  TESSERA_ASSIGN_OR_RETURN(proto::CheckpointManifest decoded,
                           DecodeManifest(manifest, path));
  return CheckpointReader(std::move(folder), std::move(decoded));
}

std::string CheckpointReader::NameOf(int storage, int state) const {
  const proto::CheckpointStorage& of = manifest_->storages(storage);
  return absl::StrCat("'", of.states(state).name(), "' of '",
                      of.tensors(0).name(), "'");
}

int64_t CheckpointReader::ElementBytes(int storage, int state) const {
  return DtypeBytes(manifest_->storages(storage).states(state).dtype());
}

absl::StatusOr<DataFileReader> CheckpointReader::OpenFile(int rank) const {
  absl::StatusOr<DataFileReader> reader =
      DataFileReader::Open(*folder_, *manifest_, rank);
  if (absl::IsFailedPrecondition(reader.status())) {  // no file
    return absl::DataLossError(
        absl::StrCat(reader.status().message(), ": a part of the checkpoint"));
  }
  if (!absl::IsNotFound(reader.status())) return reader;
  // The file is gone since the manifest was read, or lost.
  const auto now = ReadManifest(*folder_);
  if (absl::IsNotFound(now.status())) {
    return absl::NotFoundError(
        absl::StrCat(path(), ": was removed while it was read"));
  }
  const bool replaced = now.ok() && now->id() != manifest_->id();
  return replaced
             ? absl::AbortedError(absl::StrCat(
                   path(),
                   ": another checkpoint took the place of this one "
                   "while it was read; load again"))
             : absl::DataLossError(absl::StrCat(reader.status().message(),
                                                ": a part of the checkpoint"));
}

bool CheckpointReader::keeps_files_open() const {
  return manifest_->files_size() <= kMaxOpenFiles;
}

absl::StatusOr<const CheckpointReader::Source*> CheckpointReader::SourceOf(
    int rank) {
  std::unique_ptr<Source>& source = sources_[rank];
  if (source != nullptr) return source.get();
  TESSERA_ASSIGN_OR_RETURN(DataFileReader reader, OpenFile(rank));
  TESSERA_ASSIGN_OR_RETURN(proto::CheckpointIndex index,
                           reader.ReadIndex(*manifest_));
  bytes_read_ += manifest_->files(rank).index_bytes();
  source = std::make_unique<Source>(Source{rank, std::move(index), nullptr});
  if (keeps_files_open()) {
    source->file = std::make_shared<const DataFileReader>(std::move(reader));
  }
  return source.get();
}

absl::StatusOr<std::shared_ptr<const DataFileReader>> CheckpointReader::FileOf(
    const Source& source) const {
  if (source.file != nullptr) return source.file;
  TESSERA_ASSIGN_OR_RETURN(DataFileReader opened, OpenFile(source.rank));
  return std::make_shared<const DataFileReader>(std::move(opened));
}

absl::StatusOr<std::string> CheckpointReader::IndexBytes(int rank) const {
  TESSERA_ASSIGN_OR_RETURN(const DataFileReader file, OpenFile(rank));
  return file.IndexBytes(*manifest_);
}

absl::Status CheckpointReader::KnowIndex(int rank, absl::string_view bytes) {
  TESSERA_ASSIGN_OR_RETURN(
      proto::CheckpointIndex index,
      DecodeIndex(
          bytes, *manifest_, rank,
          absl::StrCat(path(), "/", DataFileName(manifest_->id(), rank))));
  sources_[rank] =
      std::make_unique<Source>(Source{rank, std::move(index), nullptr});
  return absl::OkStatus();
}

namespace {

std::vector<WantedElements> Sorted(absl::Span<const WantedElements> wanted) {
  std::vector<WantedElements> sorted(wanted.begin(), wanted.end());
  std::sort(sorted.begin(), sorted.end(), Before);
  return sorted;
}

}  // namespace

std::vector<int> CheckpointReader::MayHave(
    absl::Span<const WantedElements> wanted) const {
  const std::vector<WantedElements> sorted = Sorted(wanted);
  std::vector<int> ranks;
  for (int r = 0; r < manifest_->files_size(); ++r) {
    if (Overlap(manifest_->files(r), sorted)) ranks.push_back(r);
  }
  return ranks;
}

absl::StatusOr<std::vector<int>> CheckpointReader::FilesOf(
    absl::Span<const WantedElements> wanted) {
  const std::vector<WantedElements> sorted = Sorted(wanted);
  std::vector<int> ranks;
  for (int r = 0; r < manifest_->files_size(); ++r) {
    std::vector<Task> tasks;
    std::vector<Cover> covers;
    TESSERA_RETURN_IF_ERROR(PlanFile(r, sorted, &tasks, &covers));
    if (!covers.empty()) ranks.push_back(r);
  }
  return ranks;
}

absl::StatusOr<std::vector<proto::CheckpointValue>> CheckpointReader::ValuesOf(
    int rank) {
  TESSERA_ASSIGN_OR_RETURN(const Source* const source, SourceOf(rank));
  return std::vector<proto::CheckpointValue>(source->index.values().begin(),
                                             source->index.values().end());
}

absl::Status CheckpointReader::PlanFile(int rank,
                                        absl::Span<const WantedElements> sorted,
                                        std::vector<Task>* tasks,
                                        std::vector<Cover>* covers) {
  if (!Overlap(manifest_->files(rank), sorted)) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const Source* const source, SourceOf(rank));
  for (const proto::CheckpointPiece& piece : source->index.pieces()) {
    const int64_t size = ElementBytes(piece.storage(), piece.state());
    WantedElements key;
    key.storage = piece.storage();
    key.state = piece.state();
    // Starts at the first that is wanted of this state: they may overlap.
    for (auto it = std::lower_bound(sorted.begin(), sorted.end(), key, Before);
         it != sorted.end() && it->storage == key.storage &&
         it->state == key.state && it->begin < piece.end();
         ++it) {
      const int64_t begin = std::max(it->begin, piece.begin());
      const int64_t end = std::min(it->end, piece.end());
      if (begin >= end) continue;
      covers->push_back({static_cast<size_t>(it - sorted.begin()), begin, end});
      const int64_t last = (end - piece.begin()) * size;
      char* to =
          it->to == nullptr ? nullptr : it->to + (begin - it->begin) * size;
      for (int64_t at = (begin - piece.begin()) * size; at < last;) {
        // Ranges are cut where blocks end, so that none is read twice.
        const int64_t cut = (at / kTaskBytes + 1) * kTaskBytes;
        const int64_t stop = std::min(cut, last);
        tasks->push_back({source, &piece, at, stop, to});
        if (to != nullptr) to += stop - at;
        at = stop;
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::CheckCovered(
    absl::Span<const WantedElements> sorted, std::vector<Cover>* covers) const {
  std::sort(covers->begin(), covers->end(), [](const Cover& a, const Cover& b) {
    return std::tie(a.wanted, a.begin) < std::tie(b.wanted, b.begin);
  });
  auto it = covers->begin();
  for (size_t w = 0; w < sorted.size(); ++w) {
    int64_t at = sorted[w].begin;
    for (; it != covers->end() && it->wanted == w; ++it) {
      if (it->begin != at) break;
      at = it->end;
    }
    if (at == sorted[w].end && (it == covers->end() || it->wanted != w)) {
      continue;
    }
    const bool twice = it != covers->end() && it->wanted == w && it->begin < at;
    return absl::DataLossError(
        absl::StrCat(path(), ": ", NameOf(sorted[w].storage, sorted[w].state),
                     twice ? ": more than one data file has element "
                           : ": no data file has element ",
                     twice ? it->begin : at));
  }
  return absl::OkStatus();
}

// Does the work of one thread. Failing to get memory is an error like any
// other.
absl::Status CheckpointReader::RunSome(const std::vector<Task>& tasks,
                                       std::atomic<size_t>* next,
                                       int64_t* read) const try {
  PieceReads reads(folder_->files());
  const Source* of = nullptr;
  std::shared_ptr<const DataFileReader> file;
  const absl::Status status =
      reads.Run([&]() -> absl::StatusOr<std::optional<PieceRange>> {
        const size_t t = (*next)++;
        if (t >= tasks.size()) return std::nullopt;
        const Task& task = tasks[t];
        const proto::CheckpointPiece& piece = *task.piece;
        if (task.source != of) {
          of = task.source;
          TESSERA_ASSIGN_OR_RETURN(file, FileOf(*of));
        }
        const int64_t piece_bytes =
            (piece.end() - piece.begin()) *
            ElementBytes(piece.storage(), piece.state());
        return PieceRange{file,
                          task.piece,
                          piece_bytes,
                          task.begin,
                          task.end,
                          task.to,
                          NameOf(piece.storage(), piece.state())};
      });
  *read = reads.bytes_read();
  return status;
} catch (const std::bad_alloc&) {
  return absl::ResourceExhaustedError(
      absl::StrCat(path(), ": no memory to read it"));
}

absl::Status CheckpointReader::Run(std::vector<Task> tasks, int num_threads) {
  std::sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
    return std::make_tuple(a.source->rank, a.piece->offset() + a.begin) <
           std::make_tuple(b.source->rank, b.piece->offset() + b.begin);
  });
  std::atomic<size_t> next{0};
  absl::Mutex mutex;
  absl::Status failed;
  const auto work = [&] {
    int64_t read = 0;
    const absl::Status status = RunSome(tasks, &next, &read);
    if (!status.ok()) next = tasks.size();  // stops all threads
    absl::MutexLock lock(&mutex);
    if (failed.ok()) failed = status;
    bytes_read_ += read;
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(std::max(num_threads, 1)));
  for (int i = 1; i < num_threads && i < static_cast<int>(tasks.size()); ++i) {
    auto thread = StartThread("tessera-read", work);
    if (!thread.ok()) break;  // go on with fewer threads
    threads.push_back(*std::move(thread));
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return failed;
}

absl::Status CheckpointReader::Read(absl::Span<const WantedElements> wanted,
                                    int num_threads) {
  const std::vector<WantedElements> sorted = Sorted(wanted);
  std::vector<Task> tasks;
  std::vector<Cover> covers;
  for (int r = 0; r < manifest_->files_size(); ++r) {
    TESSERA_RETURN_IF_ERROR(PlanFile(r, sorted, &tasks, &covers));
  }
  TESSERA_RETURN_IF_ERROR(CheckCovered(sorted, &covers));
  return Run(std::move(tasks), num_threads);
}

absl::Status CheckpointReader::Verify(
    int num_threads, const std::function<void(int64_t, int64_t)>& progress) {
  int64_t total = 0, done = 0, bytes = 0;
  for (int r = 0; r < manifest_->files_size(); ++r) {
    TESSERA_RETURN_IF_ERROR(SourceOf(r).status());
    total += manifest_->files(r).bytes();
  }
  std::vector<WantedElements> some;
  const auto read_some = [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(Read(some, num_threads));
    done += std::exchange(bytes, 0);
    some.clear();
    if (progress) progress(done, total);
    return absl::OkStatus();
  };
  for (int s = 0; s < manifest_->storages_size(); ++s) {
    const int64_t numel = manifest_->storages(s).numel();
    for (int i = 0; i < manifest_->storages(s).states_size(); ++i) {
      const int64_t most = kProgressBytes / ElementBytes(s, i);
      for (int64_t begin = 0; begin < numel; begin += most) {
        const int64_t end = std::min(begin + most, numel);
        some.push_back({s, i, begin, end});
        bytes += (end - begin) * ElementBytes(s, i);
        if (bytes >= kProgressBytes) TESSERA_RETURN_IF_ERROR(read_some());
      }
    }
  }
  TESSERA_RETURN_IF_ERROR(read_some());
  for (int r = 0; r < manifest_->files_size(); ++r) {
    TESSERA_RETURN_IF_ERROR(CheckGaps(r));
  }
  return absl::OkStatus();
}

// What lies between a file's pieces has no checksums, and needs none.
absl::Status CheckpointReader::CheckGaps(int rank) {
  const Source& source = *sources_.at(rank);
  TESSERA_ASSIGN_OR_RETURN(const auto file, FileOf(source));
  int64_t at = 0;
  for (const proto::CheckpointPiece& piece : source.index.pieces()) {
    TESSERA_RETURN_IF_ERROR(file->CheckZeros(at, piece.offset(), &bytes_read_));
    at = piece.offset() + (piece.end() - piece.begin()) *
                              ElementBytes(piece.storage(), piece.state());
  }
  return file->CheckZeros(at, manifest_->files(rank).index_offset(),
                          &bytes_read_);
}

}  // namespace tessera
