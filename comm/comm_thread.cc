#include "comm/comm_thread.h"

#include <sched.h>

#include <utility>

#include "base/check.h"
#include "base/sigpipe.h"
#include "base/status.h"
#include "base/thread/start_thread.h"
#include "base/torch_guard.h"
#include "c10/core/GradMode.h"
#include "c10/core/StreamGuard.h"

namespace tessera {
namespace {

thread_local bool on_comm_thread = false;

void MoveTo(int cpu) {
  if (cpu < 0 || cpu == sched_getcpu()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof(set), &set);  // if it fails: slower, no more
}

}  // namespace

void EndFuture(CommFuture::State& state, CommThread::End end) {
  absl::MutexLock lock(&state.mutex);
  state.status = std::move(end.status);
  state.result = std::move(end.result);
  state.held = std::move(end.held);
  state.caller = end.caller;
  state.done = true;
}

CommFuture::State::~State() {
  absl::MutexLock lock(&mutex);
  if (held == nullptr) return;
  // A device that has failed says so elsewhere.
  (void)CatchTorch("communication", [result = result, stream = caller] {
    const c10::OptionalStreamGuard guard(stream);
    result.Order();
  });
}

// What blocks a thread of the program is counted (base/trace/exposed.h).
absl::Status CommFuture::Wait() const {
  if (state_ == nullptr) return absl::OkStatus();
  absl::MutexLock lock(&state_->mutex);
  // The communication thread would wait for itself.
  TESSERA_CHECK(state_->done || state_->ends_elsewhere ||
                !CommThread::IsCurrent())
      << "Wait() for a pending collective on the communication thread";
  if (!state_->done) {
    const int64_t begin = WaitsAreExposed() ? TraceNow() : 0;
    state_->mutex.Await(absl::Condition(&state_->done));
    if (begin != 0) {
      NoteExposedWait(state_->purpose.reason, state_->purpose.what, begin,
                      TraceNow());
    }
  }
  // A device that has failed says so here.
  const absl::Status ordered = CatchTorch(
      "communication", [result = state_->result] { result.Order(); });
  state_->held = nullptr;
  return state_->status.ok() ? ordered : state_->status;
}

bool CommFuture::Done() const {
  if (state_ == nullptr) return true;
  absl::MutexLock lock(&state_->mutex);
  return state_->done;
}

CommFuture DoneFuture(CommThread::End end) {
  auto state = std::make_shared<CommFuture::State>();
  EndFuture(*state, std::move(end));
  return CommFuture(std::move(state));
}

CommThread& CommThread::Get() {
  static CommThread* const thread = new CommThread;
  return *thread;
}

CommThread& CommThread::OfDevices() {
  static CommThread* const thread = new CommThread("tessera-device");
  return *thread;
}

bool CommThread::IsCurrent() { return on_comm_thread; }

absl::Status CommThread::Start() {
  absl::MutexLock lock(&mutex_);
  return StartLocked();
}

absl::Status CommThread::StartLocked() {
  // While a Stop is under way the thread still drains the queue; only its own
  // work may add to that.
  auto running = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !stopping_;
  };
  if (!IsCurrent()) mutex_.Await(absl::Condition(&running));
  if (thread_.joinable() || stopping_) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(thread_,
                           StartThread(name_.c_str(), [this] { Run(); }));
  return absl::OkStatus();
}

CommFuture CommThread::Post(Work work, CommPurpose purpose) {
  auto state = std::make_shared<CommFuture::State>();
  state->purpose = std::move(purpose);
  absl::MutexLock lock(&mutex_);
  const absl::Status started = StartLocked();
  if (!started.ok()) return DoneFuture(started);
  queue_.push_back({std::move(work), state, follows_ ? sched_getcpu() : -1});
  return CommFuture(std::move(state));
}

void CommThread::Stop() {
  TESSERA_CHECK(!IsCurrent()) << "Stop() on the communication thread";
  std::thread thread;
  {
    absl::MutexLock lock(&mutex_);
    if (!thread_.joinable()) return;
    stopping_ = true;
    thread = std::move(thread_);
  }
  thread.join();
  absl::MutexLock lock(&mutex_);
  stopping_ = false;
}

void CommThread::Run() {
  on_comm_thread = true;
  const SigpipeBlock no_sigpipe;
  c10::AutoGradMode no_grad(false);
  Item item;
  while (Next(&item)) {
    MoveTo(item.cpu);
    End end;
    const absl::Status thrown =
        CatchTorch("communication", [&] { end = item.work(); });
    if (!thrown.ok()) end = thrown;
    item.work = nullptr;  // frees the tensors before anybody is told
    EndFuture(*item.state, std::move(end));
    item.state = nullptr;
  }
}

bool CommThread::Next(Item* item) {
  absl::MutexLock lock(&mutex_);
  auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !queue_.empty();
  };
  mutex_.Await(absl::Condition(&ready));
  if (queue_.empty()) return false;
  *item = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

}  // namespace tessera
