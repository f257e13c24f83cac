// Runs Verify on the user's own model: right training passes, and a wrong bit
// is found and named.
#include "verify/verify.h"

#include <ATen/Version.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "base/memory/memory.h"
#include "comm/fake_communicator_test_util.h"
#include "comm/world/world.h"
#include "examples/llama/llama.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/models/models.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training_spec.h"

namespace tessera {
namespace {

using at::Tensor;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

Tensor LossOfModel(torch::nn::Module& module, int rank, int64_t micro_batch) {
  return dynamic_cast<TestModel&>(module).Loss(rank, micro_batch);
}

VerifyOptions OptionsOf(const TrainingSpec& spec, const World& world) {
  VerifyOptions options;
  options.steps = spec.steps;
  options.engine.communicator = world.communicator();
  if (spec.weights) options.weight = WeightOf;
  return options;
}

std::string Outcome(const absl::StatusOr<VerifyReport>& report) {
  return report.ok() ? report->ToString() : report.status().ToString();
}

std::string VerifyModel(const TrainingSpec& spec, const proto::Config& config,
                        const World& world) {
  SetPoisonOnFree(spec.poison);
  const auto report = Verify([&] { return MakeTestModel(spec.model); }, config,
                             LossOfModel, OptionsOf(spec, world));
  SetPoisonOnFree(false);
  return Outcome(report);
}

// args: a TrainingSpec.
TESSERA_RANK_FUNCTION(VerifySpec) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  return VerifyModel(spec, ConfigOf(spec), world);
}

TESSERA_RANK_FUNCTION(VerifyUnderAutocast) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  proto::Config config = ConfigOf(spec);
  config.mutable_torch_autocast()->set_enabled(true);
  return VerifyModel(spec, config, world);
}

void ExpectSame(const TrainingSpec& spec, int world_size = 2,
                const char* function = "VerifySpec") {
  EXPECT_THAT(RunOnRanks(world_size, function, spec.ToText()),
              Each(HasSubstr("values: the same bits")))
      << spec.ToText();
}

// ---- what is right passes; and each fault of the core makes one of these fail

TEST(VerifyTest, ManySteps) {
  for (const int stage : {1, 3}) {
    TrainingSpec spec;
    spec.stage = stage;
    spec.steps = 20;
    ExpectSame(spec);
  }
}

TEST(VerifyTest, ModelsAtStage3) {
  for (const std::string model :
       {"Mlp", "Gpt", "Lstm", "ConvNorm", "Views", "SharedStorage", "Tied",
        "Clamped", "ChangingRank", "UsedTwice", "TwoForwards", "Thawed",
        "Embedding", "OneRank", "Recomputing", "GradientPenalty", "Complex"}) {
    TrainingSpec spec;
    spec.model = model;
    spec.stage = 3;
    spec.accumulation = 2;
    ExpectSame(spec);
    spec.poison = true;
    spec.max_live_parameters = 0;
    ExpectSame(spec, 3);
  }
}

// args: "fp32" or "bf16".
TESSERA_RANK_FUNCTION(VerifyLlama) {
  TrainingSpec spec;
  spec.stage = 3;
  spec.dtype = std::string(args);
  const auto make = [] {
    return Llama(LlamaOptions().dim(16).layers(3).heads(4).hidden(24).vocab(11))
        .ptr();
  };
  const auto loss = [](torch::nn::Module& module, int rank, int64_t step) {
    const Tensor text =
        (at::arange(28, at::kLong) * (3 + rank + 2 * step) % 11).view({2, 14});
    return dynamic_cast<LlamaImpl&>(module).loss(text.slice(1, 0, 13),
                                                 text.slice(1, 1, 14));
  };
  return Outcome(Verify(make, ConfigOf(spec), loss, OptionsOf(spec, world)));
}

TEST(VerifyTest, TheExampleLlama) {
  for (const char* dtype : {"fp32", "bf16"}) {
    EXPECT_THAT(RunOnRanks(2, "VerifyLlama", dtype),
                Each(HasSubstr("values: the same bits")))
        << dtype;
  }
}

TEST(VerifyTest, Stages) {
  for (int stage = 0; stage <= 2; ++stage) {
    for (const std::string model : {"Mlp", "OneRank", "Tied"}) {
      TrainingSpec spec;
      spec.model = model;
      spec.stage = stage;
      spec.accumulation = 2;
      ExpectSame(spec, 3);
    }
  }
}

TEST(VerifyTest, PrecisionClippingAndWeights) {
  TrainingSpec spec;
  spec.stage = 3;
  spec.accumulation = 2;
  spec.dtype = "bf16";
  spec.model = "LargeNorm";
  spec.clipping = 1;
  ExpectSame(spec, 3);
  spec.accumulation_mode = "local";
  spec.model = "SharedStorage";
  spec.clipping = 0.01;
  ExpectSame(spec, 3);
  spec.model = "ChangingRank";
  spec.accumulation = 3;
  spec.clipping = 0;
  ExpectSame(spec);
  TrainingSpec written;
  written.stage = 3;
  written.dtype = "bf16";
  written.model = "Clamped";
  ExpectSame(written);
  TrainingSpec parts;  // of one gradient, at different times
  parts.stage = 3;
  parts.model = "Recomputing";
  parts.reduce_dtype = "bf16";
  ExpectSame(parts);
  parts.reduce_dtype = "";
  parts.reduce_bucket_size = 1;  // each unit as soon as it is complete
  ExpectSame(parts, 3);
  TrainingSpec clipped;
  clipped.model = "LargeNorm";
  clipped.clipping = 1;
  ExpectSame(clipped);
  TrainingSpec weighted;
  weighted.stage = 2;
  weighted.weights = true;
  ExpectSame(weighted, 3);
  TrainingSpec scaled;
  scaled.stage = 3;
  scaled.model = "Overflows";
  scaled.dtype = "fp16";
  scaled.steps = 6;
  ExpectSame(scaled);
  TrainingSpec summed;
  summed.stage = 1;
  summed.reduction = "sum";
  ExpectSame(summed, 3);
  TrainingSpec groups;
  groups.stage = 3;
  groups.shard_group = 2;
  ExpectSame(groups, 4);
}

// Relies on the engine's casts everywhere: of float32 data, of what norms with
// running statistics get and give, and of a loss on a parameter and data.
struct CastNet : torch::nn::Module {
  CastNet() {
    namespace nn = torch::nn;
    conv = register_module("conv", nn::Conv2d(3, 4, 3));
    batch = register_module("batch", nn::BatchNorm2d(4));
    instance = register_module(
        "instance",
        nn::InstanceNorm2d(
            nn::InstanceNorm2dOptions(4).affine(true).track_running_stats(
                true)));
    group = register_module("group", nn::GroupNorm(nn::GroupNormOptions(2, 4)));
    rnn = register_module("rnn", nn::GRU(6, 5));
    centers = register_parameter("centers", torch::randn({5, 3}));
  }
  Tensor Loss(int rank, int64_t micro_batch) {
    const at::Generator generator = at::detail::createCPUGenerator(
        100 * static_cast<uint64_t>(micro_batch) + static_cast<uint64_t>(rank));
    Tensor h = torch::relu(batch(conv(torch::randn({2, 3, 8, 8}, generator))));
    h = group(instance(h)).mean(1).permute({1, 0, 2});
    h = std::get<0>(rnn(h, torch::zeros({1, 2, 5})));
    const Tensor weights = torch::softmax(h.to(torch::kFloat), -1);
    return torch::matmul(weights, centers).to(torch::kFloat).pow(2).mean();
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d batch{nullptr};
  torch::nn::InstanceNorm2d instance{nullptr};
  torch::nn::GroupNorm group{nullptr};
  torch::nn::GRU rnn{nullptr};
  Tensor centers;
};

// args: a TrainingSpec.
TESSERA_RANK_FUNCTION(VerifyCasts) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  return Outcome(Verify([] { return std::make_shared<CastNet>(); },
                        ConfigOf(spec),
                        [](torch::nn::Module& module, int rank, int64_t i) {
                          return dynamic_cast<CastNet&>(module).Loss(rank, i);
                        },
                        OptionsOf(spec, world)));
}

TEST(VerifyTest, CastsOfInputsAreThoseOfTheEngine) {
  for (const std::string dtype : {"bf16", "fp16"}) {
    for (const bool fp32_norms : {false, true}) {
      TrainingSpec spec;
      spec.stage = 3;
      spec.dtype = dtype;
      spec.fp32_norms = fp32_norms;
      ExpectSame(spec, 2, "VerifyCasts");
    }
    TrainingSpec buffers;
    buffers.stage = 2;
    buffers.dtype = dtype;
    buffers.buffer_dtype = dtype;
    ExpectSame(buffers, 2, "VerifyCasts");
    TrainingSpec model;
    model.stage = 3;
    model.dtype = dtype;
    model.model = "ConvNorm";
    ExpectSame(model);
  }
}

TEST(VerifyTest, Autocast) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    for (const std::string model : {"Mlp", "Gpt", "Lstm", "Tied", "ConvNorm"}) {
      // oneDNN has no bfloat16 LSTM there: plain libtorch's forward fails.
      const bool has_lstm =
          dtype == "bf16" || at::get_cpu_capability() == "AVX512";
      if (model == "Lstm" && !has_lstm) continue;
      TrainingSpec spec;
      spec.model = model;
      spec.dtype = dtype;
      spec.stage = 3;
      spec.accumulation = 2;
      spec.poison = true;
      ExpectSame(spec, 2, "VerifyUnderAutocast");
    }
  }
}

// ---- what is wrong is named

// One unit of 64 + 200 elements, of which rank 1 of 2 owns those from 192 on.
struct TwoParameters : torch::nn::Module {
  TwoParameters()
      : a(register_parameter("a", torch::rand({64}))),
        b(register_parameter("b", torch::rand({10, 20}))) {}
  Tensor Loss() { return a.square().sum() + (b * torch::rand({10, 20})).sum(); }
  Tensor a, b;
};

// Adds to an element of what the nth reduction gives on rank 1.
class FaultyCommunicator : public FakeCommunicator {
 public:
  FaultyCommunicator(std::shared_ptr<Communicator> inner, int nth, double error)
      : FakeCommunicator(std::move(inner)), nth_(nth), error_(error) {}
  CommFuture Start(CommCall call, CommTag tag) override {
    const bool scatters = call.op == CollectiveOp::kReduceScatter;
    Tensor shard = call.out;
    CommFuture sum = FakeCommunicator::Start(std::move(call), std::move(tag));
    if (!scatters || nth_-- != 0 || rank() != 1 || !sum.Wait().ok()) return sum;
    torch::NoGradGuard no_grad;
    shard[5] += error_;
    return sum;
  }

 private:
  int nth_;
  const double error_;
};

// args: the stage, the error, whether bits must be equal.
TESSERA_RANK_FUNCTION(VerifyWithFault) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TrainingSpec spec;
  spec.stage = std::stoi(words[0]);
  VerifyOptions options = OptionsOf(spec, world);
  options.engine.communicator = std::make_shared<FaultyCommunicator>(
      world.communicator(), /*nth=*/1, std::stod(words[1]));
  if (words[2] == "bounds") options.exact = false;
  return Outcome(Verify([] { return std::make_shared<TwoParameters>(); },
                        ConfigOf(spec),
                        [](torch::nn::Module& module, int, int64_t) {
                          return dynamic_cast<TwoParameters&>(module).Loss();
                        },
                        options));
}

TEST(VerifyTest, AWrongBitIsNamed) {
  for (const std::string stage : {"1", "2", "3"}) {
    EXPECT_THAT(RunOnRanks(2, "VerifyWithFault", stage + " 1e-6 bits"),
                Each(AllOf(HasSubstr("step 1 of 3: gradient of parameter 'b' "
                                     "(unit a): element [6, 13] is "),
                           HasSubstr("; 1 of 200 elements differ"))));
    EXPECT_THAT(RunOnRanks(2, "VerifyWithFault", stage + " 0 bits"),
                Each("3 steps, 2 parameters, 1584 values: the same bits"));
  }
}

// A backend that adds in an order of its own: rounding passes, a fault does
// not.
TEST(VerifyTest, SumsInAnotherOrderAreBounded) {
  EXPECT_THAT(RunOnRanks(3, "VerifyWithFault", "3 1e-7 bounds"),
              Each(HasSubstr("gradients within the bound")));
  EXPECT_THAT(RunOnRanks(3, "VerifyWithFault", "3 1e-5 bounds"),
              Each(AllOf(HasSubstr("step 1 of 3: gradient of parameter 'b'"),
                         HasSubstr("further apart than sums in another"))));
}

// A loss that another call of the same micro-batch does not give.
TESSERA_RANK_FUNCTION(VerifyWithAWildLoss) {
  TrainingSpec spec;
  spec.stage = 3;
  int calls = 0;
  const auto loss = [&](torch::nn::Module& module, int rank,
                        int64_t micro_batch) {
    const Tensor value = LossOfModel(module, rank, micro_batch);
    return ++calls > 1 && rank == 1 ? value * 2 : value;
  };
  return Outcome(Verify([&] { return MakeTestModel("Mlp"); }, ConfigOf(spec),
                        loss, OptionsOf(spec, world)));
}

TEST(VerifyTest, ALossThatIsNotAFunctionOfItsMicroBatchIsNamed) {
  EXPECT_THAT(RunOnRanks(2, "VerifyWithAWildLoss", ""),
              Each(HasSubstr("step 0 of 3: gradient of parameter")));
}

TESSERA_RANK_FUNCTION(VerifyRefused) {
  TrainingSpec spec;
  if (args == "nothing") spec.steps = 0;
  proto::Config config = ConfigOf(spec);
  if (args == "ignored") {
    config.mutable_sharding()->add_ignored_parameters("head");
  }
  if (args == "buffers") config.mutable_sharding()->set_buffer_sync("mean");
  if (args == "optimizer") config.clear_optimizer();
  const bool throws = args == "throws" && world.rank() == 1;
  return Outcome(Verify([] { return MakeTestModel("Mlp"); }, config,
                        [&](torch::nn::Module& module, int rank, int64_t i) {
                          TORCH_CHECK(!throws, "no such batch");
                          return LossOfModel(module, rank, i);
                        },
                        OptionsOf(spec, world)));
}

TEST(VerifyTest, ErrorsAreThoseOfAllRanks) {
  EXPECT_THAT(RunOnRanks(2, "VerifyRefused", "ignored"),
              Each(HasSubstr("does not know sharding.ignored_parameters")));
  EXPECT_THAT(RunOnRanks(2, "VerifyRefused", "nothing"),
              Each(HasSubstr("steps is 0; expected 1 or more")));
  EXPECT_THAT(RunOnRanks(2, "VerifyRefused", "buffers"),
              Each(HasSubstr("does not know sharding.buffer_sync")));
  EXPECT_THAT(RunOnRanks(2, "VerifyRefused", "optimizer"),
              Each(HasSubstr("names no optimizer")));
  EXPECT_THAT(RunOnRanks(2, "VerifyRefused", "throws"),
              Each(AllOf(HasSubstr("rank 1"), HasSubstr("no such batch"))));
}

}  // namespace
}  // namespace tessera
