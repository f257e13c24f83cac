#include "comm/mesh/mesh.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "comm/fake_communicator_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Rank `rank` of a job; its splits are noted, and give groups of one.
class Job : public FakeCommunicator {
 public:
  Job(int rank, int world_size) : FakeCommunicator(rank, world_size) {}
  absl::StatusOr<std::shared_ptr<Communicator>> Split(int color,
                                                      CommTag name) override {
    splits.push_back(absl::StrCat(name.what, " ", color));
    if (fails) return absl::UnavailableError("no group");
    return std::shared_ptr<Communicator>(new FakeCommunicator);
  }
  std::vector<std::string> splits;
  bool fails = false;
};

struct Meshed {
  std::shared_ptr<Job> job;
  std::shared_ptr<Mesh> mesh;
};

// dp_replicate 2 x dp_shard 3 x tp 2, of 12 ranks.
Meshed OfRank(int rank) {
  auto job = std::make_shared<Job>(rank, 12);
  auto mesh = Mesh::Create(job, {{"dp", 6}, {"tp", 2}});
  EXPECT_THAT(mesh.status(), IsOk());
  EXPECT_THAT((*mesh)->Divide(
                  "dp", {{"dp_replicate", 2, "replicas"}, {"dp_shard", 3, ""}}),
              IsOk());
  return {job, *mesh};
}

TEST(MeshTest, TheLastAxisVariesFastest) {
  int rank = 0;
  for (int replicate = 0; replicate < 2; ++replicate) {
    for (int shard = 0; shard < 3; ++shard) {
      for (int tp = 0; tp < 2; ++tp, ++rank) {
        const Meshed m = OfRank(rank);
        if (HasFailure()) return;
        EXPECT_EQ(m.mesh->coordinate("dp_replicate"), replicate);
        EXPECT_EQ(m.mesh->coordinate("dp_shard"), shard);
        EXPECT_EQ(m.mesh->coordinate("tp"), tp);
        EXPECT_EQ(m.mesh->coordinate("dp"), replicate * 3 + shard);
        for (const char* axis : {"dp_replicate", "dp_shard", "tp", "dp"}) {
          EXPECT_EQ(m.mesh->ranks(
                        axis)[static_cast<size_t>(m.mesh->coordinate(axis))],
                    rank)
              << axis;
        }
      }
    }
  }
}

TEST(MeshTest, SizesAndRanksAreThoseOfTheAxis) {
  const Meshed m = OfRank(8);  // 1, 1, 0
  EXPECT_EQ(m.mesh->size("dp_replicate"), 2);
  EXPECT_EQ(m.mesh->size("dp_shard"), 3);
  EXPECT_EQ(m.mesh->size("dp"), 6);
  EXPECT_THAT(m.mesh->ranks("dp_replicate"), ElementsAre(2, 8));
  EXPECT_THAT(m.mesh->ranks("dp_shard"), ElementsAre(6, 8, 10));
  EXPECT_THAT(m.mesh->ranks("tp"), ElementsAre(8, 9));
  EXPECT_THAT(m.mesh->ranks("dp"), ElementsAre(0, 2, 4, 6, 8, 10));
}

TEST(MeshTest, AGroupIsMadeOnceAndHasItsRanks) {
  const std::vector<std::string> axes = {"dp_shard", "dp_replicate", "tp",
                                         "dp"};
  std::vector<std::vector<std::string>> splits;  // by rank
  for (int rank = 0; rank < 12; ++rank) {
    const Meshed m = OfRank(rank);
    EXPECT_EQ(m.mesh->group("tp"), nullptr);
    for (const std::string& axis : axes) {
      EXPECT_THAT(m.mesh->MakeGroup(axis), IsOk());
      const auto made = m.mesh->group(axis);
      EXPECT_NE(made, nullptr);
      EXPECT_THAT(m.mesh->MakeGroup(axis), IsOk());
      EXPECT_EQ(m.mesh->group(axis), made);
    }
    splits.push_back(m.job->splits);
  }
  // Rank 8 is 1, 1, 0.
  EXPECT_THAT(splits[8],
              ElementsAre("dp_shard 2", "replicas 2", "tp 4", "dp 0"));
  for (int rank = 0; rank < 12; ++rank) {
    for (size_t i = 0; i < axes.size(); ++i) {
      std::vector<int> same;
      for (int r = 0; r < 12; ++r) {
        if (splits[static_cast<size_t>(r)][i] ==
            splits[static_cast<size_t>(rank)][i]) {
          same.push_back(r);
        }
      }
      EXPECT_EQ(OfRank(rank).mesh->ranks(axes[i]), same) << axes[i];
    }
  }
}

TEST(MeshTest, TheGroupOfAllRanksIsTheJob) {
  const auto job = std::make_shared<Job>(1, 4);
  const auto mesh = Mesh::Create(job, {{"dp", 4}});
  ASSERT_THAT(mesh.status(), IsOk());
  ASSERT_THAT((*mesh)->Divide("dp", {{"dp_replicate", 1}, {"dp_shard", 4}}),
              IsOk());
  for (const char* axis : {"dp_shard", "dp"}) {
    EXPECT_THAT((*mesh)->MakeGroup(axis), IsOk());
    EXPECT_EQ((*mesh)->group(axis), job);
  }
  EXPECT_THAT(job->splits, ElementsAre());
  EXPECT_THAT((*mesh)->MakeGroup("dp_replicate"),
              IsOk());  // of this rank alone
  EXPECT_THAT(job->splits, ElementsAre("dp_replicate 1"));
}

TEST(MeshTest, AGroupThatFailedIsNone) {
  const Meshed m = OfRank(0);
  m.job->fails = true;
  EXPECT_THAT(m.mesh->MakeGroup("tp"),
              StatusIs(absl::StatusCode::kUnavailable, "no group"));
  EXPECT_EQ(m.mesh->group("tp"), nullptr);
}

absl::Status Made(std::vector<MeshAxis> axes) {
  return Mesh::Create(std::make_shared<Job>(0, 12), std::move(axes)).status();
}

TEST(MeshTest, AxesMakeUpTheJob) {
  EXPECT_THAT(Made({{"dp", 12}}), IsOk());
  EXPECT_THAT(
      Made({{"dp", 2}, {"tp", 8}}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("mesh dp 2 x tp 8: axis 'tp' has size 8"),
                     HasSubstr("a divisor of 12"))));
  EXPECT_THAT(Made({{"dp", 5}, {"tp", 4}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("axis 'dp' has size 5"),
                             HasSubstr("a divisor of 3"))));
  EXPECT_THAT(Made({{"dp", 0}, {"tp", 12}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("axis 'dp' has size 0")));
  EXPECT_THAT(Made({{"dp", 2}, {"tp", 3}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("have 6 ranks, expected all 12 of the job")));
}

TEST(MeshTest, NamesAreKnownAndDifferent) {
  EXPECT_THAT(Made({{"dp", 6}, {"dp", 2}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("axis 'dp': expected a name of its own")));
  EXPECT_THAT(Made({{"", 12}}), StatusIs(absl::StatusCode::kInvalidArgument));
  const Meshed m = OfRank(0);
  EXPECT_THAT(m.mesh->MakeGroup("pp"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("no axis 'pp'"), HasSubstr("tp, "))));
  EXPECT_THAT(
      m.mesh->Divide("pp", {{"x", 1}}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no axis 'pp'")));
  EXPECT_THAT(m.mesh->Divide("tp", {{"dp", 2}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("axis 'dp': expected a name of its own")));
  EXPECT_THAT(m.mesh->Divide("dp", {{"x", 3}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("have 3 ranks, expected all 6 of axis 'dp'")));
  EXPECT_THAT(m.mesh->Divide("dp", {{"x", 3}, {"y", 4}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("axis 'y' has size 4, expected a divisor")));
  EXPECT_DEATH(m.mesh->size("pp"), "no axis 'pp'");
}

}  // namespace
}  // namespace tessera
