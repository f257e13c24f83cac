#include "comm/group/self_communicator.h"

#include <cstring>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "base/torch/divide.h"
#include "base/torch/tensor_over.h"
#include "comm/group/queued_communicator.h"
#include "comm/note_board.h"
#include "comm/watch/failure_domain.h"

namespace tessera {
namespace {

// Copies unless both are the same memory already.
absl::Status Copy(const at::Tensor& from, const at::Tensor& to) {
  if (from.const_data_ptr() == to.const_data_ptr()) return absl::OkStatus();
  constexpr size_t kParallelFromBytes = 1 << 20;
  if (to.is_cpu() && to.nbytes() < kParallelFromBytes) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
    return absl::OkStatus();
  }
  ElementsOver(to, 0, to.numel()).copy_(ElementsOver(from, 0, from.numel()));
  return absl::OkStatus();
}

// Of one rank, which has nobody to tell.
class OwnNotes : public NoteBoard {
 public:
  bool Write(const std::string& text) override {
    absl::MutexLock lock(&mutex_);
    text_ = text;
    return true;
  }
  std::optional<std::vector<std::string>> Read(
      const std::vector<int>& ranks) override {
    absl::MutexLock lock(&mutex_);
    return std::vector<std::string>(ranks.size(), text_);
  }
  absl::Status EndOf(int) const override { return absl::OkStatus(); }
  absl::Duration patience() const override { return absl::InfiniteDuration(); }

 private:
  absl::Mutex mutex_;
  std::string text_ ABSL_GUARDED_BY(mutex_);
};

class SelfCommunicator : public QueuedCommunicator {
 public:
  explicit SelfCommunicator(const GroupOptions& options)
      : QueuedCommunicator(MembershipOf(options)), options_(options) {}
  absl::string_view backend() const override { return "self"; }
  absl::StatusOr<std::shared_ptr<Communicator>> Split(int, CommTag) override {
    return MakeSelfCommunicator(options_);
  }
  absl::StatusOr<std::unique_ptr<NoteBoard>> ShareNotes(CommTag) override {
    return std::make_unique<OwnNotes>();
  }
  void Announce(const absl::Status& status) override {
    if (options_.domain != nullptr) options_.domain->Announce(status);
  }
  bool AllAnnounced(absl::Duration) override { return true; }
  void ClearAnnouncement() override {
    if (options_.domain != nullptr) options_.domain->announcements().Retract();
  }

 protected:
  absl::Status DoAllGather(const Call&, const at::Tensor& shard,
                           const at::Tensor& whole) override {
    return Copy(shard, whole);
  }
  absl::Status DoReduceScatter(const Call&, const at::Tensor& whole,
                               const at::Tensor& shard,
                               double divisor) override {
    TESSERA_RETURN_IF_ERROR(Copy(whole, shard));
    DivideBy(shard, divisor);
    return absl::OkStatus();
  }
  absl::Status DoAllReduceSum(const Call&, const at::Tensor&) override {
    return absl::OkStatus();
  }
  absl::Status DoBroadcast(const Call&, const at::Tensor&, int) override {
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<std::string>> DoAllGatherStrings(
      const Call&, const std::string& mine) override {
    return std::vector<std::string>{mine};
  }

  void TellFailure(const absl::Status& status) override {
    if (options_.domain != nullptr) options_.domain->Announce(status, true);
  }

 private:
  static Membership MembershipOf(const GroupOptions& options) {
    Membership membership;
    membership.group = options.name;
    membership.in_call = options.domain == nullptr;
    if (!membership.in_call) membership.failure = options.domain->failure();
    return membership;
  }
  const GroupOptions options_;
};

}  // namespace

std::shared_ptr<Communicator> MakeSelfCommunicator(
    const GroupOptions& options) {
  return std::make_shared<SelfCommunicator>(options);
}

}  // namespace tessera
