// Training in real processes, one of which is stopped in the middle of it: what
// the others say, how soon, and what they write. Several jobs are run at once,
// since what they take is mostly the timeout.
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/monotonic.h"
#include "base/thread/deadline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/failure/kill_ranks.h"
#include "tests/failure/moved_clock.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr absl::Duration kTimeout = absl::Seconds(5);

// The host's clock is set by `hours`. The last are ranks that share layers or
// sequences.
struct StopCase {
  int stage = 0;
  bool rank0_hosts = false;
  int hours = 0;
  int tensor = 1, pipeline = 1, sequence = 1;
};

class StopJob {
 public:
  explicit StopJob(const StopCase& stop_case)
      : case_(stop_case),
        clock_(clock_folder_.path() + "/clock"),
        ranks_(kRanks, victim(), Spec(), stop_case.rank0_hosts) {}

  // Waits for the next step; false if there is none.
  bool Trains() { return ranks_.WaitForPhase(victim(), 'F', 1); }
  void MoveClock() { clock_.Move(absl::Hours(case_.hours)); }
  // At the beginning of a forward: marks of earlier ones may not be read yet.
  void Stop() {
    ranks_.DropPhases(victim());
    EXPECT_TRUE(Trains());
    MoveClock();
    kill(ranks_[victim()].pid, SIGSTOP);
    stopped_ = MonotonicNow();
  }
  // Looks who has ended; true once all others have.
  bool OthersHaveEnded() {
    return ranks_.WaitUntilEnded(Deadline::After(absl::ZeroDuration()),
                                 victim());
  }
  void ExpectVictimIsNamed();

 private:
  int victim() const { return case_.rank0_hosts ? 0 : 1; }
  RankSpec Spec() const {
    RankSpec spec;
    spec.stage = case_.stage;
    spec.tensor = case_.tensor;
    spec.pipeline = case_.pipeline;
    spec.sequence = case_.sequence;
    spec.timeout = kTimeout;
    spec.folder = folder_.path();
    spec.clock = clock_folder_.path() + "/clock";
    return spec;
  }
  void ExpectLine(const std::string& line) const;
  void ExpectDump(const std::string& own, const std::string& line) const;

  const StopCase case_;
  const KillFolder folder_;
  const TempFolder clock_folder_;
  MovedClock clock_;
  KillRanks ranks_;
  absl::Duration stopped_;
};

void StopJob::ExpectLine(const std::string& line) const {
  EXPECT_THAT(
      line,
      AllOf(HasSubstr("DEADLINE_EXCEEDED: "),
            ContainsRegex("(unit|agreement|broadcast|parameters|checkpoint|"
                          "end of an update|part|micro-batch|stage)"),
            ContainsRegex(" #[0-9]+ \\((pull|all-gather|reduce-scatter sum|"
                          "all-reduce sum|broadcast from rank 0|agreement)"),
            HasSubstr("has not ended within 5s: "),
            ContainsRegex(absl::StrCat(
                "rank ", victim(),
                " has not (come|sent its (shard|message) [0-9]+( of version "
                "[0-9]+)?) \\(")),
            ContainsRegex(
                case_.rank0_hosts
                    ? "ago, (in|out of) .*it is stopped.*the store does not "
                      "answer"
                    : "last heard of [2-9].*s ago, (in|out of) [^;]* "
                      "#[0-9]+ \\([^;]*: it is stopped"),
            // Whoever gives up first may be quoted by the other.
            HasSubstr("tessera-hang-rank")));
}

void StopJob::ExpectDump(const std::string& own,
                         const std::string& line) const {
  std::string dump;
  for (const std::string& name : folder_.Names()) {
    if (!absl::StartsWith(name, own)) continue;
    dump = ReadWholeFile(folder_.path() + "/" + name).value();
  }
  EXPECT_THAT(dump, AllOf(HasSubstr("\"tessera-comm\""), HasSubstr(" main (")));
  // A shard that is pulled is no collective.
  if (!absl::StrContains(line, "(pull")) {
    EXPECT_THAT(dump, HasSubstr("RUNNING"));
  }
}

void StopJob::ExpectVictimIsNamed() {
  int told_of_own = 0;
  for (int r = 0; r < kRanks; ++r) {
    if (r == victim()) continue;
    // Not before its time, and soon after it (stacks are written meanwhile).
    EXPECT_GT(ranks_[r].ended - stopped_, kTimeout - absl::Seconds(1));
    EXPECT_LT(ranks_[r].ended - stopped_, kTimeout + absl::Seconds(8));
    EXPECT_EQ(ranks_[r].code, 1);
    const std::string line = ranks_[r].LastLine();
    ExpectLine(line);
    // Who does not quote the other has written its own.
    const std::string own = absl::StrCat("tessera-hang-rank", r, "-");
    if (!absl::StrContains(line, own)) continue;
    ++told_of_own;
    ExpectDump(own, line);
  }
  EXPECT_GE(told_of_own, 1);
}

class StopTest : public testing::TestWithParam<std::vector<StopCase>> {};

// The middle of training: a rank of each job hangs, and nobody is dead.
TEST_P(StopTest, TheOthersNameItTheCollectiveAndTheUnit) {
  std::vector<std::unique_ptr<StopJob>> jobs;
  for (const StopCase& one : GetParam()) {
    jobs.push_back(std::make_unique<StopJob>(one));
  }
  for (const auto& job : jobs) ASSERT_TRUE(job->Trains());
  // Ranks tell the others about once a second what they do.
  const absl::Duration begin = MonotonicNow();
  do {
    for (const auto& job : jobs) ASSERT_TRUE(job->Trains());
  } while (MonotonicNow() - begin < absl::Seconds(2));
  for (const auto& job : jobs) job->Stop();
  absl::SleepFor(absl::Milliseconds(300));
  // In the middle of the others' waits.
  for (const auto& job : jobs) job->MoveClock();
  const Deadline deadline = Deadline::After(absl::Seconds(30));
  bool all_ended = false;
  while (!all_ended && !deadline.HasPassed()) {
    all_ended = true;
    for (const auto& job : jobs) all_ended &= job->OthersHaveEnded();
    absl::SleepFor(absl::Milliseconds(2));
  }
  EXPECT_TRUE(all_ended);
  for (size_t i = 0; i < jobs.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("stage ", GetParam()[i].stage));
    jobs[i]->ExpectVictimIsNamed();
  }
}

// At stage 2 the one that is stopped has the store.
INSTANTIATE_TEST_SUITE_P(
    Stages, StopTest,
    testing::Values(
        std::vector<StopCase>{{0, false, 24},
                              {3, false, -24},
                              {2, true, -24},
                              {.stage = 1, .hours = 24, .tensor = 3},
                              {.stage = 1, .hours = 24, .pipeline = 3},
                              {.stage = 3, .hours = 24, .sequence = 3}},
        std::vector<StopCase>{{3, false, -24}}),
    [](const testing::TestParamInfo<std::vector<StopCase>>& info) {
      return info.param.size() == 1 ? "Stage3" : "AllStages";
    });

}  // namespace
}  // namespace tessera
