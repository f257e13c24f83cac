// What the tests of recomputed units share: a net of blocks with all that makes
// running twice another thing than running once, trained with and without.
#ifndef TESTS_RECOMPUTE_RECOMPUTED_UTIL_H_
#define TESTS_RECOMPUTE_RECOMPUTED_UTIL_H_

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
#include "comm/fake_communicator_test_util.h"
#include "comm/group/self_communicator.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "tests/dispatch/held_bytes.h"
#include "torch/csrc/autograd/custom_function.h"

namespace tessera {

namespace nn = torch::nn;
using at::Tensor;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kDim = 32, kTokens = 640;
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
    Tensor h = up(norm(first ? first(x) : x)) * calls;
    h.relu_();
    h = torch::dropout(h, 0.25, is_training());
    h = x + down(middle ? middle(h) : h);
    return last ? last(h) : h;
  }
  nn::BatchNorm1d norm;
  nn::Linear up, down;
  Tensor calls;
  std::function<Tensor(Tensor)> first, middle, last;
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
  absl::Status TryCreate() {
    EngineOptions options;
    options.communicator = communicator;
    auto made = Engine::Create(net, config_, options);
    if (made.ok()) engine = *std::move(made);
    return made.status();
  }
  proto::ZeroOptimization* zero() {
    return config_.mutable_zero_optimization();
  }
  void Create() { TESSERA_ASSERT_OK(TryCreate()); }
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

  std::shared_ptr<FakeCommunicator> communicator =
      std::make_shared<FakeCommunicator>(MakeSelfCommunicator());
  Net net{nullptr};
  std::unique_ptr<Engine> engine;
  Tensor loss;
  std::vector<Tensor> losses;
  std::vector<int64_t> held;

 private:
  proto::Config config_;
};

inline void ExpectSameTensors(const std::vector<Tensor>& a,
                              const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].sizes(), b[i].sizes()) << i;
    const Tensor x = a[i].contiguous(), y = b[i].contiguous();
    EXPECT_EQ(std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()),
              0)
        << "value " << i << " of " << a.size();
  }
}

inline Tensor Input(int step) {
  torch::manual_seed(100 + step);
  return torch::randn({kTokens, kDim});
}

class RecomputedUnitsTest : public ::testing::Test {
 protected:
  RecomputedUnitsTest() { at::set_num_threads(1); }
  HeldBytes counted_;
};

// Trains with and without, on the same inputs, and expects the same.
inline void ExpectSameTraining(const std::function<void(Trained&)>& prepare,
                               const std::string& policy = "full",
                               int stage = 3) {
  std::vector<std::vector<Tensor>> states;
  for (const std::string& each : {std::string(), policy}) {
    Trained run(each, stage);
    prepare(run);
    for (int step = 0; step < 3; ++step) run.Step(Input(step));
    states.push_back(run.State());
  }
  ExpectSameTensors(states[0], states[1]);
}

inline void SetMiddle(Trained& run,
                      const std::function<Tensor(Tensor)>& middle) {
  for (const auto& block : *run.net->blocks) {
    block->as<Block>()->middle = middle;
  }
}

// A forward of the trained net, then what the engine says of its step.
inline RecomputeReport ReportOf(const std::function<Tensor(Tensor)>& middle) {
  Trained run("full");
  SetMiddle(run, middle);
  run.Step(Input(0));
  return run.engine->last_step().recompute;
}

// How often recomputed_units_test::scaled_by_calls has run.
inline int64_t drawn = 0;

inline Tensor Call(const char* name, const Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Tensor(const Tensor&)>()
      .call(x);
}

}  // namespace tessera
#endif  // TESTS_RECOMPUTE_RECOMPUTED_UTIL_H_
