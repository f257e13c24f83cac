#include "comm/shm/team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "base/env.h"
#include "base/log.h"
#include "base/monotonic.h"

namespace tessera::shm {
namespace {

// Spins before a rank sleeps, where each has a core: about 20 us. Where cores
// are fewer than ranks a spinning rank would keep the awaited one from running.
constexpr int kSpins = 2000;
constexpr int kSpinsOnBusyCores = 20;
// A sleeper looks again this often even if nobody rings.
constexpr absl::Duration kLook = absl::Milliseconds(100);

int CoresOfThisProcess() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return CPU_COUNT(&set);
}

int SpinsOf(int ranks) {
  const auto spin = EnvBool("TESSERA_SPIN");
  if (!spin.ok()) TESSERA_LOG(WARNING) << spin.status().message();
  const bool each_has_a_core = ranks <= CoresOfThisProcess();
  return spin.value_or(std::nullopt).value_or(each_has_a_core)
             ? kSpins
             : kSpinsOnBusyCores;
}

// Says to the processor that this is a loop of waiting.
void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace

void Door::Ring() {
  bell.fetch_add(1);
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Door::Sleep(uint32_t seen, absl::Duration at_most) {
  const timespec time = absl::ToTimespec(at_most);
  const bool forever = at_most == absl::InfiniteDuration();
  syscall(SYS_futex, &bell, FUTEX_WAIT, seen, forever ? nullptr : &time,
          nullptr, 0);
}

Team::Team(int rank, std::vector<Member> members, int64_t heap_bytes)
    : rank_(rank),
      members_(std::move(members)),
      heap_bytes_(heap_bytes),
      spins_(SpinsOf(size())),
      waits_(members_.size()) {}

int64_t Team::OffsetInHeap(const void* place, int64_t bytes) const {
  const int64_t offset = reinterpret_cast<intptr_t>(place) -
                         reinterpret_cast<intptr_t>(heap_of(rank_));
  return offset >= 0 && offset + bytes <= heap_bytes_ ? offset : -1;
}

void Team::SetOnSleep(std::function<void(int peer)> on_sleep) {
  on_sleep_ = std::move(on_sleep);
}

void Team::SetGone(std::function<absl::Status(int peer)> gone) {
  gone_ = std::move(gone);
}

void Team::TakeWaits(
    const std::function<void(int peer, absl::Duration)>& note) {
  for (int peer = 0; peer < size(); ++peer) {
    const absl::Duration waited =
        std::exchange(waits_[peer], absl::ZeroDuration());
    if (waited > absl::ZeroDuration()) note(peer, waited);
  }
}

void Team::Publish(Control::Counter* counter, uint64_t value) {
  counter->value.store(value, std::memory_order_seq_cst);
  for (int r = 0; r < size(); ++r) {
    if (r != rank_) of(r).door.RingIfSleeping();
  }
}

// A waiting rank first says that it sleeps, then looks once more, then sleeps
// until its bell differs from what it was before the look. In any other order a
// ring could come between look and sleep, and be lost. It looks again every
// kLook all the same, since a rank that has ended rings for nobody; and a rank
// that is gone may have published just before it went, so `value` is looked at
// once more before the wait fails.
absl::Status Team::WaitFor(int peer, Control::Counter Control::*counter,
                           uint64_t value) {
  const std::atomic<uint64_t>& word = (of(peer).*counter).value;
  for (int i = 0; i < spins_; ++i) {
    if (word.load(std::memory_order_acquire) >= value) return absl::OkStatus();
    Pause();
  }
  on_sleep_(peer);
  Door& door = mine().door;
  absl::Status status;
  const absl::Duration begin = MonotonicNow();
  absl::Duration ask_at = begin + kLook;
  door.sleeping.store(1, std::memory_order_seq_cst);
  while (true) {
    const uint32_t seen = door.bell.load(std::memory_order_seq_cst);
    if (word.load(std::memory_order_seq_cst) >= value) break;
    status = aborted();
    if (status.ok() && gone_ && MonotonicNow() >= ask_at) {
      status = gone_(peer);
      ask_at = MonotonicNow() + kLook;
      // It may have gone right after.
      if (!status.ok() && word.load(std::memory_order_seq_cst) >= value) {
        status = absl::OkStatus();
      }
    }
    if (!status.ok()) break;
    door.Sleep(seen, kLook);
  }
  door.sleeping.store(0, std::memory_order_seq_cst);
  waits_[peer] += MonotonicNow() - begin;
  return status;
}

absl::Status Team::aborted() {
  if (!trouble_.load()) return absl::OkStatus();
  SharedMutexLock lock(&mutex_);
  return aborted_;
}

void Team::Abort(const absl::Status& why) {
  {
    SharedMutexLock lock(&mutex_);
    if (aborted_.ok()) aborted_ = why;
  }
  trouble_ = true;
  mine().door.Ring();
}

}  // namespace tessera::shm
