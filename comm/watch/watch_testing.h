// Ranks in one process that announce over one store, on a clock that is moved
// by hand: tests of times take none.
#ifndef COMM_WATCH_WATCH_TESTING_H_
#define COMM_WATCH_WATCH_TESTING_H_

#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "comm/connect/handshake.h"
#include "comm/record/hang_dump.h"
#include "comm/watch/announcements.h"
#include "comm/watch/manual_clock_testing.h"
#include "comm/watch/wait_monitor.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace tessera {

// How long tests wait for other threads, which take milliseconds.
inline constexpr absl::Duration kEnough = absl::Seconds(20);

class WatchTest : public testing::Test {
 protected:
  WatchTest() { SetHangDumpFolder("off"); }

  std::unique_ptr<Announcements> Join(int rank, int world_size) {
    return std::move(Announcements::Create(store_, rank, world_size,
                                           /*same_host=*/true,
                                           clock_.AsClock()))
        .value();
  }
  // The process of `rank` is gone, without a word; rank 0 has heard of it.
  void Vanish(int rank) {
    const std::string where = store_->get_to_str("liveness");
    const std::vector<std::string> words = absl::StrSplit(where, ' ');
    const int fd = ConnectAs(rank, ParseEndpoint(where, words[2]), "liveness");
    TESSERA_CHECK(fd >= 0);
    close(fd);
    TESSERA_CHECK(a_->liveness().WaitForEnd(kEnough));
  }

  ManualClock clock_;
  c10::intrusive_ptr<c10d::Store> store_ =
      c10::make_intrusive<c10d::HashStore>();
  std::unique_ptr<Announcements> a_ = Join(0, 2);
  std::unique_ptr<Announcements> b_ = Join(1, 2);
};

// The group of ranks 0 and 1.
inline std::shared_ptr<const WatchedGroup> Both(std::function<void()> abort =
                                                    [] {}) {
  return std::make_shared<WatchedGroup>(
      WatchedGroup{"", {0, 1}, std::move(abort)});
}

// Monitors of rank 0, at which only the test looks.
class MonitorTest : public WatchTest {
 protected:
  // Waits, as a transport would, until the monitor aborts; an hour at most.
  absl::Status WaitUntilAborted(absl::Duration timeout, absl::Duration grace) {
    bool aborted = false;
    WaitMonitor monitor(a_.get(), {timeout, grace, kAbortGrace,
                                   /*on_watchdog=*/false});
    monitor.Begin(
        {7, 1234, "all-gather of unit x", "all-gather, 64 bytes of float32"},
        Both([&] { aborted = true; }));
    monitor.SetAwaited(1);
    const absl::Duration begin = clock_.Now();
    while (!aborted && clock_.Now() - begin < absl::Hours(1)) {
      clock_.Advance(absl::Milliseconds(20));
      monitor.Look();
    }
    waited_ = clock_.Now() - begin;
    return monitor.End(aborted ? absl::CancelledError("aborted")
                               : absl::InternalError("was never aborted"));
  }

  absl::Duration waited_;  // by the last WaitUntilAborted
};

}  // namespace tessera
#endif  // COMM_WATCH_WATCH_TESTING_H_
