// Model states of four times what a rank may hold, by its ledger and by the
// kernel (RLIMIT_AS): all of them on the disk, they train with the bits of the
// same training in memory, and hold what the plan says.
#include <errno.h>
#include <malloc.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
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
constexpr int64_t kLayers = 24, kSide = 1024;
constexpr int64_t kNumel = kLayers * kSide * kSide;
// Parameters, gradients and two moments of a rank, in float32.
constexpr int64_t kStateBytes = kNumel / kRanks * 16;
constexpr int64_t kLimitBytes = kStateBytes / 4;

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
  tuning->set_slice_numel(1 << 16);
  return config;
}

absl::StatusOr<StagePlan> PlanOf(const std::string& folder) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto model, ConstructFake([] { return std::make_shared<Deep>(); }));
  PlanOptions options;
  options.world_size = kRanks;
  TESSERA_ASSIGN_OR_RETURN(const PlanReport report,
                           Plan(
                               *model,
                               [&] {
                                 return model->Loss(torch::zeros({2, kSide}));
                               },
                               ConfigOfDeep(folder), options));
  return report.stages.at(3);
}

int64_t AddressSpaceBytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// Of what comes later nothing but memory needs address space: autograd's thread
// is there, and malloc reserves none for others.
void SettleAddressSpace() {
  mallopt(M_ARENA_MAX, 1);
  torch::ones({1}, torch::requires_grad()).sum().backward();
}

// This process gets no more address space than `bytes` from here on.
absl::Status LimitAddressSpace(int64_t bytes) {
  const auto limit = static_cast<rlim_t>(AddressSpaceBytes() + bytes);
  const rlimit limits = {limit, limit};
  if (setrlimit(RLIMIT_AS, &limits) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, "setrlimit(RLIMIT_AS)");
}

// `args`: the folder; none: in memory, without a limit. What is limited is
// training, on the ledger and by the kernel: the module is constructed in
// shards, which are in memory until Create has taken them over.
TESSERA_RANK_FUNCTION(TrainDeep) {
  MemoryLedger& ledger = MemoryLedger::Host();
  const int64_t before = ledger.total().current_bytes;
  SettleAddressSpace();
  torch::manual_seed(5);
  TESSERA_ASSIGN_OR_RETURN(auto model, ConstructSharded(kSide * kSide * 16, [] {
                             return std::make_shared<Deep>();
                           }));
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, Engine::Create(model, ConfigOfDeep(std::string(args))));
  ReturnKept();
  if (!args.empty()) {
    ledger.SetLimit(before + kLimitBytes);
    TESSERA_RETURN_IF_ERROR(
        LimitAddressSpace(before + kLimitBytes - ledger.total().current_bytes));
  }
  ledger.ResetPeak();
  std::string losses;
  for (int step = 0; step < kSteps; ++step) {
    const Tensor loss = model->Loss(world.rank(), step);
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    absl::StrAppend(&losses, HexFloat(loss.item<double>()), " ");
  }
  const int64_t peak = ledger.total().peak_bytes - before;
  const int64_t held = engine->last_step().memory.peak_bytes;
  const OffloadReport offload = engine->last_step().offload;
  // Of a step: moments and values are read, and values for two gathers, and
  // gradients; moments, values and gradients are written. Perhaps some of it is
  // still to come when Step returns.
  const int64_t shard_bytes = kNumel / kRanks * 4;
  if (!args.empty() && (offload.bytes_read < 4 * shard_bytes ||
                        offload.bytes_written < 2 * shard_bytes)) {
    return absl::InternalError(absl::StrCat("read ", offload.bytes_read,
                                            ", wrote ", offload.bytes_written));
  }
  ledger.SetLimit(MemoryLedger::kNoLimit);
  for (const char* name : {"weight0", "weight11", "weight23"}) {
    TESSERA_ASSIGN_OR_RETURN(const Tensor whole, engine->Master(name));
    absl::StrAppend(&losses, PrintOf(whole), " ");
  }
  engine = nullptr;
  model = nullptr;
  ReturnKept();
  if (args.empty()) return losses;
  if (peak > kLimitBytes) {
    return absl::InternalError(
        absl::StrCat("peak ", peak, " of ", kLimitBytes));
  }
  TESSERA_ASSIGN_OR_RETURN(const StagePlan plan, PlanOf(std::string(args)));
  const int64_t planned = plan.peak.total();
  if (held <= planned / 100 * 105) return losses;
  return absl::InternalError(absl::StrCat("held ", held, ", plan ", planned));
}

TEST(OffloadMemory, StatesOfFourTimesTheLimitTrainWithTheSameBits) {
  const TempFolder folder;
  const std::vector<std::string> in_memory =
      RunOnRanks(kRanks, "TrainDeep", "", absl::Seconds(120));
  ASSERT_THAT(in_memory, Each(StartsWith("0x1.")));
  EXPECT_EQ(RunOnRanks(kRanks, "TrainDeep", folder.path(), absl::Seconds(120)),
            in_memory);
}

TEST(OffloadMemory, APlanCountsWhatStaysInMemory) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const StagePlan in_memory, PlanOf(""));
  EXPECT_EQ(in_memory.between_steps.total(), kStateBytes / 4 * 3);
  TESSERA_ASSERT_OK_AND_ASSIGN(const StagePlan on_disk, PlanOf("/nowhere"));
  // Four buffers of slices of gradient, values and two moments.
  EXPECT_EQ(on_disk.between_steps.total(), 4 * (4 * (1 << 16) * 4 + 4096));
  EXPECT_LT(on_disk.peak.total(), kLimitBytes);
}

}  // namespace
}  // namespace tessera
