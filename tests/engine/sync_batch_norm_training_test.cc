// SyncBatchNorm in modules that an engine trains, at stages 0 and 3, computed
// again or not: the bits of a loop that reduces gradients by hand. And its
// errors, on all ranks; one rank; a device.
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "config/config.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nn/sync_batch_norm.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/recompute/checkpointed/checkpointed.h"
#include "testing/device/test_device.h"
#include "tests/engine/sync_batch_norm_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"
#include "verify/verify.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

// Returns the bits of a forward and a backward.
template <typename Module>
std::string BitsOfOne(Module module, const Tensor& input) {
  const Tensor x = input.clone().requires_grad_();
  const Tensor y = module(x);
  (y * y).sum().backward();
  return absl::StrCat(
      BitsOf(y), BitsOf(x.grad()), BitsOf(module->weight.grad()),
      BitsOf(module->bias.grad()), BitsOf(module->running_mean),
      BitsOf(module->running_var), BitsOf(module->num_batches_tracked));
}

TESSERA_RANK_FUNCTION(OfOneRank) {
  at::manual_seed(3);
  const Tensor x = torch::randn({5, 3, 4, 2}) * 2 + 1;
  SyncBatchNorm2d sync(3);
  nn::BatchNorm2d plain(3);
  TESSERA_RETURN_IF_ERROR(Expect(BitsOfOne(sync, x) == BitsOfOne(plain, x),
                                 "one rank has other bits"));
  // It is a BatchNorm to whoever asks, and a copy is one of these.
  const auto copy = sync->clone();
  TESSERA_RETURN_IF_ERROR(
      Expect(copy->as<nn::BatchNorm2d>() != nullptr &&
                 copy->as<SyncBatchNorm2d>() != nullptr &&
                 at::equal(copy->as<SyncBatchNorm2d>()->running_var,
                           sync->running_var),
             "a copy is another"));
  return CatchTorch("forward",
                    [&] {
                      SyncBatchNorm1d(2)(torch::ones({1, 2}));
                    })
      .ToString();
}

TEST(SyncBatchNormTrainingTest, OfOneRankHasBatchNormsBits) {
  EXPECT_THAT(RunOnRanks(1, "OfOneRank", ""),
              Each(HasSubstr("more than 1 value per channel")));
}

template <typename Norm>
struct BlockImpl : nn::Module {
  BlockImpl() {
    up = register_module("up", nn::Linear(6, 8));
    norm = register_module("norm", Norm(8));
    down = register_module("down", nn::Linear(8, 6));
  }
  Tensor forward(const Tensor& x) { return x + down(torch::relu(norm(up(x)))); }
  nn::Linear up{nullptr}, down{nullptr};
  Norm norm{nullptr};
};

bool IsBlock(const nn::Module& module) {
  return dynamic_cast<const BlockImpl<SyncBatchNorm1d>*>(&module) != nullptr ||
         dynamic_cast<const BlockImpl<nn::BatchNorm1d>*>(&module) != nullptr;
}

// `Norm` is SyncBatchNorm1d, or the one that is converted to it.
template <typename Norm>
struct NetImpl : nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i) {
      blocks->push_back(std::make_shared<BlockImpl<Norm>>());
    }
    register_module("blocks", blocks);
  }
  Tensor forward(Tensor x, bool checkpointed) {
    for (const auto& block : *blocks) {
      const auto run = [&](const Tensor& t) {
        return block->template as<BlockImpl<Norm>>()->forward(t);
      };
      x = checkpointed ? Checkpointed(run, x) : run(x);
    }
    return x;
  }
  // Returns the loss of rank r's batch in a step; rank 1 has none in the second
  // one.
  Tensor Loss(int rank, int step, at::ScalarType dtype, bool checkpointed) {
    at::manual_seed(100 * step + rank);
    const int64_t samples = rank == 1 && step == 1 ? 0 : 3 + rank;
    const Tensor x = torch::randn({samples, 6}).to(dtype);
    return forward(x, checkpointed).to(at::kFloat).square().sum() / 8;
  }
  nn::ModuleList blocks;
};
using Net = NetImpl<SyncBatchNorm1d>;
using PlainNet = NetImpl<nn::BatchNorm1d>;

constexpr int kSteps = 3;
constexpr double kRate = 0.125;

std::string BitsOfAll(const nn::Module& net) {
  const at::NoGradGuard no_grad;
  std::string bits;
  for (const auto& p : net.named_parameters()) {
    absl::StrAppend(&bits, BitsOf(p.value().clone()));
  }
  for (const auto& b : net.named_buffers()) {
    absl::StrAppend(&bits, BitsOf(b.value()));
  }
  return bits;
}

// Trains by hand as DistributedDataParallel would.
absl::StatusOr<std::string> TrainByHand(const World& world) {
  at::manual_seed(1);
  Net net;
  for (int step = 0; step < kSteps; ++step) {
    net.zero_grad();
    net.Loss(world.rank(), step, at::kFloat, false).backward();
    const at::NoGradGuard no_grad;
    for (Tensor& p : net.parameters()) {
      const Tensor g = p.grad();
      TESSERA_RETURN_IF_ERROR(
          world.communicator()->AllReduceSum(g, {"by hand"}).Wait());
      p.sub_(g / world.world_size(), kRate);
    }
  }
  return BitsOfAll(net);
}

struct Training {
  int stage = 0;
  bool bf16 = false, units = false, checkpointed = false;
};

template <typename Model>
absl::StatusOr<std::string> TrainWithEngine(const World& world, Training t) {
  at::manual_seed(1);
  const auto net = std::make_shared<Model>();
  TESSERA_ASSIGN_OR_RETURN(
      proto::Config config,
      ParseConfig(
          absl::StrCat(
              R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
                  "optimizer": {"type": "SGD", "params": {"lr": )",
              kRate, R"(}},
                  "bf16": {"enabled": )",
              t.bf16 ? "true" : "false",
              R"(}, "zero_optimization": {"stage": )", t.stage, R"(,
                  "stage3_param_persistence_threshold": 0}})"),
          "test.json", world.world_size()));
  EngineOptions options;
  options.is_unit = [](const nn::Module& module, absl::string_view) {
    return IsBlock(module);
  };
  if (t.units) options.is_recomputed = options.is_unit;
  TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(net, config, options));
  TESSERA_RETURN_IF_ERROR(ConvertSyncBatchNorm(*net));
  for (int step = 0; step < kSteps; ++step) {
    TESSERA_RETURN_IF_ERROR(engine->Backward(
        net->Loss(world.rank(), step, t.bf16 ? at::kBFloat16 : at::kFloat,
                  t.checkpointed)));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    if (t.units && engine->last_step().recompute.given_up == 0) {
      return absl::InternalError("nothing was computed again");
    }
  }
  const std::string bits = BitsOfAll(*net);
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return bits;
}

TESSERA_RANK_FUNCTION(Trainings) {
  TESSERA_ASSIGN_OR_RETURN(const std::string plain, TrainByHand(world));
  for (const int stage : {0, 3}) {
    for (const Training& t :
         {Training{stage}, Training{stage, false, /*units=*/true},
          Training{stage, false, false, /*checkpointed=*/true}}) {
      TESSERA_ASSIGN_OR_RETURN(const std::string bits,
                               TrainWithEngine<Net>(world, t));
      TESSERA_RETURN_IF_ERROR(Expect(
          bits == plain, absl::StrCat("other bits at stage ", stage,
                                      t.units ? " with units" : "",
                                      t.checkpointed ? " checkpointed" : "")));
      TESSERA_ASSIGN_OR_RETURN(const std::string converted,
                               TrainWithEngine<PlainNet>(world, t));
      TESSERA_RETURN_IF_ERROR(
          Expect(converted == plain,
                 absl::StrCat("other bits, converted at stage ", stage,
                              t.units ? " with units" : "",
                              t.checkpointed ? " checkpointed" : "")));
    }
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string replicated,
                           TrainWithEngine<Net>(world, {0, /*bf16=*/true}));
  TESSERA_ASSIGN_OR_RETURN(const std::string sharded,
                           TrainWithEngine<Net>(world, {3, /*bf16=*/true}));
  TESSERA_ASSIGN_OR_RETURN(
      const std::string converted,
      TrainWithEngine<PlainNet>(world, {3, /*bf16=*/true}));
  TESSERA_RETURN_IF_ERROR(Expect(replicated == sharded && converted == sharded,
                                 "other bits in bfloat16"));
  return absl::StrCat(plain, sharded);
}

// On a device without hardware, which finds each missing wait, it has the CPU's
// bits.
TESSERA_RANK_FUNCTION(OnADevice) {
  TrainingSpec spec;
  spec.device = "1/workers";
  PrepareDevice(spec, world.rank());
  TESSERA_ASSIGN_OR_RETURN(const auto group,
                           CommunicatorOf(spec, world.communicator()));
  std::vector<std::string> bits;
  for (const bool on_device : {false, true}) {
    const at::Device device = on_device ? testdevice::TestDevice(1) : at::kCPU;
    SyncBatchNorm2d norm(
        3, SyncBatchNormOptions{on_device ? group : world.communicator(), ""});
    norm->to(device);
    std::string of_steps;
    for (int64_t samples : {4, 3 * world.rank()}) {
      at::manual_seed(5 + world.rank());
      const Tensor x =
          torch::randn({samples, 3, 2, 2}).to(device).requires_grad_();
      const Tensor y = norm(x);
      y.square().sum().backward();
      absl::StrAppend(&of_steps, BitsOf(y.cpu()), BitsOf(x.grad().cpu()),
                      BitsOf(norm->weight.grad().cpu()),
                      BitsOf(norm->running_var.cpu()));
    }
    bits.push_back(of_steps);
  }
  TESSERA_RETURN_IF_ERROR(CheckFaults(spec));
  TESSERA_RETURN_IF_ERROR(Expect(bits[0] == bits[1], "other bits"));
  return "same bits";
}

TEST(SyncBatchNormTrainingTest, OnADevice) {
  for (const auto& answer : RankPool::Get(2)->Run("OnADevice", "")) {
    EXPECT_THAT(answer, IsOkAndHolds("same bits"));
  }
}

// Checks what cannot be converted, and what needs an engine.
TESSERA_RANK_FUNCTION(Conversions) {
  PlainNet before;
  std::string errors =
      absl::StrCat(ConvertSyncBatchNorm(before).ToString(), "\n");
  for (const bool affine : {false, true}) {
    const auto options =
        nn::BatchNormOptions(3).affine(affine).track_running_stats(!affine);
    torch::manual_seed(1);
    nn::Sequential model(nn::Linear(2, 3), nn::BatchNorm1d(options));
    TESSERA_ASSIGN_OR_RETURN(auto engine,
                             Engine::Create(model, ConfigOf(TrainingSpec())));
    absl::StrAppend(&errors, ConvertSyncBatchNorm(*model).ToString(), "\n");
    TESSERA_RETURN_IF_ERROR(engine->Close());
  }
  return errors;
}

TEST(SyncBatchNormTrainingTest, NamesWhatCannotBeConverted) {
  EXPECT_THAT(
      RunOnRanks(2, "Conversions", ""),
      Each(AllOf(HasSubstr("FAILED_PRECONDITION: ConvertSyncBatchNorm: no "
                           "engine has the weight of 'blocks.0.norm'"),
                 HasSubstr("INVALID_ARGUMENT: ConvertSyncBatchNorm: '1' has no "
                           "weight"),
                 HasSubstr("INVALID_ARGUMENT: ConvertSyncBatchNorm: '1' has no "
                           "running statistics"))));
}

TEST(SyncBatchNormTrainingTest, EnginesTrainWhatIsTrainedByHand) {
  for (const int ranks : {2, 3}) {
    const auto answers = RunOnRanks(ranks, "Trainings", "");
    EXPECT_THAT(answers[0], Not(HasSubstr("INTERNAL")));
    EXPECT_THAT(answers, Each(answers[0]));  // parameters and statistics
  }
}

// ---- errors

std::string Error(const std::function<void()>& f) {
  return CatchTorch("forward", f).ToString();
}

TESSERA_RANK_FUNCTION(Refusals) {
  SyncBatchNorm1d norm(2);
  const Tensor x = torch::ones({3, 2}).requires_grad_();
  const std::string one = Error([&] {
    norm(torch::ones({world.rank() == 1 ? 1 : 0, 2}));
  });
  const std::string second = Error([&] {
    const Tensor y = norm(x).square().sum();
    torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true,
                          /*create_graph=*/true);
  });
  struct Model : nn::Module {
    Tensor weight = register_parameter("weight", torch::ones({2}));
    Tensor mean = register_parameter("mean", torch::zeros({2}), false);
  };
  const auto model = std::make_shared<Model>();
  TrainingSpec spec;
  TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(model, ConfigOf(spec)));
  const std::string statistic = Error([&] {
    SyncBatchNorm(x, {model->weight, {}, model->mean, {}}, 0.1, 1e-5);
  });
  TESSERA_RETURN_IF_ERROR(engine->Close());
  // A trace asks nobody.
  std::string traced = "OK";
  if (world.rank() == 0) {
    const NoValues no_values;
    traced = Error([&] { norm(x); });
  }
  const auto verified =
      Verify([] { return std::make_shared<Net>(); }, ConfigOf(spec),
             [](nn::Module&, int, int64_t) { return Tensor(); });
  return absl::StrJoin(
      {one, second, statistic, verified.status().ToString(), traced}, "\n");
}

TEST(SyncBatchNormTrainingTest, Refuses) {
  EXPECT_THAT(
      RunOnRanks(2, "Refusals", ""),
      Each(AllOf(
          HasSubstr("INVALID_ARGUMENT: SyncBatchNorm of 2 channels: expected "
                    "more than 1 value per channel in training, over all 2 "
                    "ranks; input here: ["),
          HasSubstr("UNIMPLEMENTED: SyncBatchNorm of 2 channels: no gradients "
                    "of gradients"),
          HasSubstr("FAILED_PRECONDITION: SyncBatchNorm of weight: parameter "
                    "'mean' is a running statistic"),
          HasSubstr(
              "UNIMPLEMENTED: [Verify] rank 0: Verify: 'blocks.0.norm' is a "
              "SyncBatchNorm"),
          EndsWith("\nOK"))));
}

// args: what rank 1 does in the place of the others' forward, or backward.
TESSERA_RANK_FUNCTION(RanksThatDiffer) {
  const int64_t channels = args == "channels" && world.rank() == 1 ? 3 : 2;
  SyncBatchNorm1d norm(channels, SyncBatchNormOptions{{}, "layer1.norm"});
  const Tensor x = torch::ones({3, channels}).requires_grad_();
  return Error([&] {
    if (args == "forward" && world.rank() == 1) {
      ThrowIfError(world.communicator()->Barrier("another place"));
      return;
    }
    const Tensor y = norm(x);
    if (args == "backward" && world.rank() == 1) {
      ThrowIfError(world.communicator()->Barrier("another place"));
      return;
    }
    y.square().sum().backward();
  });
}

TEST(SyncBatchNormTrainingTest, RanksThatDifferAreNamed) {
  for (const char* where : {"forward", "backward"}) {
    EXPECT_THAT(RunOnRanks(2, "RanksThatDiffer", where),
                Each(AllOf(HasSubstr("SyncBatchNorm of layer1.norm"),
                           HasSubstr("another place"))));
  }
  EXPECT_THAT(RunOnRanks(2, "RanksThatDiffer", "channels"),
              Each(HasSubstr("SyncBatchNorm of layer1.norm")));
}

}  // namespace
}  // namespace tessera
