// Tests sharding.buffer_sync: running statistics of a batch norm are each
// rank's own, rank 0's, or the mean over ranks.
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// All ranks' values of a tensor. COLLECTIVE.
absl::StatusOr<std::vector<at::Tensor>> OfAllRanks(const at::Tensor& mine,
                                                   Communicator* comm) {
  const at::Tensor bytes = mine.contiguous().reshape(-1).view(torch::kByte);
  const at::Tensor whole =
      torch::empty({bytes.numel() * comm->world_size()}, torch::kByte);
  TESSERA_RETURN_IF_ERROR(
      comm->AllGather(bytes.clone(), whole, {"buffer"}).Wait());
  std::vector<at::Tensor> all;
  for (const at::Tensor& each : whole.chunk(comm->world_size())) {
    all.push_back(each.clone().view(mine.scalar_type()).view(mine.sizes()));
  }
  return all;
}

at::Tensor Expected(const std::string& mode, const std::vector<at::Tensor>& all,
                    int rank) {
  if (mode == "local") return all[static_cast<size_t>(rank)];
  if (mode == "rank0" || !all[0].is_floating_point()) return all[0];
  at::Tensor sum = all[0].to(torch::kFloat);
  for (size_t r = 1; r < all.size(); ++r) sum = sum + all[r].to(torch::kFloat);
  return (sum / static_cast<int64_t>(all.size())).to(all[0].scalar_type());
}

proto::Config ConfigWith(const TrainingSpec& spec, const std::string& mode) {
  proto::Config config = ConfigOf(spec);
  config.mutable_sharding()->set_buffer_sync(mode);
  return config;
}

// `args` is "mode|spec". Checks what a Step makes of each buffer.
TESSERA_RANK_FUNCTION(TrainAndSync) {
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(args, absl::MaxSplits('|', 1));
  const std::string& mode = parts.first;
  const TrainingSpec spec = TrainingSpec::FromText(parts.second);
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(BuildModel(spec.model, world.rank()),
                               ConfigWith(spec, mode), world.communicator()));
  int differs = 0;
  for (int i = 0; i < 2 * spec.accumulation; ++i) {
    TESSERA_RETURN_IF_ERROR(t.Backward(i));
    // An integer that ranks do not agree on.
    t.model->named_buffers()["norm1.num_batches_tracked"].fill_(10 * i +
                                                                world.rank());
    const bool at_boundary = (i + 1) % spec.accumulation == 0;
    std::vector<std::pair<std::string, at::Tensor>> expected;
    for (const auto& b : t.model->named_buffers()) {
      TESSERA_ASSIGN_OR_RETURN(
          const auto all, OfAllRanks(b.value(), world.communicator().get()));
      differs += all[0].equal(all[1]) ? 0 : 1;
      expected.emplace_back(
          b.key(), Expected(at_boundary ? mode : "local", all, world.rank()));
    }
    TESSERA_RETURN_IF_ERROR(t.engine->Step());
    for (const auto& [name, value] : expected) {
      if (!t.model->named_buffers()[name].equal(value)) {
        return absl::StrCat(name, " differs after Step ", i);
      }
    }
  }
  // Otherwise nothing was tested.
  return differs == 0 ? "buffers never differed" : "";
}

// World size, mode, dtype of buffers.
class BufferSyncTest : public ::testing::TestWithParam<
                           std::tuple<int, std::string, std::string>> {};
INSTANTIATE_TEST_SUITE_P(All, BufferSyncTest,
                         ::testing::Combine(::testing::Values(2, 3),
                                            ::testing::Values("local", "rank0",
                                                              "mean"),
                                            ::testing::Values("", "bf16")),
                         [](const auto& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               std::get<1>(info.param),
                                               std::get<2>(info.param));
                         });

TEST_P(BufferSyncTest, StepsMakeBuffersEqual) {
  const auto& [world_size, mode, dtype] = GetParam();
  for (const int stage : {0, 3}) {
    TrainingSpec spec;
    spec.model = "ConvNorm";
    spec.stage = stage;
    if (!dtype.empty()) spec.dtype = spec.buffer_dtype = dtype;
    spec.accumulation = stage == 0 ? 2 : 1;
    EXPECT_THAT(RunOnRanks(world_size, "TrainAndSync",
                           absl::StrCat(mode, "|", spec.ToText())),
                Each(""))
        << spec.ToText();
  }
}

// A rank with a buffer of its own: before Create, and after.
TESSERA_RANK_FUNCTION(OneMoreBuffer) {
  TrainingSpec spec;
  spec.model = "ConvNorm";
  const bool before = args == "before";
  auto model = BuildModel(spec.model, world.rank());
  if (before && world.rank() == 1) {
    model->register_buffer("mine", torch::zeros({2}));
  }
  EngineOptions options;
  options.buffers_may_differ = true;  // in values, but not in names
  auto engine = Engine::Create(model, ConfigWith(spec, "mean"), options);
  if (!engine.ok()) return engine.status().ToString();
  if (world.rank() == 1) model->register_buffer("mine", torch::zeros({2}));
  const absl::Status backward =
      (*engine)->Backward(model->Loss(world.rank(), 0));
  return (backward.ok() ? (*engine)->Step() : backward).ToString();
}

TEST(BufferSyncMisuseTest, OtherBuffersOnOneRankAreNamedOnAll) {
  EXPECT_THAT(RunOnRanks(2, "OneMoreBuffer", "before"),
              Each(AllOf(HasSubstr("INVALID_ARGUMENT"),
                         HasSubstr("differs between rank 0 (norm1."),
                         HasSubstr("rank 1 (mine: Float [2])"))));
  EXPECT_THAT(RunOnRanks(2, "OneMoreBuffer", "after"),
              Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                         HasSubstr("[Engine::Step] rank 1: "),
                         HasSubstr("and is now mine: Float [2]"))));
}

}  // namespace
}  // namespace tessera
