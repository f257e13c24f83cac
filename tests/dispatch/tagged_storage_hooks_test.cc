// Hooks of the user, and errors, in a backward over parameters that an engine
// owns: what is kept, what is found, what an error leaves behind.
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/torch/grad_access.h"
#include "tests/dispatch/tagged_storage_util.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::Values;

// A user's hook, whose behaviour a test sets.
class Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit Hook(std::function<void(const at::Tensor&)> f) : f_(std::move(f)) {}
  void operator()(const at::Tensor& parameter) override { f_(parameter); }

  static void Set(const at::Tensor& parameter,
                  std::function<void(const at::Tensor&)> f) {
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameter, std::make_unique<Hook>(std::move(f)));
  }

 private:
  std::function<void(const at::Tensor&)> f_;
};

class ExceptionIn
    : public TaggedStorageTest,
      public ::testing::WithParamInterface<std::tuple<std::string, int>> {
 protected:
  const std::string& where() const { return std::get<0>(GetParam()); }

  at::Tensor Loss(Pair& m, const at::Tensor& x) {
    const bool* armed = &armed_;
    at::Tensor h;
    if (where() == "ReentrantBackward") {
      auto segment = [m, armed](const at::Tensor& in) {
        auto a = m->a;
        at::Tensor out = torch::tanh(a(in));
        if (out.requires_grad()) {
          out.register_hook([armed](const at::Tensor& g) {
            TORCH_CHECK(!*armed, "the hook failed");
            return g;
          });
        }
        return out;
      };
      h = RecomputedSegment::apply(x, segment);
    } else {
      h = torch::tanh(m->a(x));
    }
    if (where() == "Forward")
      h = m->b(h.narrow(1, 0, armed_ ? 7 : 8));
    else
      h = m->b(h);
    return MeanSquare(h);
  }

  bool armed_ = false;
};

INSTANTIATE_TEST_SUITE_P(
    TaggedStorageTest, ExceptionIn,
    ::testing::Combine(Values("FirstPostAccumulateHook",
                              "LastPostAccumulateHook", "TensorHook",
                              "ReentrantBackward", "Forward"),
                       Values(1, 3)),
    [](const auto& info) {
      return std::get<0>(info.param) + "Stage" +
             std::to_string(std::get<1>(info.param));
    });

TEST_P(ExceptionIn, AHookDiscardsTheMicroBatch) {
  auto t = PairTwins();
  auto fail = [this](const at::Tensor&) {
    TORCH_CHECK(!armed_, "the hook failed");
  };
  if (where() == "FirstPostAccumulateHook") {
    Hook::Set(t.tagged->b->bias, fail);
  } else if (where() == "LastPostAccumulateHook") {
    Hook::Set(t.tagged->a->weight, fail);
  }
  TwinOptions options;
  options.stage = std::get<1>(GetParam());
  options.accumulation = 2;
  t.Create(options);
  if (where() == "TensorHook") {
    t.tagged->a->weight.register_hook([this](const at::Tensor& g) {
      TORCH_CHECK(!armed_, "the hook failed");
      return g;
    });
  }
  std::vector<at::Tensor> xs;
  for (int i = 0; i < 4; ++i) {
    xs.push_back(torch::randn({4, 8}).requires_grad_());
  }
  auto micro_batch = [&](int i) {
    t.Backward([&](Pair& m) { return Loss(m, xs[i]); });
    TESSERA_EXPECT_OK(t.engine->Step());
  };
  auto failed_micro_batch = [&] {
    armed_ = true;
    const absl::Status status = [&]() -> absl::Status {
      at::Tensor loss;
      TESSERA_RETURN_IF_ERROR(
          CatchTorch("forward", [&] { loss = Loss(t.tagged, xs[3]); }));
      return t.engine->Backward(loss);
    }();
    armed_ = false;
    EXPECT_THAT(status,
                FailsWith(AllOf(
                    StartsWith(where() == "Forward" ? "forward" : "backward"),
                    HasSubstr(where() == "Forward" ? "shapes" : "failed"))));
    t.ExpectFreed();
    for (const auto& p : t.tagged->parameters()) {
      EXPECT_FALSE(PeekGrad(p).defined());
    }
  };
  for (int step = 0; step < 2; ++step) {
    failed_micro_batch();
    micro_batch(0);
    failed_micro_batch();
    micro_batch(1);
    t.StepPlain();
    t.ExpectSameParameters();
  }
}

TEST_F(TaggedStorageTest, FailedGatherDiscardsTheMicroBatch) {
  auto t = PairTwins();
  TwinOptions options;
  options.accumulation = 2;
  t.Create(options);
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  auto loss = [&](auto& m) { return MeanSquare(m(x)); };
  auto fail = [&](int64_t gather) -> absl::Status {
    t.comm->FailGather(gather);
    at::Tensor y;
    TESSERA_RETURN_IF_ERROR(CatchTorch("forward", [&] { y = loss(t.tagged); }));
    return t.engine->Backward(y);
  };
  // Forward gathers both units; so does backward, for the inputs' gradients.
  for (int64_t gather = 1; gather <= 4; ++gather) {
    SCOPED_TRACE(gather);
    if (gather % 2 == 0) {
      t.Backward(loss);
      TESSERA_EXPECT_OK(t.engine->Step());
    }
    EXPECT_THAT(fail(gather), StatusIs(absl::StatusCode::kUnavailable,
                                       HasSubstr("the gather failed")));
    t.ExpectFreed();
  }
  t.StepPlain();
  t.ExpectSameParameters();
  t.Train(loss);
}

TEST_F(TaggedStorageTest, HookSetBeforeCreateIsKept) {
  auto t = PairTwins();
  at::Tensor noted;
  Hook::Set(t.tagged->b->bias,
            [&](const at::Tensor& p) { noted = p.grad().clone(); });
  t.Create();
  const at::Tensor x = torch::randn({4, 8});
  t.Backward([&](auto& m) { return MeanSquare(m(x)); });
  EXPECT_TRUE(SameBits(noted, t.PlainGradient(3)));
}

TEST_F(TaggedStorageTest, HookThatTakesThePlaceOfTheEnginesIsFound) {
  auto t = PairTwins();
  t.Create();
  Hook::Set(t.tagged->b->bias, [](const at::Tensor&) {});
  const at::Tensor x = torch::randn({4, 8});
  EXPECT_THAT(
      t.engine->Backward(MeanSquare(t.tagged(x))),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("'b.bias'")));
}

// A graph may outlive the engine: its saved parameters are plain memory then.
TEST_F(TaggedStorageTest, GraphThatOutlivesTheEngineIsRunAsInPlainTorch) {
  auto t = PairTwins();
  TwinOptions options;
  options.max_live = 1000000;
  t.Create(options);
  const at::Tensor x = torch::randn({4, 8});
  const at::Tensor plain = MeanSquare(t.plain(x));
  const at::Tensor tagged = MeanSquare(t.tagged(x));
  TESSERA_ASSERT_OK(t.engine->Close());
  t.engine.reset();
  plain.backward();
  tagged.backward();
  for (size_t i = 0; i < t.plain->parameters().size(); ++i) {
    EXPECT_TRUE(SameBits(t.plain->parameters()[i].grad(),
                         t.tagged->parameters()[i].grad()));
  }
}

TEST_F(TaggedStorageTest, UnitIsReducedWhileBackwardGoesOn) {
  auto t = PairTwins();
  int64_t begun = 0;  // when backward has come to the first layer
  Hook::Set(t.tagged->a->weight,
            [&](const at::Tensor&) { begun = t.comm->reductions(); });
  t.Create();
  const at::Tensor x = torch::randn({4, 8});
  auto begun_early = [&] {
    const int64_t before = t.comm->reductions();
    t.Train([&](auto& m) { return MeanSquare(m(x)); });
    EXPECT_EQ(t.comm->reductions() - before, 2);
    return begun - before;
  };
  EXPECT_EQ(begun_early(), 1);
  {
    torch::NoGradGuard evaluation;
    t.tagged(x);
  }
  begun_early();  // may wait: a reentrant checkpoint looks like that
  EXPECT_EQ(begun_early(), 1);
}

}  // namespace
}  // namespace tessera
