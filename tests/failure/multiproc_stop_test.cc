// What ranks see when one of them is stopped inside a collective. (Stopped
// elsewhere: kill_test.)
#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

bool IsStopped(absl::string_view pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string number, name, state;
  file >> number >> name >> state;
  return state == "T";
}

// Rank 1 enters, tells the others where it is, and is stopped; then they come,
// and let it go on when they have given up.
TESSERA_RANK_FUNCTION(Rank1IsStoppedInside) {
  Communicator& comm = *world.communicator();
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> pids,
      comm.AllGatherStrings(absl::StrCat(getpid()), {"pids"}));
  while (world.rank() != 1 && !IsStopped(pids[1])) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  at::Tensor t = torch::ones({1 << 20});
  CommFuture future = comm.AllReduceSum(t, {"reduce of unit e.4"});
  if (world.rank() == 1) {
    // It does so soon after it begins to wait, and about once a second.
    absl::SleepFor(absl::Seconds(1));
    raise(SIGSTOP);
    return future.Wait();
  }
  const absl::Status status = future.Wait();
  pid_t pid = 0;
  if (absl::SimpleAtoi(pids[1], &pid)) kill(pid, SIGCONT);
  return status;
}

// Too early to tell that rank 1 is silent, so what the transport knows is told.
// (Later: MonitorTest.ARankThatCameMayBeSilentSince in comm/watch.)
TEST(StopTest, ARankThatIsStoppedInsideIsNamed) {
  RankPoolOptions options;
  options.world_size = 3;
  options.collective_timeout = absl::Seconds(2);
  RankPool pool(options);
  const RankPool::Answers answers = pool.Run("Rank1IsStoppedInside", "");
  for (int r : {0, 2}) {
    EXPECT_THAT(
        answers[r],
        StatusIs(absl::StatusCode::kDeadlineExceeded,
                 AllOf(HasSubstr("reduce of unit e.4 #3 (all-reduce sum, "
                                 "4194304 bytes of float32) has not ended "
                                 "within "),
                       ContainsRegex("rank [02] waits for rank 1; ranks 0, 1, "
                                     "2 have waited in it"
                                     "|rank 1 has come, but was last heard of "
                                     "3.*have waited in it"))));
  }
}

}  // namespace
}  // namespace tessera
