#include "checkpoint/pending_save.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/thread/start_thread.h"
#include "base/torch_guard.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/save_notes.h"
#include "checkpoint/together.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

// Rank 0 may keep the board: how long it waits at most until all have read how
// the save ended.
constexpr absl::Duration kSeenWait = absl::Seconds(5);
constexpr absl::Duration kLimitedSync = absl::Seconds(1);

// Grows with what is waited for, and with the number of those who ask.
class Pace {
 public:
  explicit Pace(int world_size)
      : most_(absl::Milliseconds(20) + world_size * absl::Microseconds(100)) {}
  absl::Duration Next() {
    return std::exchange(next_, std::min(next_ * 1.5, most_));
  }

 private:
  absl::Duration most_;
  absl::Duration next_ = absl::Microseconds(500);
};

// Work on a thread of its own; in the constructor where there is none.
class Aside {
 public:
  explicit Aside(std::function<absl::Status()> work) : work_(std::move(work)) {
    const auto run = [this] {
      status_ = CatchTorch("checkpoint", work_);
      done_.Notify();
    };
    auto thread = StartThread("tessera-disk", run);
    if (thread.ok()) {
      thread_ = *std::move(thread);
    } else {
      run();
    }
  }
  ~Aside() {
    if (thread_.joinable()) thread_.join();
  }
  bool Done(absl::Duration wait) {
    return done_.WaitForNotificationWithTimeout(wait);
  }
  const absl::Status& status() const {
    done_.WaitForNotification();
    return status_;
  }

 private:
  const std::function<absl::Status()> work_;
  absl::Status status_;
  absl::Notification done_;
  std::thread thread_;
};

}  // namespace

class PendingSave::Impl {
 public:
  Impl(const std::string& dir, CheckpointContent content, Communicator* comm,
       NoteBoard* board, PendingSaveOptions options)
      : dir_(dir),
        rank_(comm->rank()),
        world_size_(comm->world_size()),
        board_(board),
        options_(options),
        head_(std::move(content.head)),
        values_(std::move(content.values)),
        pieces_(std::move(content.pieces)) {}

  ~Impl() {
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Begin(Communicator* comm) {
    TESSERA_RETURN_IF_ERROR(comm->AgreeEqual(dir_, "checkpoint's folder"));
    if (dir_.empty()) {
      return absl::InvalidArgumentError(
          "SaveCheckpoint: the folder's name is empty");
    }
    TESSERA_RETURN_IF_ERROR(
        RunTogether(comm, "checkpoint folder", [&] { return Lock(); }));
    TESSERA_RETURN_IF_ERROR(ShareId(comm));
    if (options_.async) {
      TESSERA_RETURN_IF_ERROR(
          comm->AgreeOk(pieces_.Keep(), "copy of what a checkpoint holds"));
    }
    notes_.emplace(board_, id_, world_size_);
    const auto run = [this] {
      status_ = CatchTorch("checkpoint",
                           [&] { return rank_ == 0 ? Lead() : Follow(); });
      pieces_.Abandon();
      done_.Notify();
    };
    auto thread = StartThread("tessera-save", run);
    if (thread.ok()) {
      thread_ = *std::move(thread);
    } else {
      run();  // the others wait for it as for a slow disk
    }
    return absl::OkStatus();
  }

  void Detach() { pieces_.Detach(); }
  bool done() const { return done_.HasBeenNotified(); }
  absl::Status Wait() {
    done_.WaitForNotification();
    return status_;
  }

 private:
  absl::Status Lock() {
    if (rank_ != 0) return absl::OkStatus();
    TESSERA_ASSIGN_OR_RETURN(Saving saving,
                             Saving::Begin(dir_, FileSystem::Real()));
    saving_ = std::make_unique<Saving>(std::move(saving));
    return absl::OkStatus();
  }

  absl::Status ShareId(Communicator* comm) {
    const uint64_t own = saving_ == nullptr ? 0 : saving_->id();
    TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                             comm->AllGatherStrings(absl::StrFormat("%x", own),
                                                    CommTag{"checkpoint id"}));
    return absl::SimpleHexAtoi(all[0], &id_)
               ? absl::OkStatus()
               : absl::InternalError("a checkpoint's id is no number");
  }

  // ---- on "tessera-save" ----

  absl::Status Lead() {
    std::vector<proto::CheckpointFile> files(static_cast<size_t>(world_size_));
    absl::Status status = GatherFiles(&files);
    if (status.ok()) {
      Aside commit([&] { return Commit(files); });
      while (!commit.Done(absl::Milliseconds(100))) notes_->TellBusy();
      status = commit.status();
      if (!status.ok()) {
        status = Annotate(status, "[checkpoint commit] rank 0");
      }
    }
    if (!status.ok() && !committed_) saving_->Abandon();
    saving_.reset();  // who hears of the end may save there at once
    if (world_size_ > 1) {
      notes_->Tell("ended", StatusToText(status));
    }
    if (status.ok() && options_.after_commit) options_.after_commit();
    if (world_size_ > 1) AwaitSeen();
    return status;
  }

  // Until all files are there, or the first error.
  absl::Status GatherFiles(std::vector<proto::CheckpointFile>* files) {
    Aside writing([this] { return WriteFile(); });
    std::vector<int> missing;
    for (int r = 1; r < world_size_; ++r) missing.push_back(r);
    Pace pace(world_size_);
    absl::Status status;
    bool written = false;
    while (status.ok() && (!written || !missing.empty())) {
      if (!written && writing.Done(pace.Next())) {
        written = true;
        pace = Pace(world_size_);
        status = FailedOn(0, writing.status());
      } else if (written) {
        absl::SleepFor(pace.Next());
      }
      notes_->TellBusy();
      if (status.ok()) status = TakeFiles(&missing, files);
    }
    if (!status.ok()) pieces_.Abandon();
    (*files)[0] = writing.status().ok() ? file_ : proto::CheckpointFile();
    return status;
  }

  // Takes those of `missing` that are written.
  absl::Status TakeFiles(std::vector<int>* missing,
                         std::vector<proto::CheckpointFile>* files) {
    if (missing->empty()) return absl::OkStatus();
    const auto notes = notes_->Read(*missing);
    std::vector<int> left;
    for (size_t i = 0; i < missing->size(); ++i) {
      const int r = (*missing)[i];
      std::optional<SaveNote> note;
      if (notes.has_value()) note = (*notes)[i];
      if (note.has_value() && note->kind == "failed") {
        return FailedOn(r, StatusFromText(note->text));
      }
      if (note.has_value() && note->kind == "written") {
        if (!(*files)[static_cast<size_t>(r)].ParseFromString(note->text)) {
          return absl::InternalError("a note of a data file is damaged");
        }
        continue;
      }
      TESSERA_RETURN_IF_ERROR(notes_->CheckAlive(r, note));
      left.push_back(r);
    }
    *missing = std::move(left);
    return absl::OkStatus();
  }

  static absl::Status FailedOn(int rank, const absl::Status& status) {
    return Annotate(status, absl::StrCat("[checkpoint files] rank ", rank));
  }

  absl::Status Commit(const std::vector<proto::CheckpointFile>& files) {
    proto::CheckpointManifest manifest = head_;
    manifest.set_format_version(kCheckpointFormat);
    manifest.set_id(id_);
    manifest.set_saved_unix_micros(absl::ToUnixMicros(absl::Now()));
    for (const proto::CheckpointFile& file : files)
      *manifest.add_files() = file;
    const absl::Status status = saving_->Commit(manifest, &committed_);
    return committed_ ? Annotate(status,
                                 "the new checkpoint may be in place already, "
                                 "and may not outlast a power failure")
                      : status;
  }

  void AwaitSeen() {
    const absl::Time until = absl::Now() + kSeenWait;
    std::vector<int> missing;
    for (int r = 1; r < world_size_; ++r) missing.push_back(r);
    Pace pace(world_size_);
    while (!missing.empty() && absl::Now() < until) {
      absl::SleepFor(pace.Next());
      const auto notes = notes_->Read(missing);
      std::vector<int> left;
      for (size_t i = 0; i < missing.size(); ++i) {
        const bool seen = notes.has_value() && (*notes)[i].kind == "seen";
        if (!seen && board_->EndOf(missing[i]).ok()) left.push_back(missing[i]);
      }
      missing = std::move(left);
    }
  }

  absl::Status Follow() {
    std::optional<absl::Status> result;
    absl::Status mine;
    {
      Aside writing([this] { return WriteFile(); });
      while (!result.has_value() && !writing.Done(absl::Milliseconds(100))) {
        notes_->TellBusy();
        result = HearResult();
      }
      if (result.has_value()) pieces_.Abandon();
      mine = writing.status();
    }
    if (!result.has_value()) {
      (void)notes_->Tell(
          mine.ok() ? "written" : "failed",
          mine.ok() ? file_.SerializeAsString() : StatusToText(mine));
    }
    Pace pace(world_size_);
    while (!result.has_value()) {
      result = HearResult();
      if (!result.has_value()) absl::SleepFor(pace.Next());
    }
    return *result;
  }

  // What rank 0 says of the save's end, if it has.
  std::optional<absl::Status> HearResult() {
    const auto notes = notes_->Read({0});
    std::optional<SaveNote> note;
    if (notes.has_value()) note = (*notes)[0];
    if (note.has_value() && note->kind == "ended") {
      (void)notes_->Tell("seen", "");
      return StatusFromText(note->text);
    }
    const absl::Status alive = notes_->CheckAlive(0, note);
    if (alive.ok()) return std::nullopt;
    // Perhaps it came as far as the commit.
    const auto folder = Folder::Open(dir_, FileSystem::Real());
    if (folder.ok()) {
      const auto there = ReadManifest(*folder);
      if (there.ok() && there->id() == id_) return absl::OkStatus();
    }
    return Annotate(alive, absl::StrCat("checkpoint ", dir_));
  }

  // ---- on "tessera-disk" ----

  absl::Status WriteFile() {
    TorchScope scope;
    TESSERA_ASSIGN_OR_RETURN(const Folder folder,
                             Folder::Open(dir_, FileSystem::Real()));
    TESSERA_ASSIGN_OR_RETURN(DataFileWriter writer,
                             DataFileWriter::Create(folder, id_, rank_));
    const absl::Time begun = absl::Now();
    int64_t written = 0;
    std::string scratch;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const SavedPiece& piece = pieces_[i];
      const int64_t bytes = static_cast<int64_t>(piece.elements.nbytes());
      TESSERA_RETURN_IF_ERROR(writer.BeginPiece(piece.storage, piece.state,
                                                piece.begin,
                                                piece.elements.numel(), bytes));
      for (int64_t at = 0; at < bytes; at += kPartBytes) {
        const int64_t size = std::min(kPartBytes, bytes - at);
        TESSERA_ASSIGN_OR_RETURN(const absl::string_view part,
                                 pieces_.Part(i, at, size, &scratch));
        TESSERA_RETURN_IF_ERROR(writer.AddPart(part));
        written += size;
        TESSERA_RETURN_IF_ERROR(Throttle(begun, written, &writer));
      }
      pieces_.Written(i);
    }
    for (const auto& [name, value] : values_) writer.AddValue(name, value);
    TESSERA_ASSIGN_OR_RETURN(file_, writer.Finish());
    return absl::OkStatus();
  }

  // Not more than max_bandwidth, and not all at the end by the system.
  absl::Status Throttle(absl::Time begun, int64_t written,
                        DataFileWriter* writer) {
    if (options_.max_bandwidth <= 0) return absl::OkStatus();
    const absl::Time due =
        begun + absl::Seconds(static_cast<double>(written) /
                              static_cast<double>(options_.max_bandwidth));
    while (absl::Now() < due) {
      if (pieces_.abandoned()) {
        return absl::CancelledError("the save was given up");
      }
      absl::SleepFor(std::min(due - absl::Now(), absl::Milliseconds(100)));
    }
    if (absl::Now() - synced_ < kLimitedSync) return absl::OkStatus();
    synced_ = absl::Now();
    return writer->SyncSoFar();
  }

  const std::string dir_;
  const int rank_, world_size_;
  NoteBoard* const board_;
  const PendingSaveOptions options_;
  const proto::CheckpointManifest head_;
  const std::vector<std::pair<std::string, std::string>> values_;
  SavedPieces pieces_;
  uint64_t id_ = 0;
  std::optional<SaveNotes> notes_;  // of "tessera-save"
  std::unique_ptr<Saving> saving_;  // of rank 0 alone
  proto::CheckpointFile file_;      // by WriteFile
  absl::Time synced_ = absl::InfinitePast();
  bool committed_ = false;
  absl::Status status_;
  absl::Notification done_;
  std::thread thread_;
};

PendingSave::PendingSave(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PendingSave::~PendingSave() = default;

absl::StatusOr<std::unique_ptr<PendingSave>> PendingSave::Begin(
    const std::string& dir, CheckpointContent content, Communicator* comm,
    NoteBoard* notes, PendingSaveOptions options) {
  AwaitDevices(content.pieces);
  auto impl =
      std::make_unique<Impl>(dir, std::move(content), comm, notes, options);
  TESSERA_RETURN_IF_ERROR(impl->Begin(comm));
  return std::unique_ptr<PendingSave>(new PendingSave(std::move(impl)));
}

void PendingSave::Detach() { impl_->Detach(); }
bool PendingSave::done() const { return impl_->done(); }
absl::Status PendingSave::Wait() { return impl_->Wait(); }

}  // namespace tessera
