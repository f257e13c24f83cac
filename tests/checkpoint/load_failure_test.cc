// A load fails on a rank after the values have changed there: the others must
// be told, as they may wait for this rank's part. And ranks have disks of
// different speed.
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/status.h"
#include "checkpoint/together.h"
#include "comm/comm_thread.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/recording_communicator.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::ContainsRegex;
using ::testing::Each;

// Refuses all-gathers while it is told to. Keeps announcements to itself.
class RefusingCommunicator : public RecordingCommunicator {
 public:
  using RecordingCommunicator::RecordingCommunicator;
  CommFuture AllGather(at::Tensor shard, at::Tensor whole,
                       CommTag tag) override {
    if (refuses) return DoneFuture(absl::UnavailableError("refused"));
    return RecordingCommunicator::AllGather(shard, whole, tag);
  }
  void Announce(const absl::Status& status) override {
    absl::StrAppend(&announced, status.message());
  }
  bool refuses = false;
  std::string announced;
};

// The failure is the same on all ranks, so that none waits.
TESSERA_RANK_FUNCTION(LoadCannotPublish) {
  const std::string dir(args);
  TrainingSpec spec;
  spec.stage = 2;
  spec.overlap = false;
  auto comm = std::make_shared<RefusingCommunicator>(world.communicator());
  auto model = BuildModel(spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine, MakeEngine(model, spec, comm));
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(dir));
  comm->refuses = true;
  const absl::Status loaded = engine->LoadCheckpoint(dir).status();
  return absl::StrCat("loaded: ", loaded.message(),
                      "; announced: ", comm->announced);
}

// Counts how often ranks have met.
class CountingCommunicator : public RecordingCommunicator {
 public:
  using RecordingCommunicator::RecordingCommunicator;
  absl::StatusOr<std::vector<std::string>> AllGatherStrings(
      absl::string_view mine, CommTag tag) override {
    auto all = RecordingCommunicator::AllGatherStrings(mine, tag);
    if (++meetings == 3) third.Notify();
    return all;
  }
  std::atomic<int> meetings{0};
  absl::Notification third;
};

// Rank 1's work ends when ranks have met three times while it went on.
TESSERA_RANK_FUNCTION(WorkThatTakesLong) {
  CountingCommunicator comm(world.communicator());
  const absl::Status status =
      RunTogether(&comm, "a disk", [&]() -> absl::Status {
        if (world.rank() == 0) return absl::OkStatus();
        comm.third.WaitForNotification();
        return absl::DataLossError("worn out");
      });
  return status.ToString();
}

TEST(TogetherTest, RanksMeetWhileADiskIsSlow) {
  EXPECT_THAT(RunOnRanks(2, "WorkThatTakesLong", ""),
              Each(ContainsRegex("DATA_LOSS: .*a disk.*rank 1.*worn out")));
}

TEST(LoadFailureTest, AValueThatCannotBePublishedIsAnnounced) {
  const TempFolder folder;
  EXPECT_THAT(RunOnRanks(2, "LoadCannotPublish", folder / "saved"),
              Each(ContainsRegex("loaded: .*refused.*; announced: .*refused")));
}

}  // namespace
}  // namespace tessera
