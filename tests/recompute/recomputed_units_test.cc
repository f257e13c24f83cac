// Modules that know nothing of it are computed again in backward: what is held
// between forward and backward, what runs again, and the bits, against the same
// module that keeps its activations.
#include "engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "comm/group/self_communicator.h"
#include "tests/dispatch/held_bytes.h"
#include "torch/csrc/autograd/custom_function.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kDim = 32, kTokens = 64;
constexpr int kBlocks = 4;

// With all that makes running twice another thing than running once: dropout,
// running statistics, an in-place operator, a counter.
struct BlockImpl : nn::Module {
  BlockImpl()
      : norm(register_module("norm", nn::BatchNorm1d(kDim))),
        up(register_module("up", nn::Linear(kDim, 4 * kDim))),
        down(register_module("down", nn::Linear(4 * kDim, kDim))),
        calls(register_buffer("calls", torch::zeros({1}))) {}
  Tensor forward(const Tensor& x) {
    calls.add_(1);
    Tensor h = up(norm(x)) * calls;
    h.relu_();
    h = torch::dropout(h, 0.25, is_training());
    return x + down(middle ? middle(h) : h);
  }
  nn::BatchNorm1d norm;
  nn::Linear up, down;
  Tensor calls;
  std::function<Tensor(Tensor)> middle;
};
TORCH_MODULE(Block);

struct NetImpl : nn::Module {
  NetImpl() {
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    head = register_module("head", nn::Linear(kDim, 3));
  }
  Tensor forward(Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(x).to(torch::kFloat).square().mean();
  }
  nn::ModuleList blocks;
  nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

// One way of training the net: its module, its engine, what it leaves.
class Trained {
 public:
  explicit Trained(const std::string& recompute, int stage = 3) {
    torch::manual_seed(1);
    net = Net();
    proto::Config config;
    config.set_train_micro_batch_size_per_gpu(1);
    config.mutable_zero_optimization()->set_stage(stage);
    config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(
        0);
    auto* const adam = config.mutable_optimizer();
    adam->set_type("AdamW");
    adam->mutable_params()->set_lr(0.01);
    auto* const blocks = config.mutable_activation_checkpointing();
    if (!recompute.empty()) {
      blocks->add_units("Block");
      blocks->set_policy(recompute);
    }
    config_ = config;
    torch::manual_seed(2);
  }
  proto::ActivationCheckpointing* recompute() {
    return config_.mutable_activation_checkpointing();
  }
  void Create() {
    EngineOptions options;
    options.communicator = MakeSelfCommunicator();
    auto made = Engine::Create(net, config_, options);
    TESSERA_ASSERT_OK(made.status());
    engine = *std::move(made);
  }
  // Returns what the forward left held.
  int64_t Forward(const Tensor& x) {
    const int64_t before = HeldBytes::get();
    loss = net->forward(x);
    return HeldBytes::get() - before;
  }
  void Step(const Tensor& x) {
    if (engine == nullptr) Create();
    held.push_back(Forward(x));
    losses.push_back(loss.detach());
    TESSERA_ASSERT_OK(engine->Backward(loss));
    TESSERA_ASSERT_OK(engine->Step());
  }
  // Whatever the training leaves, generator included.
  std::vector<Tensor> State() {
    std::vector<Tensor> all = losses;
    const StateDict state = engine->FullStateDict().value();
    for (const auto& [name, value] : state) all.push_back(value);
    all.push_back(torch::rand({2}));
    return all;
  }

  Net net{nullptr};
  std::unique_ptr<Engine> engine;
  Tensor loss;
  std::vector<Tensor> losses;
  std::vector<int64_t> held;

 private:
  proto::Config config_;
};

void ExpectSame(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].sizes(), b[i].sizes()) << i;
    const Tensor x = a[i].contiguous(), y = b[i].contiguous();
    EXPECT_EQ(std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()),
              0)
        << "value " << i << " of " << a.size();
  }
}

Tensor Input(int step) {
  torch::manual_seed(100 + step);
  return torch::randn({kTokens, kDim});
}

class RecomputedUnitsTest : public ::testing::Test {
 protected:
  HeldBytes counted_;
};

TEST_F(RecomputedUnitsTest, GivesTheSameBitsAndHoldsTheInputsAlone) {
  std::vector<std::vector<Tensor>> states;
  std::vector<int64_t> held;
  for (const char* policy : {"", "full", "matmuls"}) {
    Trained run(policy);
    for (int step = 0; step < 3; ++step) run.Step(Input(step));
    held.push_back(run.held[2]);
    const RecomputeReport& report = run.engine->last_step().recompute;
    EXPECT_THAT(report.unable, IsEmpty());
    EXPECT_EQ(report.given_up, *policy == 0 ? 0 : kBlocks) << policy;
    states.push_back(run.State());
  }
  ExpectSame(states[0], states[1]);
  ExpectSame(states[0], states[2]);
  // A block's input and `calls`, no more: those of the four blocks of 17 times
  // the size of an input.
  const int64_t input = kTokens * kDim * 4;
  EXPECT_GT(held[0], kBlocks * 10 * input);
  EXPECT_LT(held[1], (kBlocks + 1) * input + 4096);
  EXPECT_LT(held[2], held[0]);
  EXPECT_GT(held[2], held[1]);
}

}  // namespace
}  // namespace tessera
