// Compares plans with the kernel: the largest proportional set size of a rank
// during training, without files, which includes pages, staging and what is
// kept for the next step.
//
// Holes of malloc's heap are not a plan's: at LargeLongGpt, whose activations
// are blocks of a megabyte, they take 30 to 75 MiB beside some 110, with
// sharding.keep_freed_heap and without. At LargeWideGpt on two ranks they take
// 0 to 16 MiB, in blocks of the 4 MiB of a weight's gradient, more on a busy
// host: how many are alive at once depends on how the ranks wait for each
// other, and the heap keeps the most that there were. So the blocks of these
// cases are mapped by themselves here.
#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "tests/plan/truth.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

// Returns the bytes of this process's own pages, and its part of those that the
// ranks share. Files do not count: pages of libraries become a larger part of
// this process whenever another that has them ends.
int64_t HeldPages() {
  int64_t bytes = 0;
  const absl::StatusOr<std::string> text =
      ReadWholeFile("/proc/self/smaps_rollup");
  for (absl::string_view line : absl::StrSplit(text.value_or(""), '\n')) {
    // The line is "Pss_Anon:           1664 kB".
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, ' ', absl::SkipEmpty());
    int64_t kibibytes = 0;
    if (words.size() != 3 || !absl::SimpleAtoi(words[1], &kibibytes)) continue;
    if (words[0] == "Pss_Anon:" || words[0] == "Pss_Shmem:") {
      bytes += kibibytes * 1024;
    }
  }
  return bytes;
}

// The largest of what HeldPages says every few milliseconds.
class ResidentPeak {
 public:
  ResidentPeak() : thread_([this] { Run(); }) {}
  int64_t Take() {
    stop_.Notify();
    thread_.join();
    return peak_;
  }

 private:
  void Run() {
    do {
      peak_ = std::max(peak_, HeldPages());
    } while (!stop_.WaitForNotificationWithTimeout(absl::Milliseconds(2)));
    peak_ = std::max(peak_, HeldPages());
  }

  int64_t peak_ = 0;
  absl::Notification stop_;
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(const TruthModel& model,
                                                   const TruthCase& truth,
                                                   const World& world) {
  EngineOptions options;
  options.communicator = world.communicator();
  return Engine::Create(model.module, truth.config(), options);
}

// Returns the base and the peak of the third step. One step of a small model
// comes first: what libtorch keeps for good, and the code of its kernels, is
// not counted for the training.
TESSERA_RANK_FUNCTION(ResidentOfTraining) {
  const TruthCase truth = TruthCase::FromText(args);
  at::set_num_threads(1);
  torch::manual_seed(1);
  if (!truth.keeps_heap) mallopt(M_MMAP_THRESHOLD, 128 << 10);
  {
    const TruthModel small = MakeTruthModel("Gpt");
    TESSERA_ASSIGN_OR_RETURN(auto engine, MakeEngine(small, truth, world));
    TESSERA_RETURN_IF_ERROR(TrainSteps(small, truth, engine.get(), 1));
    TESSERA_RETURN_IF_ERROR(engine->Close());
  }
  ReturnKept();
  const int64_t base = HeldPages();
  if (base == 0) return absl::UnavailableError("no Pss_Anon: in smaps_rollup");
  const TruthModel model = MakeTruthModel(truth.model);
  TESSERA_ASSIGN_OR_RETURN(auto engine, MakeEngine(model, truth, world));
  TESSERA_RETURN_IF_ERROR(TrainSteps(model, truth, engine.get(), 2));
  ResidentPeak peak;
  const absl::Status trained = TrainSteps(model, truth, engine.get(), 1);
  const int64_t most = peak.Take();
  TESSERA_RETURN_IF_ERROR(trained);
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(base, " ", most);
}

class PlanResidentTest : public ::testing::TestWithParam<std::string> {};

TEST_P(PlanResidentTest, PeakIsWhatTheKernelSays) {
  const TruthCase truth = TruthCase::FromText(GetParam());
  const absl::StatusOr<PlanReport> report = PlanOf(truth);
  ASSERT_TRUE(report.ok()) << report.status();
  const auto planned = static_cast<double>(
      report->stages[static_cast<size_t>(truth.stage)].peak.total());
  ASSERT_GE(planned, 100e6) << "too small to mean anything";
  RankPoolOptions pool;
  pool.world_size = truth.world;
  pool.by_exec = true;  // a shared page counts as a part
  // A processor without AVX-512 takes ten times as long for 16-bit products.
  constexpr absl::Duration kDeadline = absl::Minutes(4);
  for (const auto& answer :
       RankPool(pool).Run("ResidentOfTraining", GetParam(), kDeadline)) {
    ASSERT_TRUE(answer.ok()) << answer.status();
    const std::vector<std::string> words = absl::StrSplit(*answer, ' ');
    double base = 0, peak = 0;
    ASSERT_TRUE(absl::SimpleAtod(words[0], &base));
    ASSERT_TRUE(absl::SimpleAtod(words[1], &peak));
    std::cout << absl::StrCat(
        GetParam(), ": planned ", planned, " + base ", base, ", resident ",
        peak, ", ", (planned + base - peak) / (1 << 20), " MiB off\n");
    EXPECT_LE(std::abs(planned + base - peak), 0.05 * peak + (16 << 20));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, PlanResidentTest,
    ::testing::Values(
        "LargeWideGpt stage=0 world=1",
        "LargeWideGpt stage=2 world=2 keeps_heap=0",
        "LargeLongGpt stage=3 world=2 keeps_heap=0",
        "LargeLongGpt stage=0 world=2 dtype=autocast keeps_heap=0",
        "LargeWideGpt stage=3 world=2 shared=1 keeps_heap=0"),
    [](const ::testing::TestParamInfo<std::string>& info) {
      return TruthCase::NameOf(info.param);
    });

}  // namespace
}  // namespace tessera
