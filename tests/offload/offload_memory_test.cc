// Model states of four times what a rank may hold, by its ledger and by the
// kernel (RLIMIT_AS, and a memory cgroup where that is allowed): all of them on
// the disk, they train with the bits of the same training in memory, hold what
// the plan says, and are loaded in still less.
#include <malloc.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/bits.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "engine/construct_sharded.h"
#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/offload/memory_cgroup.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

using at::Tensor;
using ::testing::Each;
using ::testing::StartsWith;

constexpr int kRanks = 2;
constexpr int kSteps = 3;
constexpr int kSaved = 1, kResumed = 2;  // steps before a save, and in all
constexpr int64_t kLayers = 24, kSide = 1024;
constexpr int64_t kNumel = kLayers * kSide * kSide;
// Parameters, gradients and two moments of a rank, in float32.
constexpr int64_t kStateBytes = kNumel / kRanks * 16;
constexpr int64_t kLimitBytes = kStateBytes / 4;
// A load may hold the stream's buffers, which are always there, and twice the
// values and moments of a unit.
constexpr int64_t kSliceNumel = 1 << 14;
constexpr int64_t kStreamBytes = 12 * (4 * kSliceNumel * 4 + 4096);
constexpr int64_t kLoadBytes = kStreamBytes + 2 * kSide * kSide / kRanks * 12;
static_assert(kLoadBytes < kStateBytes / 10);

struct Deep : torch::nn::Module {
  Deep() {
    for (int64_t i = 0; i < kLayers; ++i) {
      weights.push_back(register_parameter(absl::StrCat("weight", i),
                                           torch::randn({kSide, kSide}) / 32));
    }
  }
  Tensor Loss(int rank, int step) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(
        static_cast<uint64_t>(100 * step + rank));
    return Loss(torch::randn({2, kSide}, generator));
  }
  Tensor Loss(Tensor x) {
    for (const Tensor& w : weights) x = torch::tanh(x.matmul(w)) + x;
    return x.square().mean();
  }
  std::vector<Tensor> weights;
};

proto::Config ConfigOfDeep(const std::string& folder) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.set_gradient_clipping(0.5);
  config.mutable_optimizer()->set_type("AdamW");
  auto* const zero = config.mutable_zero_optimization();
  zero->set_stage(3);
  zero->set_stage3_param_persistence_threshold(0);
  zero->set_stage3_prefetch_bucket_size(kSide * kSide);
  zero->set_stage3_max_live_parameters(2 * kSide * kSide);
  config.mutable_sharding()->set_max_unit_numel(kSide * kSide);
  config.mutable_sharding()->set_shared_working_copy("off");
  if (folder.empty()) return config;
  zero->mutable_offload_optimizer()->set_device("nvme");
  zero->mutable_offload_optimizer()->set_nvme_path(folder);
  zero->mutable_offload_param()->set_device("nvme");
  zero->mutable_offload_param()->set_nvme_path(folder);
  zero->mutable_offload_param()->set_max_in_cpu(0);
  auto* const tuning = config.mutable_sharding()->mutable_offload();
  tuning->set_gradients(true);
  tuning->set_slice_numel(kSliceNumel);
  return config;
}

absl::StatusOr<StagePlan> PlanOf(const std::string& folder) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto model, ConstructFake([] { return std::make_shared<Deep>(); }));
  PlanOptions options;
  options.world_size = kRanks;
  const auto loss = [&] { return model->Loss(torch::zeros({2, kSide})); };
  TESSERA_ASSIGN_OR_RETURN(const PlanReport report,
                           Plan(*model, loss, ConfigOfDeep(folder), options));
  return report.stages.at(3);
}

// A model and its engine, and what the ledger held before them. The module is
// constructed in shards, which are in memory until Create has taken them over.
struct DeepRun {
  // `folder` is that of swap files; if it is "", states are in memory.
  static absl::StatusOr<DeepRun> Make(const std::string& folder,
                                      uint64_t seed = 5) {
    DeepRun run;
    run.before = MemoryLedger::Host().total().current_bytes;
    torch::manual_seed(seed);
    TESSERA_ASSIGN_OR_RETURN(
        run.model, ConstructSharded(kSide * kSide * 16,
                                    [] { return std::make_shared<Deep>(); }));
    TESSERA_ASSIGN_OR_RETURN(run.engine,
                             Engine::Create(run.model, ConfigOfDeep(folder)));
    ReturnKept();
    MemoryLedger::Host().ResetPeak();
    return run;
  }
  // Appends the losses to `record`.
  absl::Status Train(int rank, int first, int end, std::string* record) const {
    for (int step = first; step < end; ++step) {
      const Tensor loss = model->Loss(rank, step);
      TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
      TESSERA_RETURN_IF_ERROR(engine->Step());
      absl::StrAppend(record, HexFloat(loss.item<double>()), " ");
    }
    return absl::OkStatus();
  }
  absl::Status AddMasters(std::string* record) const {
    for (int64_t i = 0; i < kLayers; ++i) {
      TESSERA_ASSIGN_OR_RETURN(const Tensor whole,
                               engine->Master(absl::StrCat("weight", i)));
      absl::StrAppend(record, PrintOf(whole), " ");
    }
    return absl::OkStatus();
  }
  absl::Status CheckPeak(int64_t most) const {
    const int64_t peak = MemoryLedger::Host().total().peak_bytes - before;
    if (peak <= most) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("peak ", peak, " of ", most));
  }
  void End() {
    engine = nullptr;
    model = nullptr;
    ReturnKept();
  }

  int64_t before = 0;
  std::shared_ptr<Deep> model;
  std::unique_ptr<Engine> engine;
};

int64_t AddressSpaceBytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// Makes later work need no address space except for memory: autograd's thread
// exists, and malloc reserves no arenas for others.
void SettleAddressSpace() {
  mallopt(M_ARENA_MAX, 1);
  torch::ones({1}, torch::requires_grad()).sum().backward();
}

// While it lives the ledger gives out no more than kLimitBytes, of which
// `before` is not counted, and the kernel no more address space than that
// takes.
class MemoryLimit {
 public:
  explicit MemoryLimit(int64_t before) {
    MemoryLedger& ledger = MemoryLedger::Host();
    const int64_t most = before + kLimitBytes;
    const int64_t left = most - ledger.total().current_bytes;
    ledger.SetLimit(most);
    TORCH_CHECK(getrlimit(RLIMIT_AS, &before_) == 0);
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(AddressSpaceBytes() + left);
    TORCH_CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    cgroup_.emplace(left);
    std::cerr << "a memory cgroup of " << left << " bytes "
              << (cgroup_->entered() ? "binds this rank\n"
                                     : "is not allowed here\n");
  }
  ~MemoryLimit() {
    cgroup_.reset();
    (void)setrlimit(RLIMIT_AS, &before_);
    MemoryLedger::Host().SetLimit(MemoryLedger::kNoLimit);
  }
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

 private:
  rlimit before_;
  std::optional<MemoryCgroup> cgroup_;
};

// Expects at most 5 % more than planned.
absl::Status CheckPlan(const std::string& folder, int64_t held) {
  TESSERA_ASSIGN_OR_RETURN(const StagePlan plan, PlanOf(folder));
  const int64_t planned = plan.peak.total();
  if (held <= planned / 100 * 105) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("held ", held, ", plan ", planned));
}

// `args`: the folder; none: in memory, without a limit. What is limited is
// training.
TESSERA_RANK_FUNCTION(TrainDeep) {
  SettleAddressSpace();
  TESSERA_ASSIGN_OR_RETURN(DeepRun run, DeepRun::Make(std::string(args)));
  std::optional<MemoryLimit> limit;
  if (!args.empty()) limit.emplace(run.before);
  std::string record;
  TESSERA_RETURN_IF_ERROR(run.Train(world.rank(), 0, kSteps, &record));
  const absl::Status fits = run.CheckPeak(kLimitBytes);
  const int64_t held = run.engine->last_step().memory.peak_bytes;
  const OffloadReport offload = run.engine->last_step().offload;
  // In a step moments and values are read, and values for two gathers, and
  // gradients; moments, values and gradients are written. Some of it may still
  // be to come when Step returns.
  const int64_t shard_bytes = kNumel / kRanks * 4;
  if (!args.empty() && (offload.bytes_read < 4 * shard_bytes ||
                        offload.bytes_written < 2 * shard_bytes)) {
    return absl::InternalError(absl::StrCat("read ", offload.bytes_read,
                                            ", wrote ", offload.bytes_written));
  }
  limit.reset();
  TESSERA_RETURN_IF_ERROR(run.AddMasters(&record));
  run.End();
  if (args.empty()) return record;
  TESSERA_RETURN_IF_ERROR(fits);
  TESSERA_RETURN_IF_ERROR(CheckPlan(std::string(args), held));
  return record;
}

// Trains in memory, with a save to `args` on the way; returns what came after
// it: masters, which one step makes of all that was saved.
TESSERA_RANK_FUNCTION(SaveDeep) {
  TESSERA_ASSIGN_OR_RETURN(DeepRun run, DeepRun::Make(""));
  std::string record;
  TESSERA_RETURN_IF_ERROR(run.Train(world.rank(), 0, kSaved, &record));
  TESSERA_RETURN_IF_ERROR(run.engine->SaveCheckpoint(std::string(args)));
  record.clear();
  TESSERA_RETURN_IF_ERROR(run.Train(world.rank(), kSaved, kResumed, &record));
  TESSERA_RETURN_IF_ERROR(run.AddMasters(&record));
  run.End();
  return record;
}

// `args` is "<folder>|<checkpoint>". Loads over other values and goes on. No
// limit of the ledger applies to a load, so its peak is checked.
TESSERA_RANK_FUNCTION(LoadDeep) {
  const std::vector<std::string> parts = absl::StrSplit(args, '|');
  TESSERA_ASSIGN_OR_RETURN(DeepRun run, DeepRun::Make(parts[0], /*seed=*/6));
  TESSERA_RETURN_IF_ERROR(run.engine->LoadCheckpoint(parts[1]).status());
  const absl::Status fits = run.CheckPeak(kLoadBytes);
  std::string record;
  TESSERA_RETURN_IF_ERROR(run.Train(world.rank(), kSaved, kResumed, &record));
  // A second time, over states that have been written.
  MemoryLedger::Host().ResetPeak();
  TESSERA_RETURN_IF_ERROR(run.engine->LoadCheckpoint(parts[1]).status());
  const absl::Status again = run.CheckPeak(kLoadBytes);
  record.clear();
  TESSERA_RETURN_IF_ERROR(run.Train(world.rank(), kSaved, kResumed, &record));
  TESSERA_RETURN_IF_ERROR(run.AddMasters(&record));
  run.End();
  TESSERA_RETURN_IF_ERROR(fits);
  TESSERA_RETURN_IF_ERROR(again);
  return record;
}

TEST(OffloadMemory, StatesOfFourTimesTheLimitTrainWithTheSameBits) {
  const TempFolder folder;
  const std::vector<std::string> in_memory =
      RunOnRanks(kRanks, "TrainDeep", "", absl::Seconds(120));
  ASSERT_THAT(in_memory, Each(StartsWith("0x1.")));
  EXPECT_EQ(RunOnRanks(kRanks, "TrainDeep", folder.path(), absl::Seconds(120)),
            in_memory);
}

TEST(OffloadMemory, TheyAreLoadedOneUnitAtATime) {
  const TempFolder folder;
  const std::string dir = folder / "checkpoint";
  const std::vector<std::string> never_stopped =
      RunOnRanks(kRanks, "SaveDeep", dir, absl::Seconds(120));
  ASSERT_THAT(never_stopped, Each(StartsWith("0x1.")));
  EXPECT_EQ(
      RunOnRanks(kRanks, "LoadDeep", absl::StrCat(folder.path(), "|", dir),
                 absl::Seconds(120)),
      never_stopped);
}

TEST(OffloadMemory, APlanCountsWhatStaysInMemory) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const StagePlan in_memory, PlanOf(""));
  EXPECT_EQ(in_memory.between_steps.total(), kStateBytes / 4 * 3);
  TESSERA_ASSERT_OK_AND_ASSIGN(const StagePlan on_disk, PlanOf("/nowhere"));
  // Four buffers of three slices of gradient, values and two moments.
  EXPECT_EQ(on_disk.between_steps.total(), kStreamBytes);
  EXPECT_LT(on_disk.peak.total(), kLimitBytes);
}

}  // namespace
}  // namespace tessera
