// How an ExclusiveScope ends: committed, failed, or left.
#include "engine/model/exclusive_scope.h"

#include <memory>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "comm/fake_communicator_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A communicator of one rank that counts all-reduces.
struct ListeningCommunicator : FakeCommunicator {
  ListeningCommunicator() {
    before = [this](const CommCall& call) {
      all_reduces += call.op == CollectiveOp::kAllReduce;
      return absl::OkStatus();
    };
  }
  int all_reduces = 0;
};

class ExclusiveScopeTest : public ::testing::Test {
 protected:
  ExclusiveScopeTest() {
    model_.SetSchedule(std::make_shared<Schedule>(ScheduleOptions{}));
    guard_.SetOneCopy();
  }

  const std::shared_ptr<ListeningCommunicator> comm_ =
      std::make_shared<ListeningCommunicator>();
  ShardedModel model_{nullptr, comm_};
  const Optimization optimization_;
  EngineLife life_{&optimization_};
  UpdateGuard guard_{&model_, &life_};
};

TEST_F(ExclusiveScopeTest, CommitTellsNobodyOfAFailure) {
  {
    ExclusiveScope scope(&guard_, "Step");
    TESSERA_ASSERT_OK(scope.Begin());
    EXPECT_EQ(comm_->all_reduces, 0);
    TESSERA_EXPECT_OK(scope.Commit());
  }
  EXPECT_EQ(comm_->all_reduces, 1);
  EXPECT_THAT(comm_->announced, IsEmpty());
}

TEST_F(ExclusiveScopeTest, CommitGivesBackWhatAllHaveComeTo) {
  ExclusiveScope scope(&guard_, "Step");
  TESSERA_ASSERT_OK(scope.Begin());
  EXPECT_THAT(scope.Commit(absl::NotFoundError("a file")),
              StatusIs(absl::StatusCode::kNotFound, "a file"));
  EXPECT_EQ(comm_->all_reduces, 1);
}

TEST_F(ExclusiveScopeTest, AFailureIsAnnouncedOnce) {
  {
    ExclusiveScope scope(&guard_, "Step");
    TESSERA_ASSERT_OK(scope.Begin());
    EXPECT_THAT(scope.Fail(absl::DataLossError("half a file")),
                StatusIs(absl::StatusCode::kDataLoss, "half a file"));
  }
  EXPECT_EQ(comm_->all_reduces, 0);
  EXPECT_THAT(comm_->announced, ElementsAre("DATA_LOSS: half a file"));
}

TEST_F(ExclusiveScopeTest, WhoLeavesItHasFailed) {
  {
    ExclusiveScope scope(&guard_, "Engine::SetMaster");
    TESSERA_ASSERT_OK(scope.Begin());
  }
  EXPECT_THAT(comm_->announced, ElementsAre(HasSubstr("Engine::SetMaster")));
}

// All ranks know, and nothing has changed.
TEST_F(ExclusiveScopeTest, OneThatCouldNotBeginIsNotOpen) {
  {
    ExclusiveScope scope(&guard_, "SaveCheckpoint");
    EXPECT_THAT(scope.Begin(absl::FailedPreconditionError("not now")),
                StatusIs(absl::StatusCode::kFailedPrecondition, "not now"));
  }
  EXPECT_THAT(comm_->announced, IsEmpty());
}

// Where ranks read in collectives alone there is no agreement before the
// second half, and an error is the caller's to fail.
TEST_F(ExclusiveScopeTest, EnteringWithoutAgreementIsOpenWhateverIsWrong) {
  UpdateGuard guard(&model_, &life_);
  {
    ExclusiveScope scope(&guard, "Step");
    TESSERA_ASSERT_OK(scope.Enter(absl::FailedPreconditionError("not now")));
  }
  EXPECT_THAT(comm_->announced, ElementsAre(HasSubstr("Step")));
}

TEST_F(ExclusiveScopeTest, ADismissedOneEndsNothing) {
  {
    ExclusiveScope scope(&guard_, "Engine::Close");
    TESSERA_ASSERT_OK(scope.Begin());
    scope.Dismiss();
  }
  EXPECT_EQ(comm_->all_reduces, 0);
  EXPECT_THAT(comm_->announced, IsEmpty());
}

}  // namespace
}  // namespace tessera
