// Compares the number of collectives of a training step with a formula of
// units, buckets, passes and micro-batches: for a chain of blocks on two ranks,
// and for shard groups of two on four ranks.
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "comm/fake_communicator_test_util.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;

constexpr int kUnits = 5;
constexpr int64_t kDim = 64;
constexpr int64_t kUnitNumel = kDim * kDim;  // without gaps
constexpr int kSteps = 2;

struct LinkImpl : torch::nn::Module {
  LinkImpl() {
    weight = register_parameter("weight", 0.1 * torch::randn({kDim, kDim}));
  }
  at::Tensor weight;
};
TORCH_MODULE(Link);

class Chain : public TestModel {
 public:
  Chain() {
    for (int i = 0; i < kUnits; ++i) links_->push_back(Link());
    register_module("links", links_);
  }
  at::Tensor Loss(int rank, int64_t micro_batch) override {
    // The input has a gradient, so that the first weight is used in backward.
    at::Tensor h = torch::full({2, kDim}, 0.1 * (rank + 1), dtype());
    h = (h + static_cast<double>(micro_batch)).requires_grad_(true);
    for (const auto& link : *links_) {
      h = torch::tanh(torch::linear(h, link->as<Link>()->weight));
    }
    return h.to(torch::kFloat).square().mean();
  }

 private:
  torch::nn::ModuleList links_;
};

// Calls of a step, by operation and, except of all ranks, group.
using Counts = std::map<std::string, int>;

std::string ToText(const Counts& counts) {
  return absl::StrJoin(counts, ", ", [](std::string* out, const auto& c) {
    if (c.second > 0) absl::StrAppend(out, c.first, " ", c.second);
  });
}

// The calls of kSteps steps. args: the spec; before it "check_writes ".
TESSERA_RANK_FUNCTION(Count) {
  const bool check_writes = absl::ConsumePrefix(&args, "check_writes ");
  const TrainingSpec spec = TrainingSpec::FromText(args);
  proto::Config config = ConfigOf(spec);
  config.mutable_sharding()->set_check_writes(check_writes);
  auto comm = std::make_shared<FakeCommunicator>(world.communicator());
  torch::manual_seed(1);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(std::make_shared<Chain>(), config, comm));
  comm->Take();
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*t.engine, *t.model, spec, t.rank, /*first=*/0, &record));
  Counts counts;
  for (const auto& call : comm->Take()) {
    ++counts[absl::StrCat(call.operation, call.group.empty() ? "" : " of ",
                          call.group)];
  }
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return ToText(counts);
}

// Stage, accumulation, where it is added up.
class CollectiveCountsTest
    : public ::testing::TestWithParam<std::tuple<int, int, std::string>> {
 protected:
  CollectiveCountsTest() {
    spec_.steps = kSteps;
    spec_.stage = std::get<0>(GetParam());
    spec_.accumulation = std::get<1>(GetParam());
    spec_.accumulation_mode = std::get<2>(GetParam());
    spec_.reduce_bucket_size = 1;
  }
  // Returns the backwards of a step that reduce.
  int reducing() const {
    return spec_.accumulation_mode == "local" ? 1 : spec_.accumulation;
  }
  // Returns the counts of a step in which each micro-batch gathers `gathered`
  // units at stage 3 and reduces `buckets`, and which has `exchanges` small
  // messages of its own.
  Counts Expected(int gathered, int buckets, int exchanges) const {
    Counts counts;
    if (spec_.stage == 3) {
      counts["all-gather"] = spec_.accumulation * gathered;
    } else if (spec_.stage > 0) {
      counts["all-gather"] = kUnits;  // what the optimizer changed
    }
    counts[spec_.stage == 0 ? "all-reduce" : "reduce-scatter"] =
        reducing() * buckets;
    counts["exchange"] = reducing() + exchanges;  // agreements
    return counts;
  }
  void ExpectCounts(Counts of_step, absl::string_view more = "") {
    for (auto& [operation, count] : of_step) count *= kSteps;
    SCOPED_TRACE(spec_.ToText());
    EXPECT_THAT(
        RunOnRanks(world_size_, "Count", absl::StrCat(more, spec_.ToText())),
        Each(ToText(of_step)));
  }
  // Checks shard groups of two on four ranks: the collectives of parameters and
  // gradients in `expected` stay within a group; each reduction has a sum over
  // replicas; one more message says what was written.
  void ExpectCountsInGroups(const Counts& expected, int buckets) {
    Counts counts;
    for (const auto& [operation, count] : expected) {
      counts[operation == "exchange" ? operation
                                     : operation + " of shard groups"] = count;
    }
    counts["all-reduce of replicas"] = reducing() * buckets;
    counts["exchange"] += 1;
    spec_.shard_group = 2;
    world_size_ = 4;
    ExpectCounts(counts);
    spec_.shard_group = 0;
    world_size_ = 2;
  }
  TrainingSpec spec_;
  int world_size_ = 2;
};

TEST_P(CollectiveCountsTest, NothingOfParametersGoesOverGroups) {
  if (spec_.stage == 0) return;  // nothing is sharded
  // Overlap is on for one way to accumulate at every stage, and off for
  // another.
  spec_.overlap = (spec_.stage + spec_.accumulation / 2) % 2 == 0;
  ExpectCountsInGroups(Expected(kUnits, kUnits, 0), kUnits);
  spec_.max_reuse_distance = 0;
  spec_.prefetch_bucket_size = 0;
  ExpectCountsInGroups(Expected(2 * kUnits - 1, kUnits, 0), kUnits);
  spec_.max_reuse_distance = spec_.prefetch_bucket_size = -1;
  spec_.overlap = false;
  spec_.reduce_bucket_size = 2 * kUnitNumel;
  ExpectCountsInGroups(Expected(kUnits, (kUnits + 1) / 2, 0), (kUnits + 1) / 2);
}

// The backward gathers from the neighbours alone.
TEST_P(CollectiveCountsTest, SecondShardsAreGatheredWithinTheirGroups) {
  if (spec_.stage < 3) return;
  spec_.max_reuse_distance = 0;
  spec_.prefetch_bucket_size = 0;
  spec_.hpz = 2;
  Counts counts = Expected(kUnits, kUnits, 0);
  counts["all-gather of groups to reshard to"] =
      spec_.accumulation * (kUnits - 1);
  world_size_ = 4;
  ExpectCounts(counts);
}

TEST_P(CollectiveCountsTest, UnitsAreGatheredOnceWhereTheyMayStay) {
  for (bool overlap : {true, false}) {
    spec_.overlap = overlap;
    ExpectCounts(Expected(kUnits, kUnits, 0));
  }
}

// The last unit is gathered once: its forward and backward are consecutive.
TEST_P(CollectiveCountsTest, UnitsAreGatheredInEachPassWhereTheyMayNot) {
  spec_.max_reuse_distance = 0;
  for (bool overlap : {true, false}) {
    spec_.overlap = overlap;
    spec_.prefetch_bucket_size = overlap ? 0 : 1000 * kUnitNumel;
    ExpectCounts(Expected(2 * kUnits - 1, kUnits, 0));
  }
}

TEST_P(CollectiveCountsTest, UnitsAreGatheredOnceIfNotReshardedAfterForward) {
  spec_.max_reuse_distance = 0;
  spec_.reshard = "false";
  for (bool overlap : {true, false}) {
    spec_.overlap = overlap;
    ExpectCounts(Expected(kUnits, kUnits, 0));
  }
}

TEST_P(CollectiveCountsTest, PersistentUnitsAreGatheredAfterTheStep) {
  spec_.param_persistence_threshold = kUnitNumel;
  Counts counts = Expected(0, 1, 0);  // one unit, since all persist
  if (spec_.stage == 3) counts["all-gather"] = 1;
  if (spec_.stage < 3) counts = Expected(kUnits, kUnits, 0);
  ExpectCounts(counts);
}

TEST_P(CollectiveCountsTest, BucketsHoldSeveralUnits) {
  for (int units : {1, 2, 4, kUnits}) {
    spec_.reduce_bucket_size = units * kUnitNumel;
    ExpectCounts(Expected(kUnits, (kUnits + units - 1) / units, 0));
  }
}

// One message for clipping and for a look at what overflowed, be it both.
TEST_P(CollectiveCountsTest, ClippingAndOverflowChecksAreOneMessageAStep) {
  spec_.clipping = 0.5;
  ExpectCounts(Expected(kUnits, kUnits, 1));
  spec_.dtype = "bf16";
  ExpectCounts(Expected(kUnits, kUnits, 1));
  spec_.clipping = 0;
  ExpectCounts(Expected(kUnits, kUnits, 1));
  spec_.check_overflow = false;
  ExpectCounts(Expected(kUnits, kUnits, 0));
}

TEST_P(CollectiveCountsTest, WeightsCostNothing) {
  spec_.weights = true;
  ExpectCounts(Expected(kUnits, kUnits, 0));
}

TEST_P(CollectiveCountsTest, CheckWritesIsOneMessageAStep) {
  ExpectCounts(Expected(kUnits, kUnits, 1), "check_writes ");
}

INSTANTIATE_TEST_SUITE_P(All, CollectiveCountsTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(1, 3),
                                            ::testing::Values("each", "local")),
                         [](const auto& info) {
                           return absl::StrCat("Stage", std::get<0>(info.param),
                                               "Accumulation",
                                               std::get<1>(info.param),
                                               std::get<2>(info.param));
                         });

}  // namespace
}  // namespace tessera
