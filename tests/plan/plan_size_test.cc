// A model that fits no machine is constructed and planned, in little time and
// memory.
#include <torch/torch.h>

#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/memory/memory.h"
#include "base/status_matchers.h"
#include "config/config.pb.h"
#include "engine/plan/plan.h"
#include "examples/llama/llama.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

LlamaOptions SeventyBillion() {
  return LlamaOptions()
      .dim(8192)
      .layers(80)
      .heads(64)
      .kv_heads(8)
      .hidden(28672)
      .vocab(128256);
}

int64_t Anonymous() {
  const auto memory = ReadResidentMemory();
  return memory.ok() ? memory->anonymous_bytes : 0;
}

proto::Config ConfigOf(int stage) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.mutable_bf16()->set_enabled(true);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_zero_optimization()->set_stage(stage);
  return config;
}

TEST(PlanSizeTest, SeventyBillionParametersOnAThousandRanks) {
  at::set_num_threads(1);
  const auto warm = torch::randn({64, 64}).requires_grad_();
  torch::mm(warm, warm).sum().backward();
  const int64_t before = Anonymous();
  const absl::Time start = absl::Now();
  auto llama = ConstructFake([] { return Llama(SeventyBillion()); });
  ASSERT_TRUE(llama.ok()) << llama.status();
  const double constructed = absl::ToDoubleSeconds(absl::Now() - start);
  PlanOptions options;
  options.world_size = 1024;
  options.memory_bytes = int64_t{80} << 30;
  const absl::StatusOr<PlanReport> plan = Plan(
      **llama,
      [&] {
        const auto tokens = torch::randint(128256, {1, 4096}, torch::kLong);
        return (*llama)->loss(tokens, tokens);
      },
      ConfigOf(3), options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const int64_t taken = Anonymous() - before;
  std::cout << "constructed in " << constructed << " s; " << (taken >> 20)
            << " MiB taken\n"
            << plan->ToString();
  EXPECT_LT(taken, int64_t{200} << 20);
  // These are known without a plan: 14 bytes a parameter, cut into 1024; norms
  // stay whole.
  EXPECT_NEAR(static_cast<double>(plan->parameters), 70.55e9, 0.01e9);
  const PlannedBytes& states = plan->stages[3].between_steps;
  EXPECT_NEAR(static_cast<double>(states.total()), 70.55e9 * 14 / 1024,
              0.005 * 70.55e9 * 14 / 1024);
  EXPECT_EQ(plan->lowest_that_fits(), -1);
}

}  // namespace
}  // namespace tessera
