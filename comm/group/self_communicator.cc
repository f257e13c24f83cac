#include "comm/group/self_communicator.h"

#include <cstring>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "base/torch/divide.h"
#include "base/torch/tensor_over.h"
#include "comm/capabilities.h"
#include "comm/comm_call.h"
#include "comm/group/group_communicator.h"
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

// The notes of a single rank, which are sent to nobody.
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

class SelfTransport : public Transport {
 public:
  absl::string_view name() const override { return "self"; }
  Capabilities capabilities() const override {
    Capabilities can;
    can.device = true;
    can.waits = false;
    return can;
  }
  absl::Status Run(const CommCall& call) override {
    if (call.texts != nullptr) *call.texts = {call.text};
    if (!call.in.defined() || !call.writes_out()) return absl::OkStatus();
    TESSERA_RETURN_IF_ERROR(Copy(call.in, call.out));
    if (call.op == CollectiveOp::kReduceScatter) {
      DivideBy(call.out, call.divisor);
    }
    return absl::OkStatus();
  }
};

class SelfCommunicator final : public GroupCommunicator {
 public:
  explicit SelfCommunicator(const GroupOptions& options)
      : GroupCommunicator(OfOne(options), {}, options.domain,
                          std::make_shared<SelfTransport>()) {}
  absl::StatusOr<std::shared_ptr<Communicator>> Split(int, CommTag) override {
    return MakeSelfCommunicator(options());
  }
  absl::StatusOr<std::unique_ptr<NoteBoard>> ShareNotes(CommTag) override {
    return std::make_unique<OwnNotes>();
  }
  bool AllAnnounced(absl::Duration) override { return true; }

 private:
  static GroupOptions OfOne(GroupOptions options) {
    options.rank = 0;
    options.world_size = 1;
    return options;
  }
};

}  // namespace

std::shared_ptr<Communicator> MakeSelfCommunicator(
    const GroupOptions& options) {
  return std::make_shared<SelfCommunicator>(options);
}

}  // namespace tessera
