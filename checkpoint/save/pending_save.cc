#include "checkpoint/save/pending_save.h"

#include <filesystem>
#include <optional>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/thread/start_thread.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/local_folders.h"
#include "checkpoint/save/save_course.h"
#include "checkpoint/together.h"
#include "comm/all_gather_values.h"

namespace tessera {

class PendingSave::Impl {
 public:
  Impl(const std::string& dir, CheckpointContent content, Communicator* comm,
       SaveLinks* links, PendingSaveOptions options)
      : links_(links), pieces_(std::move(content.pieces)) {
    plan_.dir = dir;
    plan_.rank = comm->rank();
    plan_.world_size = comm->world_size();
    plan_.options = std::move(options);
    plan_.head = std::move(content.head);
    plan_.values = std::move(content.values);
  }

  ~Impl() {
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Begin(Communicator* comm) {
    TESSERA_RETURN_IF_ERROR(comm->AgreeEqual(
        absl::StrCat(plan_.dir, plan_.options.async ? ", async" : "",
                     plan_.options.node_local ? ", each host's own" : ""),
        "checkpoint's folder"));
    if (plan_.dir.empty()) {
      return absl::InvalidArgumentError(
          "SaveCheckpoint: the folder's name is empty");
    }
    // The path is made absolute, since the program may change its folder while
    // the save runs. (If the current folder is gone, creating the other one
    // reports that.)
    std::error_code error;
    const auto whole = std::filesystem::absolute(plan_.dir, error);
    if (!error) plan_.dir = whole.string();
    if (plan_.options.node_local) TESSERA_RETURN_IF_ERROR(FindHosts(comm));
    TESSERA_RETURN_IF_ERROR(
        RunTogether(comm, "checkpoint folder", [&] { return Lock(); }));
    TESSERA_RETURN_IF_ERROR(ShareId(comm));
    if (plan_.options.async) {
      TESSERA_RETURN_IF_ERROR(
          comm->AgreeOk(pieces_.Keep(), "copy of what a checkpoint holds"));
    }
    if (plan_.options.node_local) {
      TESSERA_RETURN_IF_ERROR(RunTogether(comm, "checkpoint folder", [&] {
        return plan_.saving == nullptr ? absl::OkStatus()
                                       : plan_.saving->ClearPart();
      }));
    }
    course_.emplace(std::move(plan_), &pieces_, links_->notes.get());
    const auto run = [this] {
      const TraceScope trace(TraceTrack::kCheckpoint, "write checkpoint");
      status_ = CatchTorch("checkpoint", [this] { return course_->Run(); });
      course_.reset();  // with the folder's lock
      pieces_.Abandon();
      done_.Notify();
    };
    auto thread = StartThread("tessera-save", run);
    if (thread.ok()) {
      thread_ = *std::move(thread);
    } else {
      run();  // without a thread, SaveCourse gives up at once and notifies the
              // others
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
  absl::Status FindHosts(Communicator* comm) {
    absl::StatusOr<Folder> folder = absl::UnknownError("not opened");
    TESSERA_RETURN_IF_ERROR(RunTogether(comm, "checkpoint folder", [&] {
      folder = Folder::Make(plan_.dir, FileSystem::Real());
      return folder.status();
    }));
    TESSERA_ASSIGN_OR_RETURN(plan_.leaders, FindLeaders(*folder, comm));
    const std::vector<int> keepers = KeepersOf(plan_.leaders);
    if (!plan_.options.replicas || keepers.empty()) return absl::OkStatus();
    std::unique_ptr<ReplicaLinks>& replicas = links_->replicas;
    if (replicas == nullptr || replicas->keepers() != keepers) {
      replicas.reset();
      TESSERA_ASSIGN_OR_RETURN(replicas, ReplicaLinks::Connect(keepers, comm));
    }
    plan_.replicas = replicas.get();
    return absl::OkStatus();
  }

  absl::Status Lock() {
    const int leader = plan_.leaders.empty()
                           ? 0
                           : plan_.leaders[static_cast<size_t>(plan_.rank)];
    if (leader != plan_.rank) return absl::OkStatus();
    TESSERA_ASSIGN_OR_RETURN(
        Saving saving, plan_.options.node_local
                           ? Saving::BeginPart(plan_.dir, plan_.options.replace,
                                               FileSystem::Real())
                           : Saving::Begin(plan_.dir, FileSystem::Real()));
    plan_.saving = std::make_unique<Saving>(std::move(saving));
    return absl::OkStatus();
  }

  // Returns the ranks whose data files come into the folder that this rank
  // leads.
  std::vector<int> RanksOfFolder() const {
    std::vector<int> ranks = RanksOfLeader(plan_.leaders, plan_.rank);
    if (plan_.replicas == nullptr) return ranks;
    const std::vector<int>& keepers = plan_.replicas->keepers();
    for (size_t r = 0; r < keepers.size(); ++r) {
      const size_t keeper = static_cast<size_t>(keepers[r]);
      if (plan_.leaders[keeper] == plan_.rank) {
        ranks.push_back(static_cast<int>(r));
      }
    }
    return ranks;
  }

  // Shares rank 0's id of the save, and its time.
  absl::Status ShareId(Communicator* comm) {
    struct IdAndTime {
      uint64_t id;
      int64_t micros;
    };
    const IdAndTime own = {plan_.saving == nullptr ? 0 : plan_.saving->id(),
                           plan_.options.saved_unix_micros != 0
                               ? plan_.options.saved_unix_micros
                               : absl::ToUnixMicros(absl::Now())};
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<IdAndTime> all,
        AllGatherValue(comm, own, CommTag{"checkpoint id"}));
    plan_.id = all[0].id;
    plan_.begun_micros = all[0].micros;
    if (plan_.options.node_local && plan_.saving != nullptr) {
      plan_.saving->TakePart(plan_.id, RanksOfFolder());
    }
    return absl::OkStatus();
  }

  SaveLinks* const links_;
  SavePlan plan_;  // until `course_` takes it
  SavedPieces pieces_;
  std::optional<SaveCourse> course_;  // of "tessera-save"
  absl::Status status_;
  absl::Notification done_;
  std::thread thread_;
};

PendingSave::PendingSave(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PendingSave::~PendingSave() = default;

absl::StatusOr<std::unique_ptr<PendingSave>> PendingSave::Begin(
    const std::string& dir, CheckpointContent content, Communicator* comm,
    SaveLinks* links, PendingSaveOptions options) {
  AwaitDevices(content.pieces);
  auto impl =
      std::make_unique<Impl>(dir, std::move(content), comm, links, options);
  TESSERA_RETURN_IF_ERROR(impl->Begin(comm));
  return std::unique_ptr<PendingSave>(new PendingSave(std::move(impl)));
}

void PendingSave::Detach() { impl_->Detach(); }
bool PendingSave::done() const { return impl_->done(); }
absl::Status PendingSave::Wait() { return impl_->Wait(); }

}  // namespace tessera
