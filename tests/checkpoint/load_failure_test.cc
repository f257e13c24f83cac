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
#include "comm/fake_communicator_test_util.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::ContainsRegex;
using ::testing::Each;

// Refuses all-gathers on request. It keeps announcements to itself.
class RefusingCommunicator : public FakeCommunicator {
 public:
  explicit RefusingCommunicator(std::shared_ptr<Communicator> inner)
      : FakeCommunicator(std::move(inner)) {
    before = [this](const CommCall& call) {
      return refuses && call.op == CollectiveOp::kAllGather
                 ? absl::UnavailableError("refused")
                 : absl::OkStatus();
    };
  }
  void Announce(const absl::Status& status) override {
    absl::StrAppend(&said, status.message());
  }
  bool refuses = false;
  std::string said;
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
                      "; announced: ", comm->said);
}

// Counts how often ranks have met.
class CountingCommunicator : public FakeCommunicator {
 public:
  using FakeCommunicator::FakeCommunicator;
  CommFuture Start(CommCall call, CommTag tag) override {
    const bool meets = call.op == CollectiveOp::kText;
    CommFuture done = FakeCommunicator::Start(std::move(call), std::move(tag));
    if (meets) (void)done.Wait();
    if (meets && ++meetings == 3) third.Notify();
    return done;
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
