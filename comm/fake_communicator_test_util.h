// FakeCommunicator: a communicator for tests. It records calls in order, with
// notes that a test may put between them, and lets the test look at each call
// before it proceeds, or end it.
//
// It is one rank of W without the others, which send zeros and this rank's own
// texts; or it wraps another communicator.
#ifndef COMM_FAKE_COMMUNICATOR_TEST_UTIL_H_
#define COMM_FAKE_COMMUNICATOR_TEST_UTIL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "comm/capabilities.h"
#include "comm/comm_call.h"
#include "comm/comm_thread.h"
#include "comm/communicator.h"
#include "comm/note_board.h"

namespace tessera {

class FakeCommunicator : public Communicator {
 public:
  struct Call {
    // "all-gather", "reduce-scatter", ..., "exchange" of texts, "notes", or ""
    // for a word of the test's.
    std::string operation;
    std::string what;   // the tag's
    std::string group;  // "", or the name of the part that it was called of
    int ranks = 1;      // that take part
    int64_t bytes = 0;  // of the whole tensor; not of exchanges

    // Returns the bytes that this rank sends in a ring algorithm.
    int64_t sent_bytes() const {
      return bytes / ranks * (ranks - 1) * (operation == "all-reduce" ? 2 : 1);
    }
  };

  explicit FakeCommunicator(int rank = 0, int world_size = 1)
      : rank_(rank), world_size_(world_size) {}
  explicit FakeCommunicator(std::shared_ptr<Communicator> inner)
      : FakeCommunicator(std::move(inner), "", std::make_shared<Calls>()) {}

  // Called before each collective, on its caller's thread; an error ends it.
  std::function<absl::Status(const CommCall& call)> before;
  // Makes the texts of all ranks from this one's, where there is no other
  // communicator.
  std::function<std::vector<std::string>(const std::string& mine)> texts;
  // The announcements, as Status::ToString.
  std::vector<std::string> announced;

  // Adds a note of the test after the calls so far.
  void Note(std::string word) { Add("", std::move(word)); }
  // Returns the calls since the last time.
  std::vector<Call> Take() {
    absl::MutexLock lock(&calls_->mutex);
    return std::exchange(calls_->list, {});
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  absl::string_view backend() const override {
    return inner_ == nullptr ? "fake" : inner_->backend();
  }
  Capabilities capabilities() const override {
    return inner_ == nullptr ? Capabilities() : inner_->capabilities();
  }
  CommFuture Start(CommCall call, CommTag tag) override {
    const bool text = call.op == CollectiveOp::kText;
    Add(text ? "exchange" : std::string(CollectiveName(call.op)), tag.what,
        text ? 0 : static_cast<int64_t>(call.whole().nbytes()));
    if (before) {
      const absl::Status status = before(call);
      if (!status.ok()) return DoneFuture(status);
    }
    if (inner_ != nullptr) return inner_->Start(std::move(call), tag);
    RunAlone(call);
    return CommFuture();
  }
  // Calls of the parts are kept with those of the whole.
  absl::StatusOr<std::shared_ptr<Communicator>> Split(int color,
                                                      CommTag name) override {
    if (inner_ == nullptr) return Communicator::Split(color, name);
    auto part = inner_->Split(color, name);
    if (!part.ok()) return part;
    return std::shared_ptr<Communicator>(
        new FakeCommunicator(*std::move(part), name.what, calls_));
  }
  absl::StatusOr<std::unique_ptr<NoteBoard>> ShareNotes(CommTag tag) override {
    Add("notes", tag.what);
    if (inner_ == nullptr) return Communicator::ShareNotes(tag);
    return inner_->ShareNotes(tag);
  }
  void Announce(const absl::Status& status) override {
    {
      absl::MutexLock lock(&calls_->mutex);
      announced.push_back(status.ToString());
    }
    if (inner_ != nullptr) inner_->Announce(status);
  }
  bool AllAnnounced(absl::Duration timeout) override {
    return inner_ == nullptr || inner_->AllAnnounced(timeout);
  }
  void ClearAnnouncement() override {
    if (inner_ != nullptr) inner_->ClearAnnouncement();
  }

 private:
  struct Calls {
    absl::Mutex mutex;
    std::vector<Call> list ABSL_GUARDED_BY(mutex);
  };

  FakeCommunicator(std::shared_ptr<Communicator> inner, std::string group,
                   std::shared_ptr<Calls> calls)
      : rank_(inner->rank()),
        world_size_(inner->world_size()),
        inner_(std::move(inner)),
        group_(std::move(group)),
        calls_(std::move(calls)) {}

  void Add(std::string operation, std::string what, int64_t bytes = 0) {
    absl::MutexLock lock(&calls_->mutex);
    calls_->list.push_back(
        {std::move(operation), std::move(what), group_, world_size_, bytes});
  }
  void RunAlone(const CommCall& call) const {
    const at::Tensor& out = call.out;
    if (call.op == CollectiveOp::kText) {
      *call.texts = texts ? texts(call.text)
                          : std::vector<std::string>(
                                static_cast<size_t>(world_size_), call.text);
    } else if (call.op == CollectiveOp::kAllGather) {
      const int64_t numel = out.numel() / world_size_;
      out.narrow(0, rank_ * numel, numel).copy_(call.in);
    } else if (call.op == CollectiveOp::kReduceScatter) {
      const int64_t numel = call.in.numel() / world_size_;
      out.copy_(call.in.narrow(0, rank_ * numel, numel)).div_(call.divisor);
    }
  }

  const int rank_, world_size_;
  const std::shared_ptr<Communicator> inner_;
  const std::string group_;
  const std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();
};

}  // namespace tessera
#endif  // COMM_FAKE_COMMUNICATOR_TEST_UTIL_H_
