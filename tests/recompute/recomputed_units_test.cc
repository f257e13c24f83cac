// Modules that know nothing of it are computed again in backward: what is held
// between forward and backward, what runs again, and the bits, against the same
// module that keeps its activations.
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
#include "engine/engine.h"
#include "tests/dispatch/held_bytes.h"
#include "tests/support/recording_communicator.h"
#include "torch/csrc/autograd/custom_function.h"

namespace tessera {
namespace {

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

  std::shared_ptr<RecordingCommunicator> communicator =
      std::make_shared<RecordingCommunicator>(MakeSelfCommunicator());
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
  RecomputedUnitsTest() { at::set_num_threads(1); }
  HeldBytes counted_;
};

TEST_F(RecomputedUnitsTest, GivesTheSameBitsAndHoldsTheInputsAlone) {
  std::vector<std::vector<Tensor>> states;
  std::vector<int64_t> held;
  for (const char* policy : {"", "full", "selective"}) {
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

// Trains with and without, on the same inputs, and expects the same.
void ExpectSameTraining(const std::function<void(Trained&)>& prepare,
                        const std::string& policy = "full", int stage = 3) {
  std::vector<std::vector<Tensor>> states;
  for (const std::string& each : {std::string(), policy}) {
    Trained run(each, stage);
    prepare(run);
    for (int step = 0; step < 3; ++step) run.Step(Input(step));
    states.push_back(run.State());
  }
  ExpectSame(states[0], states[1]);
}

void SetMiddle(Trained& run, const std::function<Tensor(Tensor)>& middle) {
  for (const auto& block : *run.net->blocks) {
    block->as<Block>()->middle = middle;
  }
}

// A forward of the trained net, then what the engine says of its step.
RecomputeReport ReportOf(const std::function<Tensor(Tensor)>& middle) {
  Trained run("full");
  SetMiddle(run, middle);
  run.Step(Input(0));
  return run.engine->last_step().recompute;
}

TEST_F(RecomputedUnitsTest, GivesTheSameBitsAtEachStage) {
  for (int stage : {0, 1, 2}) {
    ExpectSameTraining([](Trained&) {}, "full", stage);
  }
}

// ---- what a raw pointer made

// Fills memory of its own behind libtorch's back, with what it finds.
Tensor FilledByHand(const Tensor& h) {
  Tensor filled = torch::empty(h.sizes());
  const Tensor from = h.detach().contiguous();
  for (int64_t i = 0; i < filled.numel(); ++i) {
    filled.data_ptr<float>()[i] = from.data_ptr<float>()[i] * 0.5f + 1;
  }
  return h * filled;
}

TEST_F(RecomputedUnitsTest, KeepsWhatARawPointerFilled) {
  ExpectSameTraining([](Trained& run) { SetMiddle(run, FilledByHand); });
  EXPECT_EQ(ReportOf(FilledByHand).given_up, kBlocks);
}

Tensor FilledAndWritten(const Tensor& h) {
  Tensor filled = torch::empty({4 * kDim});
  for (int64_t i = 0; i < filled.numel(); ++i) {
    filled.data_ptr<float>()[i] = static_cast<float>(i);
  }
  filled.mul_(0.01);
  return h * filled.sin();
}

TEST_F(RecomputedUnitsTest, KeepsWhatWasFilledBeforeAnOperatorWrote) {
  ExpectSameTraining([](Trained& run) { SetMiddle(run, FilledAndWritten); });
}

TEST_F(RecomputedUnitsTest, FollowsTensorsMadeOfVectors) {
  const auto middle = [](const Tensor& h) {
    return h * torch::tensor(
                   std::vector<float>{0.25f + torch::rand({1}).item<float>()});
  };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
}

// Memory that is gone, or another's, before backward.
TEST_F(RecomputedUnitsTest, FollowsBorrowedMemory) {
  const auto middle = [](const Tensor& h) {
    std::vector<float> values(4 * kDim * 1000, 0.5f);
    values[1] = torch::rand({1}).item<float>();
    const Tensor borrowed =
        torch::from_blob(values.data(), {1000, 4 * kDim}).clone();
    return h * borrowed[0];
  };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
  EXPECT_EQ(ReportOf(middle).given_up, kBlocks);
}

TEST_F(RecomputedUnitsTest, FollowsWhatAnAccessorFillsAnew) {
  Tensor scratch = torch::zeros({4 * kDim});
  int64_t filled = 0;
  const auto middle = [&](const Tensor& h) {
    scratch.data_ptr<float>()[3] = 0.25f * static_cast<float>(++filled % 7);
    return h.sigmoid() + scratch;
  };
  ExpectSameTraining([&](Trained& run) {
    filled = 0;
    SetMiddle(run, middle);
  });
}

// The schema calls it new, and it is a view.
TEST_F(RecomputedUnitsTest, FollowsUnsafeViews) {
  std::vector<std::vector<Tensor>> states;
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    for (const auto& block : *run.net->blocks) {
      auto* const b = block->as<Block>();
      b->first = [](const Tensor& x) {
        const auto halves = (x * 1).unsafe_chunk(2, 1);
        return torch::cat({halves[0].sigmoid_(), halves[1].tanh()}, 1);
      };
    }
    for (int step = 0; step < 3; ++step) run.Step(Input(step));
    states.push_back(run.State());
  }
  ExpectSame(states[0], states[1]);
}

struct RawFunction : torch::autograd::Function<RawFunction> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x) {
    Tensor slopes = torch::empty(x.sizes());
    for (int64_t i = 0; i < slopes.numel(); ++i) {
      slopes.data_ptr<float>()[i] = static_cast<float>(i % 3);
    }
    context->save_for_backward({slopes});
    return x * 2;
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::tensor_list& gradients) {
    return {gradients[0] * context->get_saved_variables()[0]};
  }
};

// What no operator reads, autograd alone.
TEST_F(RecomputedUnitsTest, KeepsWhatARawPointerFilledForBackward) {
  const auto middle = [](const Tensor& h) { return RawFunction::apply(h); };
  ExpectSameTraining([&](Trained& run) {
    run.recompute()->set_check("never");
    SetMiddle(run, middle);
  });
}

TEST_F(RecomputedUnitsTest, KeepsAModuleOfNestedTensors) {
  const auto middle = [](const Tensor& h) {
    const Tensor nested = at::_nested_tensor_from_tensor_list(
        {h.detach().narrow(0, 0, 3), h.detach().narrow(0, 3, 2)});
    return h * nested.to_padded_tensor(0).sum();
  };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
}

// ---- autograd functions

struct Cubed : torch::autograd::Function<Cubed> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x) {
    const Tensor squared = x * x;
    context->save_for_backward({x, squared});
    return squared * x;
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::tensor_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * 3 * saved[1] + 0 * saved[0]};
  }
};

TEST_F(RecomputedUnitsTest, FollowsAutogradFunctions) {
  const auto middle = [](const Tensor& h) { return Cubed::apply(h); };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
  EXPECT_EQ(ReportOf(middle).given_up, kBlocks);
}

// ---- what cannot be computed again is kept

int64_t drawn = 0;
Tensor ScaledByCalls(const Tensor& x) {
  return x * static_cast<double>(1 + drawn++ % 5);
}
Tensor ScaledSilently(const Tensor& x) { return x * 2; }

TORCH_LIBRARY(recomputed_units_test, m) {
  m.def("scaled_by_calls(Tensor x) -> Tensor");
  m.def("scaled_silently",
        torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(ScaledSilently)));
}
TORCH_LIBRARY_IMPL(recomputed_units_test, CPU, m) {
  m.impl("scaled_by_calls", &ScaledByCalls);
}

Tensor Call(const char* name, const Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Tensor(const Tensor&)>()
      .call(x);
}

TEST_F(RecomputedUnitsTest, KeepsAModuleWhoseBitsDiffer) {
  const auto middle = [](const Tensor& h) {
    return h * Call("recomputed_units_test::scaled_by_calls", h.detach());
  };
  const RecomputeReport report = ReportOf(middle);
  EXPECT_EQ(report.given_up, 0);
  ASSERT_EQ(report.unable.size(), static_cast<size_t>(kBlocks));
  EXPECT_THAT(report.unable[1],
              AllOf(HasSubstr("[blocks.1] what "),
                    HasSubstr("scaled_by_calls made has other bits")));
}

TEST_F(RecomputedUnitsTest, KeepsAModuleWithAnOperatorThatMayWrite) {
  const auto middle = [](const Tensor& h) {
    return h + Call("recomputed_units_test::scaled_silently", h.detach());
  };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
  const RecomputeReport report = ReportOf(middle);
  ASSERT_EQ(report.unable.size(), static_cast<size_t>(kBlocks));
  EXPECT_THAT(report.unable[0],
              HasSubstr("scaled_silently does not say which of its arguments "
                        "it writes"));
}

TEST_F(RecomputedUnitsTest, KeepsAModuleThatWritesAParameter) {
  const auto prepare = [](Trained& run) {
    for (const auto& block : *run.net->blocks) {
      auto* const b = block->as<Block>();
      b->middle = [b](const Tensor& h) {
        torch::NoGradGuard no_grad;
        b->down->bias.mul_(0.5);
        torch::AutoGradMode grad(true);
        return h * 1;
      };
    }
  };
  ExpectSameTraining(prepare);
  Trained run("full");
  prepare(run);
  run.Step(Input(0));
  EXPECT_THAT(run.engine->last_step().recompute.unable,
              Contains(HasSubstr("mul_ writes a parameter")));
}

// ---- what changes between forward and backward

// A block's input is written after the block has read it: autograd allows it.
TEST_F(RecomputedUnitsTest, FollowsWritesToWhatItRead) {
  const auto loss = [](Trained& run, const Tensor& input) {
    Tensor x = input.clone();
    for (const auto& block : *run.net->blocks) {
      const Tensor mask = torch::ones({kTokens, kDim});  // not small
      // Read by an operator that saves nothing of it.
      const Tensor y = block->as<Block>()->forward(x + mask);
      mask.mul_(3);
      x = y + mask;
    }
    return run.net->head(x).square().mean();
  };
  std::vector<std::vector<Tensor>> states;
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    run.Create();
    for (int step = 0; step < 3; ++step) {
      run.loss = loss(run, Input(step));
      run.losses.push_back(run.loss.detach());
      TESSERA_ASSERT_OK(run.engine->Backward(run.loss));
      TESSERA_ASSERT_OK(run.engine->Step());
    }
    states.push_back(run.State());
  }
  ExpectSame(states[0], states[1]);
}

TEST_F(RecomputedUnitsTest, ToldOfWritesToWhatIsSavedAsByLibtorch) {
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    Tensor kept;
    SetMiddle(run, [&](const Tensor& h) {
      kept = h.sigmoid();  // saves its result
      return kept * 2;
    });
    run.Create();
    run.Forward(Input(0));
    kept.detach().zero_();
    EXPECT_THAT(run.engine->Backward(run.loss).ToString(),
                HasSubstr("modified by an inplace operation"))
        << policy;
    // And goes on.
    SetMiddle(run, nullptr);
    run.Step(Input(1));
  }
}

// ---- how it is used

TEST_F(RecomputedUnitsTest, UnpacksTwice) {
  std::vector<std::vector<Tensor>> states;
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    run.Create();
    run.Forward(Input(0));
    BackwardOptions again;
    again.retain_graph = true;
    TESSERA_ASSERT_OK(run.engine->Backward(run.loss, again));
    TESSERA_ASSERT_OK(run.engine->Backward(run.loss));
    TESSERA_ASSERT_OK(run.engine->Step());
    states.push_back(run.State());
  }
  ExpectSame(states[0], states[1]);
}

TEST_F(RecomputedUnitsTest, DifferentiatesTwice) {
  std::vector<std::vector<Tensor>> states;
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    run.Create();
    Tensor x = Input(0).requires_grad_();
    run.Forward(x);
    const auto gradients =
        torch::autograd::grad({run.loss}, {x}, {}, /*retain_graph=*/true,
                              /*create_graph=*/true);
    run.loss = run.loss + gradients[0].square().sum();
    TESSERA_ASSERT_OK(run.engine->Backward(run.loss));
    TESSERA_ASSERT_OK(run.engine->Step());
    states.push_back(run.State());
  }
  ExpectSame(states[0], states[1]);
}

TEST_F(RecomputedUnitsTest, EvaluatesBetween) {
  ExpectSameTraining([](Trained& run) {
    run.Create();
    run.Forward(Input(7));  // and no backward
    torch::NoGradGuard no_grad;
    run.net->eval();
    run.Forward(Input(8));
    run.net->train();
  });
}

TEST_F(RecomputedUnitsTest, HoldsNothingAfterwards) {
  Trained run("full");
  run.Step(Input(0));
  run.losses.clear();
  run.loss = Tensor();
  const int64_t before = HeldBytes::get();
  for (int i = 0; i < 5; ++i) {
    run.Step(Input(i));
    run.losses.clear();
    run.loss = Tensor();
    run.Forward(Input(i));  // dropped
    run.loss = Tensor();
  }
  TESSERA_ASSERT_OK(run.engine->ZeroGrad());
  EXPECT_EQ(HeldBytes::get(), before);
}

// What the last operator of a block makes is the next one's input, which is
// held.
TEST_F(RecomputedUnitsTest, RunsNoMoreThanIsNeeded) {
  Trained run("full");
  for (const auto& block : *run.net->blocks) {
    auto* const b = block->as<Block>();
    b->middle = [](const Tensor& h) {
      // The second is needed for the first's backward alone, which saves
      // nothing.
      return h + Call("recomputed_units_test::scaled_by_calls", h.detach());
    };
  }
  run.recompute()->set_check("never");
  drawn = 0;
  run.Step(Input(0));
  // `down` saves the sum.
  EXPECT_EQ(drawn, 2 * kBlocks);
  SetMiddle(run, nullptr);
  for (const auto& block : *run.net->blocks) {
    auto* const b = block->as<Block>();
    b->last = [](const Tensor& h) {
      return h + Call("recomputed_units_test::scaled_by_calls", h.detach());
    };
  }
  drawn = 0;
  run.Step(Input(1));
  EXPECT_EQ(drawn, kBlocks);
}

// A unit is whole for what is computed again and for its backward: gathered
// once for both.
TEST_F(RecomputedUnitsTest, GathersNoMore) {
  std::vector<std::vector<std::string>> gathers;
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    run.zero()->set_stage3_max_reuse_distance(0);
    run.zero()->set_stage3_prefetch_bucket_size(0);
    run.Step(Input(0));
    run.communicator->Take();
    run.Step(Input(1));
    gathers.emplace_back();
    for (const auto& call : run.communicator->Take()) {
      if (call.operation == "all-gather") gathers.back().push_back(call.what);
    }
  }
  EXPECT_GT(gathers[0].size(), static_cast<size_t>(2 * kBlocks - 1));
  EXPECT_EQ(gathers[0], gathers[1]);
}

// ---- what is chosen

TEST_F(RecomputedUnitsTest, TakesEachSecondModule) {
  Trained run("full");
  run.recompute()->set_every(2);
  run.Step(Input(0));
  EXPECT_EQ(run.engine->last_step().recompute.given_up, kBlocks / 2);
}

TEST_F(RecomputedUnitsTest, TakesWhatRepeatsByItself) {
  Trained run("full");
  run.recompute()->clear_units();
  run.recompute()->add_units("auto");
  run.Step(Input(0));
  EXPECT_EQ(run.engine->last_step().recompute.given_up, kBlocks);
}

TEST_F(RecomputedUnitsTest, KeepsSoManyBytes) {
  Trained all("full");
  all.Step(Input(0));
  const int64_t block =
      all.engine->last_step().recompute.given_up_bytes / kBlocks;
  Trained run("full");
  run.recompute()->set_budget_bytes(2 * block + block / 2);
  for (int i = 0; i < 2; ++i) {
    run.Step(Input(i));
    EXPECT_EQ(run.engine->last_step().recompute.given_up, kBlocks - 2);
    EXPECT_EQ(run.engine->last_step().recompute.kept, 2);
  }
}

TEST_F(RecomputedUnitsTest, NamesAClassThatIsNotThere) {
  Trained run("full");
  run.recompute()->add_units("Blok");
  EXPECT_THAT(run.TryCreate().ToString(),
              AllOf(HasSubstr("activation_checkpointing.units"),
                    HasSubstr("Blok"), HasSubstr("Block")));
}

}  // namespace
}  // namespace tessera
