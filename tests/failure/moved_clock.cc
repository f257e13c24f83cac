// These functions take the place of libc's for the whole program.
//
// Why waits in slices: a wait for a moment of the host's clock ends when the
// clock is set beyond that moment, and goes on when it is set back. What a
// slice ends with is looked at by the clock as it then is. Waits for a time, or
// by the monotonic clock, are left as they are.
#include "tests/failure/moved_clock.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "absl/time/clock.h"

namespace tessera {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kSlice = kSecond / 100;
// Moments before it are not of the host's clock: a condition variable may have
// been made for the monotonic one.
constexpr int64_t kAnyTimeOfOurs = 1'000'000'000 * kSecond;

std::atomic<const std::atomic<int64_t>*> g_followed{nullptr};

std::atomic<int64_t>* MapAt(const std::string& path, int flags) {
  const int fd = open(path.c_str(), flags | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(int64_t)) != 0) abort();
  void* const at =
      mmap(nullptr, sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) abort();
  return static_cast<std::atomic<int64_t>*>(at);
}

int64_t Nanos(const timespec& t) { return t.tv_sec * kSecond + t.tv_nsec; }
timespec AsTimespec(int64_t nanos) {
  return {nanos / kSecond, nanos % kSecond};
}

long SystemCall(long number, long a, long b, long c = 0, long d = 0, long e = 0,
                long f = 0) {
  register long r10 asm("r10") = d;
  register long r8 asm("r8") = e;
  register long r9 asm("r9") = f;
  long result;
  asm volatile("syscall"
               : "=a"(result)
               : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
               : "rcx", "r11", "memory");
  return result;
}

int64_t RealNow(clockid_t clock) {
  timespec now;
  SystemCall(SYS_clock_gettime, clock, reinterpret_cast<long>(&now));
  return Nanos(now);
}

bool Follows() { return g_followed.load(std::memory_order_acquire) != nullptr; }
int64_t Ahead() {
  const auto* const followed = g_followed.load(std::memory_order_acquire);
  return followed == nullptr ? 0 : followed->load();
}
int64_t Now(clockid_t clock = CLOCK_REALTIME) {
  return RealNow(clock) + Ahead();
}

// The end of the next slice of a wait that ends at `deadline`, by the host's
// clock as it is.
timespec SliceEnd(const timespec& deadline) {
  return AsTimespec(std::clamp(Nanos(deadline) - Ahead(), int64_t{0},
                               RealNow(CLOCK_REALTIME) + kSlice));
}

template <class Function>
Function* Real(const char* name, const char* version) {
  return reinterpret_cast<Function*>(dlvsym(RTLD_NEXT, name, version));
}

}  // namespace

MovedClock::MovedClock(const std::string& path)
    : ahead_(MapAt(path, O_RDWR | O_CREAT | O_EXCL)) {}

MovedClock::~MovedClock() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  munmap(ahead_, sizeof(int64_t));
}

void MovedClock::Move(absl::Duration by) {
  *ahead_ += absl::ToInt64Nanoseconds(by);
}

void MovedClock::KeepMoving(int seed) {
  thread_ = std::thread([this, seed] { Run(seed); });
}

void MovedClock::Run(int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  while (!stop_) {
    const absl::Duration by = absl::Hours(random() % 2 == 0 ? 1 : 24);
    Move(random() % 2 == 0 ? by : -by);
    const auto naps = random() % 4 == 0 ? 1000 : random() % 50;
    for (size_t i = 0; i < naps && !stop_; ++i) {
      absl::SleepFor(absl::Milliseconds(3));
    }
  }
}

void FollowMovedClock(const std::string& path) {
  g_followed.store(path.empty() ? nullptr : MapAt(path, O_RDWR),
                   std::memory_order_release);
}

}  // namespace tessera

extern "C" {

using tessera::AsTimespec;
using tessera::Follows;
using tessera::Nanos;
using tessera::Now;
using tessera::SystemCall;

int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const bool moved = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (moved && Follows()) {
    *now = AsTimespec(Now(clock));
    return 0;
  }
  const long result =
      SystemCall(SYS_clock_gettime, clock, reinterpret_cast<long>(now));
  if (result == 0) return 0;
  errno = static_cast<int>(-result);
  return -1;
}
int gettimeofday(timeval* __restrict now, void* __restrict) noexcept {
  const timespec t = AsTimespec(Now());
  *now = {t.tv_sec, t.tv_nsec / 1000};
  return 0;
}
time_t time(time_t* now) noexcept {
  const time_t seconds = AsTimespec(Now()).tv_sec;
  if (now != nullptr) *now = seconds;
  return seconds;
}

// Libraries wait for futexes by it. It reads six arguments, however many there
// are.
__attribute__((no_sanitize("address"))) long syscall(long number,
                                                     ...) noexcept {
  va_list arguments;
  va_start(arguments, number);
  long a[6];
  for (long& argument : a) argument = va_arg(arguments, long);
  va_end(arguments);
  const auto* const deadline = reinterpret_cast<const timespec*>(a[3]);
  const bool until = number == SYS_futex &&
                     (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET &&
                     (a[1] & FUTEX_CLOCK_REALTIME) != 0 && deadline != nullptr;
  long result = 0;
  do {
    timespec slice;
    if (until && Follows()) {
      slice = tessera::SliceEnd(*deadline);
      a[3] = reinterpret_cast<long>(&slice);
    }
    result = SystemCall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  } while (until && result == -ETIMEDOUT && Now() < Nanos(*deadline));
  if (result >= 0 || result < -4095) return result;
  errno = static_cast<int>(-result);
  return -1;
}

int pthread_cond_timedwait(pthread_cond_t* __restrict condition,
                           pthread_mutex_t* __restrict mutex,
                           const timespec* __restrict deadline) {
  static auto* const real = tessera::Real<decltype(pthread_cond_timedwait)>(
      "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!Follows() || Nanos(*deadline) < tessera::kAnyTimeOfOurs) {
    return real(condition, mutex, deadline);
  }
  const timespec slice = tessera::SliceEnd(*deadline);
  const int error = real(condition, mutex, &slice);
  // Waking for nothing is allowed; a signal may have come meanwhile.
  return error == ETIMEDOUT && Now() < Nanos(*deadline) ? 0 : error;
}
int pthread_cond_clockwait(pthread_cond_t* __restrict condition,
                           pthread_mutex_t* __restrict mutex, clockid_t clock,
                           const timespec* __restrict deadline) {
  static auto* const real = tessera::Real<decltype(pthread_cond_clockwait)>(
      "pthread_cond_clockwait", "GLIBC_2.34");
  if (!Follows() || clock != CLOCK_REALTIME) {
    return real(condition, mutex, clock, deadline);
  }
  const timespec slice = tessera::SliceEnd(*deadline);
  const int error = real(condition, mutex, clock, &slice);
  return error == ETIMEDOUT && Now() < Nanos(*deadline) ? 0 : error;
}
int sem_timedwait(sem_t* __restrict semaphore,
                  const timespec* __restrict deadline) {
  static auto* const real =
      tessera::Real<decltype(sem_timedwait)>("sem_timedwait", "GLIBC_2.34");
  if (!Follows()) return real(semaphore, deadline);
  int result = 0;
  do {
    const timespec slice = tessera::SliceEnd(*deadline);
    result = real(semaphore, &slice);
  } while (result != 0 && errno == ETIMEDOUT && Now() < Nanos(*deadline));
  return result;
}

}  // extern "C"
