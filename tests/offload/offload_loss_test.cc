// Training on a disk that ends in the middle: a rank is killed, or the disk
// loses what was written. All ranks end soon with one error, which names what
// was lost; nothing stays in the folder; and from the checkpoint of before
// training goes on with the bits of a run that nothing has disturbed.
//
// The swap file has no name, but a descriptor, through which a test harms it.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/offload/wide_trainee.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// This is not a measure of speed: it is far below a timeout.
constexpr absl::Duration kSoon = absl::Seconds(10);
constexpr int kSaved = 3, kEnd = 6;  // steps

// The arguments of a rank function: "<folder of swap
// files>|<checkpoint>|<spec>|...".
struct Args {
  explicit Args(absl::string_view text) : words(absl::StrSplit(text, '|')) {
    swap = words.at(0);
    dir = words.at(1);
    spec = TrainingSpec::FromText(words.at(2));
  }
  std::vector<std::string> words;
  std::string swap, dir;
  TrainingSpec spec;
};

// Trains steps from kSaved on, in a run that nothing disturbs.
TESSERA_RANK_FUNCTION(TrainUndisturbed) {
  const Args a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t, MakeWide(a.spec, world.communicator()));
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 0, kSaved, &record));
  record.clear();
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, kSaved, kEnd, &record));
  TESSERA_RETURN_IF_ERROR(AddValues(&t, &record));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return ToText(record);
}

// Trains these steps from the checkpoint.
TESSERA_RANK_FUNCTION(Resume) {
  const Args a(args);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, MakeWideIn(a.swap, a.spec, world.communicator(), /*seed=*/9));
  TESSERA_RETURN_IF_ERROR(t.engine->LoadCheckpoint(a.dir).status());
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, kSaved, kEnd, &record));
  TESSERA_RETURN_IF_ERROR(AddValues(&t, &record));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return ToText(record);
}

class OffloadLossTest : public ::testing::Test {
 protected:
  std::vector<std::string> Run(const char* function, const TrainingSpec& spec,
                               const std::string& more = "",
                               int world_size = 2) {
    return RunOnRanks(
        world_size, function,
        absl::StrCat(swap(), "|", dir(), "|", spec.ToText(), "|", more));
  }
  void ExpectResumes(const TrainingSpec& spec, int world_size = 2) {
    EXPECT_THAT(NamesIn(swap()), ElementsAre());
    const std::vector<std::string>& expected =
        Undisturbed(spec.dtype, world_size);
    ASSERT_THAT(expected, Each(StartsWith("step 3")));
    EXPECT_EQ(Run("Resume", spec, "", world_size), expected);
    EXPECT_THAT(NamesIn(swap()), ElementsAre());
  }
  // Runs it once for each of these, since its bits do not depend on where
  // values lie, nor on how they are gathered.
  const std::vector<std::string>& Undisturbed(const std::string& dtype,
                                              int world_size) {
    static auto* const known =
        new std::map<std::pair<std::string, int>, std::vector<std::string>>;
    const auto [it, is_new] = known->try_emplace({dtype, world_size});
    if (is_new) {
      it->second =
          Run("TrainUndisturbed", kInMemory.Spec(dtype), "", world_size);
    }
    return it->second;
  }
  std::string swap() const { return folder_ / "swap"; }
  std::string dir() const { return folder_ / "checkpoint"; }

  const TempFolder folder_;
};

// ---- a rank is killed

// Saves, and trains until rank 1 is killed, so many microseconds later.
TESSERA_RANK_FUNCTION(TrainUntilKilled) {
  const Args a(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           MakeWideIn(a.swap, a.spec, world.communicator()));
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 0, kSaved, &record));
  TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(a.dir));
  if (world.rank() == 1) {
    std::thread([us = std::stoi(a.words.at(3))] {
      usleep(static_cast<useconds_t>(us));
      raise(SIGKILL);
    }).detach();
  }
  return TrainWide(&t, kSaved, 1 << 20, &record).ToString();
}

TEST_F(OffloadLossTest, AKilledRankEndsAllAndLeavesNothing) {
  TrainingSpec all = OnDisk(), states = OnDisk();
  states.dtype = "fp32";
  states.parameters_in_memory = -1;
  int turn = 0;
  for (const int us : {0, 3000, 17'000, 40'000}) {
    const TrainingSpec& spec = turn++ % 2 == 0 ? all : states;
    SCOPED_TRACE(absl::StrCat(us, " us, ", spec.ToText()));
    const absl::Duration begin = MonotonicNow();
    const auto said = Run("TrainUntilKilled", spec, absl::StrCat(us));
    EXPECT_LT(MonotonicNow() - begin, kSoon);
    EXPECT_THAT(said,
                Each(AllOf(StartsWith("UNAVAILABLE"), HasSubstr("rank 1"))));
    ExpectResumes(spec);
    if (HasFailure()) return;
  }
}

// ---- the disk loses what was written

void Harm(const std::string& how) {
  for (const int fd : OpenSwapFiles()) {
    struct stat info = {};
    fstat(fd, &info);
    if (how == "truncated") {
      if (ftruncate(fd, 0) != 0) abort();
      continue;
    }
    // Another descriptor is needed, since this one may accept only full blocks.
    const int other =
        open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_WRONLY | O_CLOEXEC);
    const std::string garbage(static_cast<size_t>(info.st_size), '*');
    if (pwrite(other, garbage.data(), garbage.size(), 0) != info.st_size) {
      abort();
    }
    close(other);
  }
}

absl::Status Discover(const std::string& how, const std::string& dir,
                      Trainee* t) {
  Record record;
  if (how == "training") return TrainWide(t, kSaved, kEnd + 2, &record);
  if (how == "values") return AddValues(t, &record);
  if (how == "save") return t->engine->SaveCheckpoint(dir + "2");
  if (how == "dict") return t->engine->FullStateDict().status();
  if (how == "load") return t->engine->LoadCheckpoint(dir).status();
  return t->engine->Close();
}

// "...|<how>|<when>|<by>". Saves; rank 1 loses its file, perhaps while an
// update goes on; the error, and how long that and the engine's end have taken.
TESSERA_RANK_FUNCTION(LoseTheDisk) {
  const Args a(args);
  Record record;
  absl::Status found;
  const absl::Duration begin = MonotonicNow();
  {
    TESSERA_ASSIGN_OR_RETURN(Trainee t,
                             MakeWideIn(a.swap, a.spec, world.communicator()));
    TESSERA_RETURN_IF_ERROR(TrainWide(&t, 0, kSaved, &record));
    TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(a.dir));
    if (a.words.at(4) == "busy") {
      TESSERA_RETURN_IF_ERROR(TrainWide(&t, kSaved, kSaved + 1, &record));
    }
    if (world.rank() == world.world_size() - 1) Harm(a.words.at(3));
    found = Discover(a.words.at(5), a.dir, &t);
    // Whatever is called then fails, too, or says that it cannot.
    if (!found.ok() && a.words.at(5) != "load") {
      const absl::Status again = TrainWide(&t, 7, 9, &record);
      if (again.ok()) return absl::InternalError("trains on");
    }
  }
  if (MonotonicNow() - begin > kSoon) return absl::InternalError("hung");
  return found.ToString();
}

// Rank 0 may hear of it by an announcement.
void ExpectLostOn1(const std::vector<std::string>& said) {
  EXPECT_THAT(said[0], AnyOf(StartsWith("DATA_LOSS"),
                             StartsWith("UNAVAILABLE: rank 1 failed")));
  EXPECT_THAT(said[1], StartsWith("DATA_LOSS"));
  EXPECT_THAT(said, Each(AllOf(HasSubstr("rank 1"), HasSubstr(" of unit "),
                               AnyOf(HasSubstr("masters"), HasSubstr("exp_avg"),
                                     HasSubstr("parameters")))));
}

TEST_F(OffloadLossTest, ADiskThatLosesWhatWasWrittenIsNamedOnAllRanks) {
  struct Way {
    const char *name, *dtype, *shared, *served;
    int64_t parameters;
  };
  const Way kWays[] = {{"parameters", "bf16", "auto", "auto", 0},
                       {"fp32 parameters", "fp32", "auto", "auto", 0},
                       {"shared", "bf16", "on", "off", -1},
                       {"served", "fp32", "off", "on", -1},
                       {"collective", "bf16", "off", "off", -1}};
  const char* kBy[] = {"training", "values", "save", "dict", "close"};
  // Three of five for each way, and three ways for each.
  int i = 0, skipped = 0;
  for (const Way& way : kWays) {
    TrainingSpec spec = OnDisk();
    spec.dtype = way.dtype;
    spec.shared = way.shared;
    spec.served = way.served;
    spec.parameters_in_memory = way.parameters;
    ++skipped;
    for (const char* by : kBy) {
      if (skipped++ % 5 > 2) continue;
      const std::string how =
          absl::StrCat(i % 2 == 0 ? "truncated" : "garbage", "|quiet|", by);
      ++i;
      SCOPED_TRACE(absl::StrCat(way.name, ": ", how));
      // In memory, float32 parameters have no separate masters.
      const bool no_masters_there = spec.dtype == "fp32" &&
                                    way.parameters < 0 &&
                                    (by == kBy[3] || by == kBy[4]);
      if (no_masters_there) continue;
      ExpectLostOn1(Run("LoseTheDisk", spec, how));
    }
    ExpectResumes(spec);
    if (HasFailure()) return;
  }
}

// Perhaps the update is done with what is lost, and finds it a step later.
TEST_F(OffloadLossTest, AndSoWhileAnUpdateGoesOn) {
  for (const int64_t parameters : {0, -1}) {
    for (const char* how :
         {"truncated|busy|training", "garbage|busy|training"}) {
      TrainingSpec spec = OnDisk();
      spec.parameters_in_memory = parameters;
      SCOPED_TRACE(how);
      ExpectLostOn1(Run("LoseTheDisk", spec, how));
    }
  }
  ExpectResumes(OnDisk());
}

// A load that fails in the middle, since the disk takes nothing any more: the
// engine is lost, and says so instead of training on.
TESSERA_RANK_FUNCTION(LoadWhereNothingCanBeWritten) {
  const Args a(args);
  Record record;
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           MakeWideIn(a.swap, a.spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(TrainWide(&t, 0, kSaved, &record));
  TESSERA_RETURN_IF_ERROR(t.engine->SaveCheckpoint(a.dir));
  absl::Status loaded;
  {
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    rlimit limit = before;
    limit.rlim_cur = 4096;
    // An error instead of the end of the process.
    const auto handler = signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    const auto restore = absl::MakeCleanup([&] {
      setrlimit(RLIMIT_FSIZE, &before);
      signal(SIGXFSZ, handler);
    });
    loaded = t.engine->LoadCheckpoint(a.dir).status();
  }
  const absl::Status trained = TrainWide(&t, 7, 9, &record);
  const absl::Status closed = t.engine->Close();
  t.engine.reset();
  return absl::StrCat(loaded.ToString(), "\n", trained.ok(), closed.ok());
}

TEST_F(OffloadLossTest, ALoadThatCannotBeWrittenIsAnError) {
  for (const int world_size : {2, 1}) {
    auto said = Run("LoadWhereNothingCanBeWritten", OnDisk(), "", world_size);
    EXPECT_THAT(TakeFirstLines(&said),
                Each(AllOf(HasSubstr(" of unit "), HasSubstr("rank "),
                           HasSubstr("File too large"))));
    EXPECT_THAT(said, Each("00"));
    ExpectResumes(OnDisk(), world_size);
  }
}

TEST_F(OffloadLossTest, OnOneRankToo) {
  for (const char* how : {"truncated|quiet|training", "garbage|quiet|training",
                          "truncated|quiet|values", "truncated|quiet|save",
                          "truncated|quiet|close"}) {
    EXPECT_THAT(Run("LoseTheDisk", OnDisk(), how, 1),
                Each(AllOf(StartsWith("DATA_LOSS"), HasSubstr("rank 0"),
                           HasSubstr(" of unit "))))
        << how;
  }
  ExpectResumes(OnDisk(), 1);
}

}  // namespace
}  // namespace tessera
