// The host's clock, set to another time for the processes of a test: what they
// read of it, and waits until a moment of it, as the kernel has them when the
// clock is set. Only in programs that this is linked into.
//
//   MovedClock clock(path);              // in the test
//   FollowMovedClock(path);              // in a rank
//   clock.Move(-absl::Hours(24));        // the rank's waits have a day to go
#ifndef TESTS_FAILURE_MOVED_CLOCK_H_
#define TESTS_FAILURE_MOVED_CLOCK_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

#include "absl/time/time.h"

namespace tessera {

// Threads: any.
class MovedClock {
 public:
  // Makes the file `path`, which those that follow have to find.
  explicit MovedClock(const std::string& path);
  ~MovedClock();
  MovedClock(const MovedClock&) = delete;
  MovedClock& operator=(const MovedClock&) = delete;

  // Sets it to a time that is `by` later than now, for who follows.
  void Move(absl::Duration by);
  // From now on moves it by an hour or a day, forth or back, at instants that
  // `seed` chooses: some milliseconds apart or some seconds.
  void KeepMoving(int seed);

 private:
  void Run(int seed);

  std::atomic<int64_t>* const ahead_;  // of the host's, in nanoseconds
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// From now on this process's clock is the one of the file `path`; the host's if
// that is "".
void FollowMovedClock(const std::string& path);

}  // namespace tessera
#endif  // TESTS_FAILURE_MOVED_CLOCK_H_
