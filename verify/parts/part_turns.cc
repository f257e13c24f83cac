#include "verify/parts/part_turns.h"

#include <thread>
#include <utility>

#include "ATen/Parallel.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/torch/torch_scope.h"
#include "comm/comm_promise.h"
#include "comm/communicator.h"

namespace tessera {

// What a part's collectives go through.
class PartTurns::Group : public Communicator {
 public:
  Group(PartTurns* turns, int part) : turns_(*turns), part_(part) {}
  int rank() const override { return part_; }
  int world_size() const override { return turns_.parts_; }
  absl::string_view backend() const override { return "turns"; }
  CommFuture Start(CommCall call, CommTag tag) override {
    call.what = tag.what;
    CommPromise done;
    done.End(turns_.Exchange(part_, call));
    return done.future();
  }
  void Announce(const absl::Status& /*status*/) override {}
  bool AllAnnounced(absl::Duration /*timeout*/) override { return true; }
  void ClearAnnouncement() override {}

 private:
  PartTurns& turns_;
  const int part_;
};

PartTurns::PartTurns(int parts, at::Generator generator)
    : parts_(parts), generator_(std::move(generator)) {
  const auto n = static_cast<size_t>(parts);
  ended_.resize(n);
  states_.resize(n);
  calls_.resize(n);
  errors_.resize(n);
  for (int part = 0; part < parts; ++part) {
    groups_.push_back(
        std::make_shared<PartGroup>(std::make_shared<Group>(this, part)));
  }
}

void PartTurns::Run(const std::function<void(int part)>& run) {
  turn_ = 0;
  failed_ = absl::OkStatus();
  const at::Tensor state = generator_.get_state();
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i] = state;
    ended_[i] = false;
    errors_[i] = nullptr;
  }
  std::vector<std::thread> threads;
  for (int part = 1; part < parts_; ++part) {
    threads.emplace_back([this, part, &run] {
      at::set_num_threads(1);  // of this thread
      RunPart(part, run);
    });
  }
  RunPart(0, run);
  for (std::thread& thread : threads) thread.join();
  generator_.set_state(states_[0]);
  for (const std::exception_ptr& error : errors_) {
    if (error != nullptr) std::rethrow_exception(error);
  }
  TORCH_CHECK(failed_.ok(), std::string(failed_.message()));
}

void PartTurns::RunPart(int part, const std::function<void(int part)>& run) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    AwaitTurn(&lock, part);
  }
  try {
    run(part);
  } catch (...) {
    errors_[static_cast<size_t>(part)] = std::current_exception();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_[static_cast<size_t>(part)] = true;
  PassTurn(part);
}

void PartTurns::AwaitTurn(std::unique_lock<std::mutex>* lock, int part) {
  turned_.wait(*lock, [&] { return turn_ == part; });
  generator_.set_state(states_[static_cast<size_t>(part)]);
}

// To the next part that has not ended.
void PartTurns::PassTurn(int part) {
  states_[static_cast<size_t>(part)] = generator_.get_state();
  for (int i = 1; i <= parts_; ++i) {
    const int next = (part + i) % parts_;
    if (ended_[static_cast<size_t>(next)]) continue;
    turn_ = next;
    break;
  }
  turned_.notify_all();
}

absl::Status PartTurns::Exchange(int part, const CommCall& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  calls_[static_cast<size_t>(part)] = &call;
  if (part == parts_ - 1) Combine();
  PassTurn(part);
  AwaitTurn(&lock, part);
  if (calls_[static_cast<size_t>(part)] != nullptr) {
    // The others have ended, or came round without this call being done.
    failed_.Update(absl::FailedPreconditionError(absl::StrCat(
        "part ", part, " waits for ", call.what, ", which others do not do")));
    calls_[static_cast<size_t>(part)] = nullptr;
  }
  return failed_;
}

void PartTurns::SumUp() {
  at::Tensor sum;
  for (const CommCall* const call : calls_) {
    const at::Tensor& t = call->out;
    const bool narrow = at::isReducedFloatingType(t.scalar_type());
    const at::Tensor term = narrow ? t.to(at::kFloat) : t;
    sum = sum.defined() ? sum + term : term.clone();
  }
  for (const CommCall* const call : calls_) call->out.copy_(sum);
}

// To each part what each has for it.
void PartTurns::HandOut() {
  const bool all = calls_[0]->op == CollectiveOp::kAllGather;
  for (int to = 0; to < parts_; ++to) {
    const at::Tensor& out = calls_[static_cast<size_t>(to)]->out;
    const int64_t numel = out.numel() / parts_;
    for (int from = 0; from < parts_; ++from) {
      const at::Tensor& in = calls_[static_cast<size_t>(from)]->in;
      out.narrow(0, from * numel, numel)
          .copy_(in.narrow(0, all ? 0 : to * numel, numel));
    }
  }
}

// Carries out the call of all parts.
void PartTurns::Combine() {
  const TorchScope scope;
  for (const CommCall* const call : calls_) {
    if (call != nullptr && calls_[0] != nullptr && call->op == calls_[0]->op) {
      continue;
    }
    failed_.Update(absl::FailedPreconditionError(
        "the parts of a model are in different collectives"));
  }
  if (!failed_.ok()) return;
  switch (calls_[0]->op) {
    case CollectiveOp::kAllReduce:
      SumUp();
      break;
    case CollectiveOp::kAllGather:
    case CollectiveOp::kAllToAll:
      HandOut();
      break;
    default:
      TESSERA_CHECK(false);
  }
  for (const CommCall*& call : calls_) call = nullptr;
}

}  // namespace tessera
