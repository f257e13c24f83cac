// Ranks have different control flow: nobody waits for a rank that does not
// come, and the bits are the oracle's.
#include <torch/torch.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

constexpr absl::Duration kDeadline = absl::Minutes(5);
// The largest unit has 300 + 25 + 300 + 12 elements, each at a multiple of 64.
constexpr int64_t kBlockNumel = 320 + 64 + 320 + 64;

// Runs a forward of this rank alone, which leaves nothing behind.
void Evaluate(Trainee* trainee, int64_t micro_batch) {
  torch::NoGradGuard no_grad;
  const auto generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor state = generator.get_state();
  trainee->model->eval();
  (void)trainee->Loss(micro_batch);
  trainee->model->train();
  at::Generator(generator).set_state(state);
}

// args: a TrainingSpec. Trains, with evaluations of some rank alone before,
// within and after steps. Returns the most working memory of a step, in bytes,
// then the record.
TESSERA_RANK_FUNCTION(Wander) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  at::set_num_threads(1);
  MemoryLedger& ledger = MemoryLedger::Host();
  const int64_t before = ledger.Report()[MemoryKind::kWorking].current_bytes;
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  ledger.ResetPeak();
  std::mt19937 random(1);  // the same on all ranks
  auto evaluate = [&] {
    const auto who = static_cast<int>(random() % (2 * world.world_size()));
    const auto rounds = random() % 3;
    const auto first = static_cast<int64_t>(random() % 100000);
    if (who != world.rank()) return;
    for (unsigned i = 0; i < rounds; ++i) Evaluate(&t, first + i);
  };
  Record record;
  for (int step = 0; step < spec.steps; ++step) {
    evaluate();
    const at::Tensor loss = t.Loss(step);
    record.push_back(LossLine(step, 0, loss.detach()));
    evaluate();
    TESSERA_RETURN_IF_ERROR(t.engine->Backward(loss));
    evaluate();
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
  }
  const int64_t peak =
      ledger.Report()[MemoryKind::kWorking].peak_bytes - before;
  TESSERA_RETURN_IF_ERROR(AddFinalState(*t.engine, *t.model, &record));
  // There is no Close: a late rank still reads from those that have gone.
  return absl::StrCat(peak, "\n", ToText(record));
}

// The parameters are world size and dtype.
class WanderingTest
    : public ::testing::TestWithParam<std::tuple<int, std::string>> {};
INSTANTIATE_TEST_SUITE_P(All, WanderingTest,
                         ::testing::Combine(::testing::Values(2, 3),
                                            ::testing::Values("fp32", "bf16")),
                         [](const auto& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               std::get<1>(info.param));
                         });

TEST_P(WanderingTest, RanksThatTakeDifferentPathsComputeTheSame) {
  const auto [world_size, dtype] = GetParam();
  TrainingSpec spec;
  spec.model = "Wandering";
  spec.stage = 3;
  spec.steps = DefaultBackend() == "shm" ? 150 : 60;
  spec.dtype = dtype;
  spec.max_reuse_distance = 0;
  spec.prefetch_bucket_size = 1;  // the next unit
  std::vector<std::string> answers =
      RunOnRanks(world_size, "Wander", spec.ToText(), kDeadline);
  const std::vector<std::string> peaks = TakeFirstLines(&answers);
  const std::vector<Record>& expected = TrainWithOracle(spec, world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    const auto r = static_cast<size_t>(rank);
    EXPECT_EQ(FirstDifference(expected[r], RecordFromText(answers[r])), "")
        << "rank " << rank;
    // One unit in use and one on its way; none where the copy is shared.
    const int64_t units = DefaultBackend() == "shm" ? 0 : 2;
    int64_t peak = 0;
    ASSERT_TRUE(absl::SimpleAtoi(peaks[r], &peak)) << peaks[r];
    EXPECT_LE(peak, units * kBlockNumel * (dtype == "fp32" ? 4 : 2));
  }
}

}  // namespace
}  // namespace tessera
