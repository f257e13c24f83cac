// Given rates and memory, auto chooses the fastest way that fits.
#include "engine/plan/auto_choice.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ops/zeros.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "examples/gpt/gpt.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int64_t kAny = int64_t{1} << 40;

Rates SomeRates() {
  Rates rates;
  rates.flops_per_second = 1e11;
  rates.half_flops_per_second = 2e11;
  rates.bytes_per_second = 1e11;
  rates.seconds_per_operator = 1e-6;
  rates.all_gather = rates.reduce_scatter = {1e-5, 1e-10};
  rates.all_reduce = {2e-5, 2e-10};
  return rates;
}

class AutoChoiceTest : public ::testing::Test {
 protected:
  AutoChoiceTest()
      : gpt_(*ConstructFake([] {
          return std::make_shared<GptImpl>(
              GptOptions().dim(64).layers(4).heads(4).seq(64).vocab(256));
        })) {
    config_.set_train_batch_size(16);
    config_.set_auto_micro_batch(true);
    config_.mutable_optimizer()->set_type("AdamW");
    config_.mutable_zero_optimization()->set_auto_stage(true);
    config_.mutable_activation_checkpointing()->set_policy("auto");
    options_.world_size = 2;
    options_.rates = SomeRates();
  }

  absl::StatusOr<AutoChoice> Choose(int64_t memory_bytes) {
    options_.memory_bytes = memory_bytes;
    TESSERA_ASSIGN_OR_RETURN(const proto::Config resolved,
                             ResolveConfig(config_, options_.world_size));
    return ChooseAuto(
        *gpt_, [this](int64_t samples) { return Loss(samples); }, resolved,
        options_);
  }
  at::Tensor Loss(int64_t samples) {
    TORCH_CHECK_VALUE(samples >= least_samples_, "too few samples");
    const at::Tensor tokens = at::zeros({samples, 64}, at::kLong);
    return gpt_->loss(tokens, tokens);
  }

  const std::shared_ptr<GptImpl> gpt_;
  proto::Config config_;
  PlanOptions options_;
  int64_t least_samples_ = 1;
};

TEST_F(AutoChoiceTest, SmallModelsAreReplicated) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice choice, Choose(kAny));
  EXPECT_EQ(choice.chosen.stage, 0);
  EXPECT_EQ(choice.chosen.policy, "");
  EXPECT_EQ(choice.chosen.micro_batch, 8);
  // Stages x micro-batches of 8, 4, 2, 1 x kept, selective, full.
  EXPECT_THAT(choice.others, SizeIs(4 * 4 * 3 - 1));
  EXPECT_THAT(choice.reason, AllOf(HasSubstr("DDP"), HasSubstr("ms a step"),
                                   HasSubstr("others: ")));
}

TEST_F(AutoChoiceTest, NothingIsLeftToAuto) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice choice, Choose(kAny));
  EXPECT_FALSE(LeavesToAuto(choice.config));
  EXPECT_EQ(choice.config.zero_optimization().stage(), 0);
  EXPECT_TRUE(choice.config.activation_checkpointing().units().empty());
  EXPECT_EQ(choice.config.train_micro_batch_size_per_gpu(), 8);
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config again,
                               ResolveConfig(choice.config, 2));
  EXPECT_EQ(again.ShortDebugString(), choice.config.ShortDebugString());
}

// It tries every amount of memory between the least and the most that ways
// need.
TEST_F(AutoChoiceTest, TheFastestThatFits) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice all, Choose(kAny));
  std::vector<int64_t> peaks{all.chosen.peak_bytes};
  for (const AutoCandidate& way : all.others) peaks.push_back(way.peak_bytes);
  std::sort(peaks.begin(), peaks.end());
  EXPECT_LT(peaks.front(), peaks.back() / 2);
  for (size_t i = 0; i < peaks.size(); i += 5) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice choice, Choose(peaks[i]));
    EXPECT_LE(choice.chosen.peak_bytes, peaks[i]);
    for (const AutoCandidate& way : choice.others) {
      if (way.peak_bytes > peaks[i]) continue;
      EXPECT_GE(way.seconds.total(), choice.chosen.seconds.total() / 1.021)
          << choice.reason;
    }
  }
  EXPECT_THAT(Choose(peaks.front() - 1),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("none of 48 ways"),
                             HasSubstr("sharding.memory_limit_bytes"))));
}

TEST_F(AutoChoiceTest, MemoryIsBoughtWithTime) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice all, Choose(kAny));
  // Micro-batches as they are, states no smaller: activations have to go.
  config_.set_auto_micro_batch(false);
  config_.mutable_zero_optimization()->set_stage(0);
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice choice,
                               Choose(all.chosen.peak_bytes * 3 / 4));
  EXPECT_NE(choice.chosen.policy, "");
  EXPECT_EQ(choice.config.activation_checkpointing().units_size(), 1);
  EXPECT_THAT(choice.reason, HasSubstr("do not fit"));
  EXPECT_GT(choice.chosen.seconds.recompute, 0);
}

// Where gathers are expensive, stage 3 costs more than it saves; where every
// rank updates everything and sending is free, it does not.
TEST_F(AutoChoiceTest, RatesDecide) {
  config_.set_auto_micro_batch(false);
  config_.mutable_activation_checkpointing()->set_policy("full");
  config_.mutable_activation_checkpointing()->clear_units();
  options_.rates->all_reduce = options_.rates->all_gather =
      options_.rates->reduce_scatter = {};
  options_.rates->bytes_per_second = 1e7;
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice slow_memory, Choose(kAny));
  EXPECT_GT(slow_memory.chosen.stage, 0);
  options_.rates->all_gather = {1, 0};
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice dear, Choose(kAny));
  EXPECT_EQ(dear.chosen.stage, 0);
}

// It tries some of many divisors, down to 1: a large batch may need the
// smallest.
TEST_F(AutoChoiceTest, SmallMicroBatchesOfALargeBatch) {
  config_.set_train_batch_size(2 * 1024);
  config_.mutable_zero_optimization()->set_stage(0);
  config_.mutable_activation_checkpointing()->clear_policy();
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice all, Choose(kAny));
  EXPECT_THAT(all.others, SizeIs(8 - 1));
  int64_t least = all.chosen.peak_bytes;
  for (const AutoCandidate& way : all.others) {
    least = std::min(least, way.peak_bytes);
  }
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice choice, Choose(least));
  EXPECT_EQ(choice.chosen.micro_batch, 1);
}

// A model that wants two samples, as batch norm does, is not planned with one.
TEST_F(AutoChoiceTest, MicroBatchesThatTheModelRefuses) {
  least_samples_ = 4;
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice choice, Choose(kAny));
  EXPECT_THAT(choice.others, SizeIs(2 * 4 * 3 - 1));
  EXPECT_THAT(choice.reason,
              HasSubstr("; not of micro-batches of 2, 1 (trace: too few"));
  least_samples_ = 100;
  EXPECT_THAT(Choose(kAny), StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("too few")));
}

// Where memory is short states go to the disk, and parameters after them: as
// little as suffices.
TEST_F(AutoChoiceTest, AsMuchGoesToADiskAsHasTo) {
  config_.set_auto_micro_batch(false);
  config_.mutable_activation_checkpointing()->clear_policy();
  proto::ZeroOptimization* const zero = config_.mutable_zero_optimization();
  zero->set_stage3_param_persistence_threshold(0);
  zero->mutable_offload_optimizer()->set_device("auto");
  zero->mutable_offload_optimizer()->set_nvme_path("/nowhere");
  zero->mutable_offload_param()->set_device("auto");
  config_.mutable_sharding()->mutable_offload()->set_slice_numel(4096);
  config_.mutable_sharding()->mutable_offload()->set_min_state_bytes(0);
  config_.mutable_sharding()->mutable_offload()->set_early_bytes(0);
  options_.rates->disk_read_per_second = 1e9;
  options_.rates->disk_written_per_second = 1e9;
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice all, Choose(kAny));
  EXPECT_EQ(all.chosen.tiers.level, 0);
  // Stages 0 to 3, and at stage 3 half of the states, all, and parameters.
  EXPECT_THAT(all.others, SizeIs(4 + 3 - 1));
  std::map<int, AutoCandidate> at_stage_3;
  for (const AutoCandidate& way : all.others) {
    if (way.stage == 3) at_stage_3[way.tiers.level] = way;
  }
  ASSERT_THAT(at_stage_3, SizeIs(4));
  const std::vector<std::string> texts = {
      "activations kept:", "0.5 of the states to nvme:",
      "kept, states to nvme:", "states to nvme, parameters to nvme:"};
  zero->set_stage(3);
  for (int level = 3; level > 0; --level) {
    const AutoCandidate& way = at_stage_3[level];
    EXPECT_LT(way.peak_bytes, at_stage_3[level - 1].peak_bytes);
    EXPECT_GE(way.seconds.offload, at_stage_3[level - 1].seconds.offload);
    TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice choice,
                                 Choose(way.peak_bytes));
    EXPECT_EQ(choice.chosen.tiers.level, level);
    EXPECT_THAT(choice.reason, HasSubstr(texts[static_cast<size_t>(level)]));
    EXPECT_FALSE(LeavesToAuto(choice.config));
    const auto& chosen = choice.config.zero_optimization();
    EXPECT_EQ(chosen.offload_optimizer().device(), "nvme");
    EXPECT_EQ(chosen.offload_optimizer().ratio(), level == 1 ? 0.5 : 1);
    EXPECT_EQ(chosen.offload_param().device(), level == 3 ? "nvme" : "none");
    EXPECT_EQ(chosen.offload_param().nvme_path(), "/nowhere");
  }
  // Without a folder there is nowhere to go; the host means nothing here, and
  // much to a device.
  zero->set_auto_stage(true);
  zero->mutable_offload_optimizer()->clear_nvme_path();
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice nowhere, Choose(kAny));
  EXPECT_THAT(nowhere.others, SizeIs(4 - 1));
  // That of activations is none for states; that of parameters is.
  auto* const activations = config_.mutable_activation_checkpointing();
  activations->set_offload("nvme");
  activations->set_nvme_path("/nowhere");
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice activations_only, Choose(kAny));
  EXPECT_THAT(activations_only.others, SizeIs(4 - 1));
  config_.clear_activation_checkpointing();
  zero->mutable_offload_param()->set_nvme_path("/nowhere");
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice by_other, Choose(kAny));
  EXPECT_THAT(by_other.others, SizeIs(4 + 3 - 1));
  zero->mutable_offload_param()->clear_nvme_path();
  options_.on_cpu = false;
  options_.rates.reset();
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice host, Choose(kAny));
  EXPECT_EQ(host.chosen.tiers.level, 0);
  EXPECT_THAT(host.others, SizeIs(4 + 1 + 1 + 3 - 1));
  int64_t least = kAny;
  for (const AutoCandidate& way : host.others) {
    least = std::min(least, way.peak_bytes);
  }
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice most, Choose(least));
  EXPECT_THAT(most.reason, HasSubstr("states to cpu, parameters to cpu"));
}

TEST_F(AutoChoiceTest, PlanTextSaysBoth) {
  options_.memory_bytes = kAny;
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const std::string text,
      PlanText(
          *gpt_, [this](int64_t n) { return Loss(n); }, config_, options_));
  EXPECT_THAT(text, AllOf(HasSubstr("auto: stage 0"), HasSubstr("\n> 0 "),
                          HasSubstr("samples/s")));
  EXPECT_THAT(Plan(
                  *gpt_, [this] { return Loss(8); }, config_, options_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("activation_checkpointing.policy")));
}

TEST_F(AutoChoiceTest, WithoutRatesTheSimplest) {
  options_.rates.reset();
  TESSERA_ASSERT_OK_AND_ASSIGN(const AutoChoice choice, Choose(kAny));
  EXPECT_EQ(choice.chosen.stage, 0);
  EXPECT_EQ(choice.chosen.micro_batch, 8);
  EXPECT_THAT(choice.reason, ::testing::Not(HasSubstr("ms a step")));
}

}  // namespace
}  // namespace tessera
