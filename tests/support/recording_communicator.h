// RecordingCommunicator: looks on at another communicator, and keeps what was
// called in order, with words that a test may put between.
#ifndef TESTS_SUPPORT_RECORDING_COMMUNICATOR_H_
#define TESTS_SUPPORT_RECORDING_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "comm/communicator.h"
#include "comm/note_board.h"

namespace tessera {

class RecordingCommunicator : public Communicator {
 public:
  struct Call {
    // "all-gather", "reduce-scatter", "all-reduce", "broadcast", "exchange", or
    // "" for a word of the test's.
    std::string operation;
    std::string what;   // the tag's
    std::string group;  // "", or the name of the part that it was called of
    int ranks = 1;      // that take part
    int64_t bytes = 0;  // of the whole tensor; not of exchanges

    // By this rank, where each piece goes around from rank to rank.
    int64_t sent_bytes() const {
      return bytes / ranks * (ranks - 1) * (operation == "all-reduce" ? 2 : 1);
    }
  };

  explicit RecordingCommunicator(std::shared_ptr<Communicator> inner)
      : RecordingCommunicator(std::move(inner), "", std::make_shared<Calls>()) {
  }

  // Puts a word of the test's behind what was called so far.
  void Note(std::string word) { Add("", std::move(word)); }
  // What was called since the last time.
  std::vector<Call> Take() {
    absl::MutexLock lock(&calls_->mutex);
    return std::exchange(calls_->list, {});
  }

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  absl::string_view backend() const override { return inner_->backend(); }
  CommFuture AllGather(at::Tensor shard, at::Tensor whole,
                       CommTag tag) override {
    Add("all-gather", tag.what, whole);
    return inner_->AllGather(shard, whole, tag);
  }
  CommFuture ReduceScatterSum(at::Tensor whole, at::Tensor shard, CommTag tag,
                              double divisor) override {
    Add("reduce-scatter", tag.what, whole);
    return inner_->ReduceScatterSum(whole, shard, tag, divisor);
  }
  CommFuture AllReduceSum(at::Tensor tensor, CommTag tag) override {
    Add("all-reduce", tag.what, tensor);
    return inner_->AllReduceSum(tensor, tag);
  }
  CommFuture Broadcast(at::Tensor tensor, int root, CommTag tag) override {
    Add("broadcast", tag.what, tensor);
    return inner_->Broadcast(tensor, root, tag);
  }
  absl::StatusOr<std::vector<std::string>> AllGatherStrings(
      absl::string_view mine, CommTag tag) override {
    Add("exchange", tag.what);
    return inner_->AllGatherStrings(mine, tag);
  }
  // Calls of the parts are kept with those of the whole.
  absl::StatusOr<std::shared_ptr<Communicator>> Split(int color,
                                                      CommTag name) override {
    auto part = inner_->Split(color, name);
    if (!part.ok()) return part;
    return std::shared_ptr<Communicator>(
        new RecordingCommunicator(*std::move(part), name.what, calls_));
  }
  absl::StatusOr<std::unique_ptr<NoteBoard>> ShareNotes(CommTag tag) override {
    Add("notes", tag.what);
    return inner_->ShareNotes(tag);
  }
  void Announce(const absl::Status& status) override {
    inner_->Announce(status);
  }
  bool AllAnnounced(absl::Duration timeout) override {
    return inner_->AllAnnounced(timeout);
  }
  void ClearAnnouncement() override { inner_->ClearAnnouncement(); }

 private:
  struct Calls {
    absl::Mutex mutex;
    std::vector<Call> list ABSL_GUARDED_BY(mutex);
  };

  RecordingCommunicator(std::shared_ptr<Communicator> inner, std::string group,
                        std::shared_ptr<Calls> calls)
      : inner_(std::move(inner)),
        group_(std::move(group)),
        calls_(std::move(calls)) {}
  void Add(std::string operation, std::string what,
           const at::Tensor& whole = {}) {
    const int64_t bytes =
        whole.defined() ? static_cast<int64_t>(whole.nbytes()) : 0;
    absl::MutexLock lock(&calls_->mutex);
    calls_->list.push_back({std::move(operation), std::move(what), group_,
                            inner_->world_size(), bytes});
  }

  const std::shared_ptr<Communicator> inner_;
  const std::string group_;
  const std::shared_ptr<Calls> calls_;
};

}  // namespace tessera
#endif  // TESTS_SUPPORT_RECORDING_COMMUNICATOR_H_
