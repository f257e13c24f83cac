#include "checkpoint/save/save_course.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "checkpoint/aside.h"
#include "checkpoint/save/write_data_file.h"

namespace tessera {
namespace {

constexpr char kWhere[] = "checkpoint";
// Rank 0 may keep the board: it waits at most this long until all have read how
// the save ended.
constexpr absl::Duration kSeenWait = absl::Seconds(5);
constexpr absl::Duration kBeat = absl::Milliseconds(100);

// The pause between two looks; it grows with the time waited, and with the
// number of ranks that ask.
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

absl::Status FailedOn(int rank, const absl::Status& status) {
  return Annotate(status, absl::StrCat("[checkpoint files] rank ", rank));
}

}  // namespace

SaveCourse::SaveCourse(SavePlan plan, SavedPieces* pieces, NoteBoard* board)
    : plan_(std::move(plan)),
      pieces_(pieces),
      board_(board),
      notes_(board, plan_.id, plan_.world_size) {}

absl::Status SaveCourse::Run() {
  absl::Status status = plan_.rank == 0 ? Lead() : Follow();
  pieces_->Abandon();
  return status;
}

std::vector<int> SaveCourse::Others() const {
  std::vector<int> others;
  for (int r = 0; r < plan_.world_size; ++r) {
    if (r != plan_.rank) others.push_back(r);
  }
  return others;
}

// ---- rank 0

absl::Status SaveCourse::Lead() {
  Files files(static_cast<size_t>(plan_.world_size));
  absl::Status status = GatherFiles(&files);
  if (status.ok()) status = CommitBusily(files);
  if (status.ok() && plan_.options.node_local) status = AwaitHosts();
  // A checkpoint that is in place, or may be, stays.
  const bool undone = !status.ok() && (!committed_ || plan_.options.node_local);
  if (undone) plan_.saving->Abandon();
  plan_.saving.reset();  // whoever learns of the end may save there at once
  if (status.ok()) AfterCommit();
  if (plan_.world_size > 1) {
    notes_.Tell(undone ? "undone" : "ended", StatusToText(status));
    AwaitSeen();
  }
  return status;
}

// What follows a commit does not change the save's result. It may take its
// time, and the others, which may wait for the save, are kept informed.
void SaveCourse::AfterCommit() {
  if (!plan_.options.after_commit) return;
  Aside after(kWhere, [this] {
    plan_.options.after_commit();
    return absl::OkStatus();
  });
  while (!after.Done(kBeat)) notes_.TellBusy();
  if (after.status().ok()) return;
  TESSERA_LOG(ERROR) << plan_.dir << ": the checkpoint is saved; what was to "
                     << "follow failed: " << after.status().message();
}

// Runs until all files are there, or until the first error.
absl::Status SaveCourse::GatherFiles(Files* files) {
  Aside writing(kWhere, [this] { return WriteFile(); });
  std::vector<int> missing = Others();
  Pace pace(plan_.world_size);
  absl::Status status;
  bool written = false;
  while (status.ok() && (!written || !missing.empty())) {
    if (!written && writing.Done(pace.Next())) {
      written = true;
      pace = Pace(plan_.world_size);
      status = FailedOn(0, writing.status());
    } else if (written) {
      absl::SleepFor(pace.Next());
    }
    notes_.TellBusy();
    if (status.ok()) status = TakeFiles("written", &missing, files);
  }
  if (!status.ok()) {
    pieces_->Abandon();
    while (!writing.Done(kBeat)) notes_.TellBusy();
    return status;
  }
  (*files)[0] = file_;
  if (plan_.options.node_local) {
    (void)notes_.Tell("written", file_.SerializeAsString());
  }
  return absl::OkStatus();
}

// Runs until the leaders of other folders have committed, too.
absl::Status SaveCourse::AwaitHosts() {
  std::vector<int> missing = Others();
  missing.erase(
      std::remove_if(
          missing.begin(), missing.end(),
          [this](int r) { return plan_.leaders[static_cast<size_t>(r)] != r; }),
      missing.end());
  Pace pace(plan_.world_size);
  notes_.ListenAnew();  // this restarts the patience for ranks that have
                        // written, too
  while (true) {
    notes_.TellBusy();
    TESSERA_RETURN_IF_ERROR(TakeFiles("committed", &missing, nullptr));
    if (missing.empty()) return absl::OkStatus();
    absl::SleepFor(pace.Next());
  }
}

void SaveCourse::AwaitSeen() {
  const absl::Duration until = MonotonicNow() + kSeenWait;
  std::vector<int> missing = Others();
  Pace pace(plan_.world_size);
  while (!missing.empty() && MonotonicNow() < until) {
    absl::SleepFor(pace.Next());
    const std::vector<SaveNote> notes = notes_.Read(missing);
    std::vector<int> left;
    for (size_t i = 0; i < missing.size(); ++i) {
      const bool seen = notes[i].kind == "seen";
      if (!seen && board_->EndOf(missing[i]).ok()) left.push_back(missing[i]);
    }
    missing = std::move(left);
  }
}

// ---- rank 0, and other leaders

// Removes from `missing` those that have come as far as `kind`, and collects
// what they have written, unless `files` is null.
absl::Status SaveCourse::TakeFiles(absl::string_view kind,
                                   std::vector<int>* missing, Files* files) {
  if (missing->empty()) return absl::OkStatus();
  const std::vector<SaveNote> notes = notes_.Read(*missing);
  std::vector<int> left;
  for (size_t i = 0; i < missing->size(); ++i) {
    const int r = (*missing)[i];
    const SaveNote& note = notes[i];
    if (note.kind == "failed") return FailedOn(r, StatusFromText(note.text));
    if (note.kind == kind || note.kind == "committed") {
      if (files != nullptr &&
          !ParseMessage(note.text, &(*files)[static_cast<size_t>(r)])) {
        return absl::InternalError("a note of a data file is damaged");
      }
      continue;
    }
    TESSERA_RETURN_IF_ERROR(
        Annotate(notes_.CheckAlive(r, note),
                 absl::StrCat(plan_.dir, ": the checkpoint is not saved")));
    left.push_back(r);
  }
  *missing = std::move(left);
  return absl::OkStatus();
}

absl::Status SaveCourse::CommitBusily(const Files& files) {
  Aside commit(kWhere, [&] { return Commit(files); });
  while (!commit.Done(kBeat)) notes_.TellBusy();
  return Annotate(commit.status(),
                  absl::StrCat("[checkpoint commit] rank ", plan_.rank));
}

absl::Status SaveCourse::Commit(const Files& files) {
  proto::CheckpointManifest manifest = plan_.head;
  manifest.set_format_version(kCheckpointFormat);
  manifest.set_id(plan_.id);
  manifest.set_saved_unix_micros(plan_.begun_micros);
  for (const proto::CheckpointFile& file : files) *manifest.add_files() = file;
  const absl::Status status = plan_.saving->Commit(manifest, &committed_);
  // With several folders the save is taken back.
  return committed_ && !plan_.options.node_local
             ? Annotate(status,
                        "the new checkpoint may be in place already, and may "
                        "not outlast a power failure")
             : status;
}

// ---- others

absl::Status SaveCourse::Follow() {
  std::optional<absl::Status> result;
  absl::Status mine;
  {
    Aside writing(kWhere, [this] { return WriteFile(); });
    while (!result.has_value() && !writing.Done(kBeat)) {
      notes_.TellBusy();
      result = HearResult();
    }
    if (result.has_value()) pieces_->Abandon();
    mine = writing.status();
  }
  if (!result.has_value()) {
    (void)notes_.Tell(
        mine.ok() ? "written" : "failed",
        mine.ok() ? file_.SerializeAsString() : StatusToText(mine));
    if (mine.ok() && plan_.saving != nullptr) result = CommitPart();
  }
  Pace pace(plan_.world_size);
  while (!result.has_value()) {
    if (plan_.saving != nullptr) notes_.TellBusy();
    result = HearResult();
    if (!result.has_value()) absl::SleepFor(pace.Next());
  }
  if (plan_.saving != nullptr) {
    EndPart(*result);
  } else if (undone_) {
    RemoveFiles();
  }
  return *result;
}

// Removes what this rank has written for a save that was taken back. The leader
// of the folder may have swept it before. If the leader has committed there it
// will do so: a manifest is removed before the files that it names.
void SaveCourse::RemoveFiles() const {
  const absl::StatusOr<Folder> folder =
      Folder::Open(plan_.dir, FileSystem::Real());
  if (!folder.ok()) return;
  const auto there = ReadManifest(*folder);
  if (there.ok() ? there->id() == plan_.id
                 : !absl::IsNotFound(there.status())) {
    return;
  }
  (void)folder->Remove(DataFileName(plan_.id, plan_.rank));
  if (plan_.replicas == nullptr) return;
  const std::vector<int>& keepers = plan_.replicas->keepers();
  for (int r = 0; r < plan_.world_size; ++r) {
    if (keepers[static_cast<size_t>(r)] != plan_.rank) continue;
    (void)folder->Remove(DataFileName(plan_.id, r));
  }
}

// A leader that is not rank 0 commits in its folder, once all files of all
// hosts are there. Returns nullopt unless rank 0 has ended the save meanwhile.
std::optional<absl::Status> SaveCourse::CommitPart() {
  Files files(static_cast<size_t>(plan_.world_size));
  files[static_cast<size_t>(plan_.rank)] = file_;
  std::vector<int> missing = Others();
  Pace pace(plan_.world_size);
  absl::Status mine;
  notes_.ListenAnew();
  while (mine.ok() && !missing.empty()) {
    notes_.TellBusy();
    if (const auto result = HearResult(); result.has_value()) return result;
    mine = TakeFiles("written", &missing, &files);
    if (!missing.empty()) absl::SleepFor(pace.Next());
  }
  if (mine.ok()) mine = CommitBusily(files);
  notes_.ListenAnew();
  (void)notes_.Tell(mine.ok() ? "committed" : "failed",
                    mine.ok() ? file_.SerializeAsString() : StatusToText(mine));
  return std::nullopt;
}

void SaveCourse::EndPart(const absl::Status& result) {
  // If rank 0 is gone and has not said that the save failed, others may have
  // committed; then this is a part of their checkpoint.
  if (undone_) plan_.saving->Abandon();
  plan_.saving.reset();
  if (result.ok()) AfterCommit();
}

// Returns what rank 0 says about the save's end, if it has.
std::optional<absl::Status> SaveCourse::HearResult() {
  const SaveNote note = notes_.Read({0})[0];
  if (note.kind == "ended" || note.kind == "undone") {
    undone_ = note.kind == "undone";
    (void)notes_.Tell("seen", "");
    return StatusFromText(note.text);
  }
  const absl::Status alive = notes_.CheckAlive(0, note);
  if (alive.ok()) return std::nullopt;
  if (plan_.options.node_local) {
    return Annotate(alive, absl::StrCat("checkpoint ", plan_.dir,
                                        ", which may be whole or not"));
  }
  // It may have come as far as the commit.
  const auto folder = Folder::Open(plan_.dir, FileSystem::Real());
  if (folder.ok()) {
    const auto there = ReadManifest(*folder);
    if (there.ok() && there->id() == plan_.id) return absl::OkStatus();
  }
  return Annotate(alive, absl::StrCat("checkpoint ", plan_.dir));
}

// ---- all, on "tessera-disk"

absl::Status SaveCourse::WriteFile() {
  absl::StatusOr<proto::CheckpointFile> written = WriteDataFile(
      {plan_.dir, plan_.id, plan_.rank, plan_.options.max_bandwidth},
      plan_.values, pieces_);
  // Whoever waits for the rest to be written need not wait any longer.
  if (!written.ok()) pieces_->Abandon();
  TESSERA_RETURN_IF_ERROR(written.status());
  file_ = *std::move(written);
  if (!plan_.options.node_local) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const Folder folder,
                           Folder::Open(plan_.dir, FileSystem::Real()));
  // Others commit when they learn that it is there. (With one folder the rank
  // that commits syncs it.)
  TESSERA_RETURN_IF_ERROR(folder.Sync());
  if (plan_.replicas == nullptr) return absl::OkStatus();
  return plan_.replicas->Exchange(folder, plan_.id,
                                  [this] { return pieces_->abandoned(); });
}

}  // namespace tessera
