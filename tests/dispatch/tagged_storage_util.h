// Helpers for tests of tagged storage: a module built twice, plain and owned by
// an engine in a world of one, is trained side by side and compared bit by bit.
// Unless a test says otherwise, parameters are sharded, every unit is freed as
// soon as no operator uses it, and freed memory is filled with 0xFF, so that
// reading a parameter behind the engine's back shows.
#ifndef TESTS_DISPATCH_TAGGED_STORAGE_UTIL_H_
#define TESTS_DISPATCH_TAGGED_STORAGE_UTIL_H_

#include <torch/torch.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/memory/memory.h"
#include "base/status_matchers.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "comm/comm_thread.h"
#include "comm/communicator.h"
#include "comm/fake_communicator_test_util.h"
#include "comm/group/self_communicator.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/registry.h"
#include "sharding/flat/use.h"
#include "tests/models/recomputed.h"
#include "tests/support/libtorch_adamw.h"
#include "torch/csrc/autograd/engine.h"
#include "verify/plain/plain_autograd.h"

namespace tessera {

// Returns a float32 loss, whatever the dtype of `t`.
inline at::Tensor MeanSquare(const at::Tensor& t) {
  return t.to(at::kFloat).pow(2).mean();
}

// Compares dtype, sizes and bytes, so that 0 and -0 differ and NaNs compare.
inline ::testing::AssertionResult SameBits(const at::Tensor& a,
                                           const at::Tensor& b) {
  if (!a.defined() || !b.defined()) {
    if (a.defined() == b.defined()) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure()
           << (a.defined() ? "the second" : "the first") << " is undefined";
  }
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) {
    return ::testing::AssertionFailure()
           << a.toString() << a.sizes() << " against " << b.toString()
           << b.sizes();
  }
  const at::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  const auto* p = static_cast<const char*>(x.const_data_ptr());
  const auto* q = static_cast<const char*>(y.const_data_ptr());
  const auto item = static_cast<size_t>(x.element_size());
  for (int64_t i = 0; i < x.numel(); ++i) {
    if (std::memcmp(p + i * item, q + i * item, item) == 0) continue;
    return ::testing::AssertionFailure()
           << "element " << i << ": " << x.view(-1)[i].item<double>()
           << " against " << y.view(-1)[i].item<double>();
  }
  return ::testing::AssertionSuccess();
}

// Matches an error of any code whose message matches `message`.
MATCHER_P(FailsWith, message, "is an error whose message matches") {
  const absl::Status& status = status_internal::StatusOf(arg);
  *result_listener << status.ToString();
  return !status.ok() &&
         ::testing::Value(std::string(status.message()), message);
}

// A world of one that counts calls, and fails a gather on request.
class SpyCommunicator : public FakeCommunicator {
 public:
  SpyCommunicator() : FakeCommunicator(MakeSelfCommunicator()) {
    before = [this](const CommCall& call) { return LookAt(call); };
  }
  // Makes the `n`-th gather from now on fail, once; n = 1 is the next one.
  void FailGather(int64_t n) { failing_ = gathers_ + n; }
  int64_t gathers() const { return gathers_; }
  int64_t reductions() const { return reductions_; }
  // Returns the number of collectives that were called in the state of the
  // user's thread: in inference mode, or with tags or autocast seen.
  int64_t leaks() const { return leaks_; }

 private:
  absl::Status LookAt(const CommCall& call) {
    const bool gathers = call.op == CollectiveOp::kAllGather;
    const bool sums = TraitsOf(call.op).sums;
    if (!gathers && !sums) return absl::OkStatus();
    if (call.in.defined()) Look(call.in);
    Look(call.out);
    reductions_ += sums;
    if (!gathers || ++gathers_ != failing_) return absl::OkStatus();
    return absl::UnavailableError("the gather failed");
  }
  void Look(const at::Tensor& tensor) {
    const bool apart =
        c10::impl::tls_is_dispatch_key_excluded(kTagKey) &&
        c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU);
    if (tensor.is_inference() || c10::InferenceMode::is_enabled() || !apart) {
      ++leaks_;
    }
  }

  std::atomic<int64_t> gathers_{0};
  std::atomic<int64_t> reductions_{0};
  std::atomic<int64_t> failing_{0};
  std::atomic<int64_t> leaks_{0};
};

// Backward and optimizer step of plain libtorch, which the engine must equal.
class PlainTraining {
 public:
  static constexpr double kLr = 1e-2, kWeightDecay = 0.1;

  explicit PlainTraining(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)), states_(parameters_.size()) {}

  // Adds a micro-batch's complete gradients to the step's. After an error the
  // micro-batch has no effect.
  absl::Status Backward(const at::Tensor& loss, int accumulation) {
    PlainAutograd plain;
    at::Tensor seed;
    if (accumulation > 1) seed = torch::full_like(loss, 1.0 / accumulation);
    absl::Status status = CatchTorch("backward", [&] { loss.backward(seed); });
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].mutable_grad();
      at::Tensor& sum = states_[i].gradient;
      if (status.ok() && gradient.defined()) {
        sum = sum.defined() ? sum + gradient : gradient;
      }
      gradient.reset();
    }
    return status;
  }

  void Step() {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      State& s = states_[i];
      if (!s.gradient.defined()) continue;
      if (s.steps == 0) {
        s.exp_avg = torch::zeros_like(parameters_[i]);
        s.exp_avg_sq = torch::zeros_like(parameters_[i]);
      }
      LibtorchAdamW(parameters_[i], s.exp_avg, s.exp_avg_sq,
                    std::exchange(s.gradient, at::Tensor()), ++s.steps,
                    {kLr, 0.9, 0.999, 1e-8, kWeightDecay});
    }
  }

  // Returns the step's gradient so far of parameter `i`; undefined if it got
  // none.
  const at::Tensor& gradient(size_t i) const { return states_[i].gradient; }

 private:
  struct State {
    at::Tensor gradient, exp_avg, exp_avg_sq;
    int64_t steps = 0;
  };
  std::vector<at::Tensor> parameters_;
  std::vector<State> states_;
};

struct TwinOptions {
  int stage = 3;
  int64_t max_live = 0;  // stage3_max_live_parameters
  int accumulation = 1;
  bool check_writes = false;
};

// A module built twice from the same seed. `Holder` is what TORCH_MODULE makes.
template <typename Holder>
class Twins {
 public:
  using Loss = std::function<at::Tensor(Holder&)>;

  explicit Twins(const std::function<Holder()>& make)
      : plain(Build(make)),
        tagged(Build(make)),
        training_(plain->parameters()) {}

  // Makes an engine own `tagged`.
  void Create(TwinOptions options = {}) {
    accumulation_ = options.accumulation;
    proto::Config config;
    config.set_train_micro_batch_size_per_gpu(1);
    config.set_gradient_accumulation_steps(options.accumulation);
    config.set_gradient_clipping(0);
    auto* zero = config.mutable_zero_optimization();
    zero->set_stage(options.stage);
    zero->set_stage3_max_live_parameters(options.max_live);
    zero->set_stage3_param_persistence_threshold(0);
    zero->set_reduce_bucket_size(1);
    config.mutable_sharding()->set_check_writes(options.check_writes);
    config.mutable_optimizer()->set_type("AdamW");
    auto* params = config.mutable_optimizer()->mutable_params();
    params->set_lr(PlainTraining::kLr);
    params->set_weight_decay(PlainTraining::kWeightDecay);
    EngineOptions engine_options;
    engine_options.communicator = comm;
    TESSERA_ASSERT_OK_AND_ASSIGN(
        engine, Engine::Create(tagged, config, engine_options));
  }

  at::Tensor ForwardPlain(const Loss& loss) {
    PlainAutograd plain_autograd;
    return loss(plain);
  }
  absl::Status BackwardPlain(const at::Tensor& loss) {
    return training_.Backward(loss, accumulation_);
  }
  void StepPlain() { training_.Step(); }

  // Runs a micro-batch on both; expects the same loss and equal gradients.
  void Backward(const Loss& loss) {
    const at::Tensor expected = ForwardPlain(loss), got = loss(tagged);
    EXPECT_TRUE(SameBits(expected, got));
    TESSERA_EXPECT_OK(BackwardPlain(expected));
    TESSERA_EXPECT_OK(engine->Backward(got));
    ExpectFreed();
  }

  // Runs `accumulation` micro-batches of the same loss and an optimizer step.
  void Train(const Loss& loss) {
    for (int i = 0; i < accumulation_; ++i) {
      Backward(loss);
      if (i + 1 == accumulation_) ExpectSameGradients();
      TESSERA_EXPECT_OK(engine->Step());
    }
    StepPlain();
    ExpectSameParameters();
  }

  void ExpectSameGradients() {
    const auto parameters = plain->named_parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      TESSERA_ASSERT_OK_AND_ASSIGN(at::Tensor got,
                                   engine->Gradient(parameters[i].key()));
      EXPECT_TRUE(SameBits(training_.gradient(i), got))
          << "gradient of " << parameters[i].key();
    }
  }
  // Returns the plain module's gradient; undefined if it has none.
  const at::Tensor& PlainGradient(size_t i) const {
    return training_.gradient(i);
  }

  void ExpectSameParameters() {
    for (const auto& entry : plain->named_parameters()) {
      TESSERA_ASSERT_OK_AND_ASSIGN(at::Tensor got,
                                   engine->Parameter(entry.key()));
      EXPECT_TRUE(SameBits(entry.value(), got)) << "parameter " << entry.key();
    }
  }

  // Expects that every parameter belongs to its unit, nothing is pinned and, at
  // stage 3, nothing is whole.
  void ExpectFreed() {
    for (const auto& entry : tagged->named_parameters()) {
      const StorageOwner owned = Registry::Global().Find(entry.value());
      ASSERT_TRUE(owned) << entry.key();
      EXPECT_EQ(owned.flat->pins(), 0) << entry.key();
      EXPECT_EQ(owned.flat->whole(), !owned.flat->can_be_freed())
          << entry.key();
    }
  }

  Holder plain, tagged;
  std::shared_ptr<SpyCommunicator> comm = std::make_shared<SpyCommunicator>();
  std::unique_ptr<Engine> engine;

 private:
  static Holder Build(const std::function<Holder()>& make) {
    torch::manual_seed(7);
    return make();
  }

  int accumulation_ = 1;
  PlainTraining training_;
};

// A module with two units, `a` and `b`.
struct PairImpl : torch::nn::Module {
  PairImpl()
      : a(register_module("a", torch::nn::Linear(8, 8))),
        b(register_module("b", torch::nn::Linear(8, 8))) {}
  at::Tensor forward(const at::Tensor& x) { return b(torch::tanh(a(x))); }

  torch::nn::Linear a, b;
};
TORCH_MODULE(Pair);

class TaggedStorageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // This simulates a backward before any engine was created.
    torch::autograd::Engine::get_base_engine().initialize_device_threads_pool();
    SetPoisonOnFree(true);
    torch::manual_seed(1);
  }
  void TearDown() override {
    SetPoisonOnFree(false);
    EXPECT_TRUE(Registry::Global().empty()) << "an engine is left behind";
  }

  static Twins<torch::nn::Linear> LinearTwins() {
    return Twins<torch::nn::Linear>([] { return torch::nn::Linear(8, 8); });
  }
  static Twins<Pair> PairTwins() {
    return Twins<Pair>([] { return Pair(); });
  }
};

}  // namespace tessera
#endif  // TESTS_DISPATCH_TAGGED_STORAGE_UTIL_H_
