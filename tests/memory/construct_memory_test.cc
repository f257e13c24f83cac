// A model of 512 MiB on four ranks, of which none ever holds more than its
// quarter and 100 MiB.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/construct_sharded.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

using at::Tensor;
using ::testing::Each;

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kBudget = 100 * kMiB;
constexpr int kLayers = 32;
constexpr int64_t kRows = 1024, kColumns = 4096;  // 16 MiB

// The model is cheap to make: each weight is one number except its first row.
struct Large : torch::nn::Module {
  Large() {
    for (int i = 0; i < kLayers; ++i) {
      weights.push_back(register_parameter(absl::StrCat("weight", i),
                                           torch::empty({kRows, kColumns})));
    }
    torch::NoGradGuard no_grad;
    for (int i = 0; i < kLayers; ++i) {  // a second pass
      weights[i].fill_(i);
      weights[i].select(0, 0).normal_();
    }
  }
  std::vector<Tensor> weights;
};

TESSERA_RANK_FUNCTION(ConstructLarge) {
  constexpr int64_t kShard = kLayers * kRows * kColumns * 4 / 4;
  MemoryLedger& ledger = MemoryLedger::Host();
  const int64_t before = ledger.total().current_bytes;
  ledger.SetLimit(before + kShard + kBudget);
  ledger.ResetPeak();
  TESSERA_ASSIGN_OR_RETURN(const ResidentMemory at_first, ReadResidentMemory());
  torch::manual_seed(5);
  TESSERA_ASSIGN_OR_RETURN(auto model, ConstructSharded(kBudget, [] {
                             return std::make_shared<Large>();
                           }));
  TESSERA_ASSIGN_OR_RETURN(const ResidentMemory built, ReadResidentMemory());
  const Tensor next = torch::rand({3});
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.mutable_zero_optimization()->set_stage(3);
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  config.mutable_sharding()->set_max_unit_numel(kRows * kColumns);
  TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(model, config));
  const int64_t peak = ledger.total().peak_bytes - before;
  ledger.SetLimit(MemoryLedger::kNoLimit);
  std::string problems;
  torch::manual_seed(5);
  for (int i = 0; i < kLayers; ++i) {
    const Tensor row = torch::empty({kColumns}).normal_();
    if (i % 16 != 3) continue;
    TESSERA_ASSIGN_OR_RETURN(const Tensor whole,
                             engine->Parameter(absl::StrCat("weight", i)));
    const bool equal = torch::equal(whole[0], row) &&
                       (whole.slice(0, 1) == i).all().item<bool>();
    if (!equal) absl::StrAppend(&problems, "weight", i, " differs; ");
  }
  if (!torch::equal(torch::rand({3}), next)) problems += "generator; ";
  const int64_t resident = built.anonymous_bytes - at_first.anonymous_bytes;
  // The slack is for the allocator's rounding and libtorch's own memory.
  if (resident > kShard + kBudget) {
    absl::StrAppend(&problems, "resident: ", resident, "; ");
  }
  engine = nullptr;
  model = nullptr;
  ReturnKept();
  return problems.empty() && peak <= kShard + kBudget
             ? "ok"
             : absl::StrCat(problems, "peak ", peak);
}

TEST(ConstructMemoryTest, HalfAGibibyteOnFourRanks) {
  EXPECT_THAT(RunOnRanks(4, "ConstructLarge", "", absl::Seconds(200)),
              Each("ok"));
}

}  // namespace
}  // namespace tessera
