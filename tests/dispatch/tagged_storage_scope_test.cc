// Tests where operators on parameters that an engine owns run: on several
// threads, under the user's thread-local state, and inside of the user's own
// operators.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "sharding/dispatch/tag.h"
#include "tests/dispatch/tagged_storage_util.h"
#include "torch/csrc/autograd/forward_grad.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"
#include "torch/library.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(TaggedStorageTest, EngineCodeRunsUnderItsOwnStateInInferenceMode) {
  auto t = PairTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8});
  auto loss = [&](auto& m) { return MeanSquare(m(x)); };
  {
    c10::InferenceMode inference;
    const int64_t before = t.comm->gathers();
    const at::Tensor got = t.tagged(x);
    EXPECT_EQ(t.comm->gathers() - before, 2);  // one for each unit
    EXPECT_TRUE(SameBits(t.plain(x), got));
    TESSERA_ASSERT_OK_AND_ASSIGN(at::Tensor copy,
                                 t.engine->Parameter("a.weight"));
    EXPECT_FALSE(copy.is_inference());
  }
  t.Backward(loss);
  {
    c10::InferenceMode inference;
    TESSERA_ASSERT_OK_AND_ASSIGN(at::Tensor copy,
                                 t.engine->Gradient("a.weight"));
    EXPECT_FALSE(copy.is_inference());
    TESSERA_EXPECT_OK(t.engine->Step());
  }
  t.StepPlain();
  t.ExpectSameParameters();
  t.Train(loss);
  EXPECT_EQ(t.comm->leaks(), 0);
}

// Autocast for its life, as a user would switch it on.
class Autocast {
 public:
  explicit Autocast(bool cache)
      : cache_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(cache);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_cache_enabled(cache_);
    at::autocast::clear_cache();
    at::autocast::decrement_nesting();
  }

 private:
  const bool cache_;
};

TEST_F(TaggedStorageTest, EngineCodeRunsUnderItsOwnStateUnderAutocast) {
  for (bool cache : {false, true}) {
    SCOPED_TRACE(cache);
    auto t = PairTwins();
    t.Create();
    const at::Tensor x = torch::randn({4, 8});
    // Forward alone, and then all of it.
    t.Train([&](auto& m) {
      Autocast autocast(cache);
      const at::Tensor y = m(x);
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      return MeanSquare(y.to(at::kFloat));
    });
    Autocast autocast(cache);
    t.Backward([&](auto& m) { return MeanSquare(m(x).to(at::kFloat)); });
    t.ExpectSameGradients();
    TESSERA_EXPECT_OK(t.engine->Step());
    t.StepPlain();
    t.ExpectSameParameters();
    EXPECT_EQ(t.comm->leaks(), 0);
  }
}

TEST_F(TaggedStorageTest, EngineCodeRunsUnderItsOwnStateInForwardAD) {
  auto t = PairTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}), x_tangent = torch::randn({4, 8});
  const at::Tensor w_tangent = torch::randn({8, 8});
  auto tangents = [&](Pair& m) {
    const auto level = torch::autograd::ForwardADLevel::get_next_idx();
    std::vector<at::Tensor> out;
    const at::Tensor of_x = m(at::_make_dual(x, x_tangent, level));
    const at::Tensor of_w = torch::linear(
        x, at::_make_dual(m->b->weight, w_tangent, level), m->a->bias);
    for (const at::Tensor& y : {of_x, of_w}) {
      auto [primal, tangent] = at::_unpack_dual(y, level);
      out.push_back(primal.detach());
      out.push_back(tangent.detach());
    }
    torch::autograd::ForwardADLevel::release_idx(level);
    return out;
  };
  const auto expected = tangents(t.plain), got = tangents(t.tagged);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(SameBits(expected[i], got[i])) << i;
  }
  t.Train([&](auto& m) { return MeanSquare(m(x)); });
  EXPECT_EQ(t.comm->leaks(), 0);
}

// These are a user's own operators. The second weight of `captured` is not
// among its arguments. `hidden_write` changes its argument, and its schema,
// inferred from the signature, does not say so. The schema of `lies` says that
// it does not write. `raw` reads through a pointer; `halves` writes inside.
at::Tensor captured_weight;
at::Tensor Captured(const at::Tensor& x, const at::Tensor& w) {
  return torch::tanh(x.mm(w)).mm(captured_weight.t());
}
void HiddenWrite(const at::Tensor& w) {
  auto* values = static_cast<float*>(w.data_ptr());
  for (int64_t i = 0; i < w.numel(); i += 3) values[i] = 0.5F * values[i] + 1;
}
void HiddenListWrite(at::TensorList ws) {
  for (const at::Tensor& w : ws) HiddenWrite(w);
}
at::Tensor Raw(const at::Tensor& x, const at::Tensor& w) {
  return x * w.const_data_ptr<float>()[0];
}
at::Tensor Halves(const at::Tensor& x, const at::Tensor& w) {
  return x * w.detach().mul_(0.5).const_data_ptr<float>()[0];
}
TORCH_LIBRARY(tagged_storage_test, m) {
  m.def("captured(Tensor x, Tensor w) -> Tensor", &Captured);
  m.def("hidden_write", &HiddenWrite);
  m.def("hidden_list_write", &HiddenListWrite);
  m.def("lies(Tensor w) -> ()", &HiddenWrite);
  m.def("lies_of_list(Tensor[] ws) -> ()", &HiddenListWrite);
  m.def("raw(Tensor x, Tensor w) -> Tensor", &Raw);
  m.def("halves(Tensor x, Tensor w) -> Tensor", &Halves);
}
template <typename Signature>
auto UserOperator(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

TEST_F(TaggedStorageTest, CapturedWeightInAUserOperator) {
  auto t = PairTwins();
  t.Create();
  auto captured =
      UserOperator<at::Tensor(const at::Tensor&, const at::Tensor&)>(
          "tagged_storage_test::captured");
  const at::Tensor x = torch::randn({4, 8});
  for (int i = 0; i < 2; ++i) {
    t.Train([&](auto& m) {
      captured_weight = m->b->weight;
      at::Tensor y = captured.call(x, m->a->weight);
      captured_weight.reset();
      return MeanSquare(y);
    });
  }
}

TEST_F(TaggedStorageTest, RawPointerInsideOfAUserOperatorWorks) {
  auto t = PairTwins();
  t.Create();
  auto raw = UserOperator<at::Tensor(const at::Tensor&, const at::Tensor&)>(
      "tagged_storage_test::raw");
  const at::Tensor x = torch::randn({4, 8});
  EXPECT_TRUE(SameBits(raw.call(x, t.plain->b->weight),
                       raw.call(x, t.tagged->b->weight)));
  t.ExpectFreed();
}

TEST_F(TaggedStorageTest, UndeclaredWriteOfAUserOperatorIsKept) {
  auto t = PairTwins();
  t.Create();
  auto write = UserOperator<void(const at::Tensor&)>(
      "tagged_storage_test::hidden_write");
  auto write_list = UserOperator<void(at::TensorList)>(
      "tagged_storage_test::hidden_list_write");
  for (auto* m : {&t.plain, &t.tagged}) {
    write.call((*m)->a->weight);
    write_list.call({(*m)->b->weight.t().detach(), (*m)->a->bias});
  }
  t.ExpectFreed();
  t.ExpectSameParameters();
  const at::Tensor x = torch::randn({4, 8});
  t.Train([&](auto& m) { return MeanSquare(m(x)); });
}

TEST_F(TaggedStorageTest, AWriteAgainstTheSchemaIsNamedWhereWritesAreChecked) {
  auto t = PairTwins();
  TwinOptions options;
  options.check_writes = true;
  t.Create(options);
  auto lies =
      UserOperator<void(const at::Tensor&)>("tagged_storage_test::lies");
  auto lies_of_list =
      UserOperator<void(at::TensorList)>("tagged_storage_test::lies_of_list");
  auto& m = t.tagged;
  EXPECT_THAT(CatchTorch("forward", [&] { lies.call(m->b->weight.t()); }),
              FailsWith(AllOf(HasSubstr("tagged_storage_test::lies wrote "
                                        "parameter 'b.weight'"),
                              HasSubstr("Tensor(a!)"))));
  EXPECT_THAT(CatchTorch("forward",
                         [&] {
                           lies_of_list.call({m->b->weight, m->a->bias});
                         }),
              FailsWith(HasSubstr("lies_of_list wrote parameter 'b.weight'")));
  t.ExpectFreed();
  t.ExpectSameParameters();  // and it is lost
}

TEST_F(TaggedStorageTest, ReadsAndDeclaredWritesPassWhereWritesAreChecked) {
  auto t = PairTwins();
  TwinOptions options;
  options.check_writes = true;
  t.Create(options);
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&);
  auto raw = UserOperator<Signature>("tagged_storage_test::raw");
  auto halves = UserOperator<Signature>("tagged_storage_test::halves");
  const at::Tensor x = torch::randn({4, 8});
  torch::NoGradGuard no_grad;
  for (const auto& op : {raw, halves}) {
    EXPECT_TRUE(SameBits(op.call(x, t.plain->b->weight),
                         op.call(x, t.tagged->b->weight)));
  }
  t.ExpectFreed();
  t.ExpectSameParameters();
}

// Custom functions that read a parameter through a raw pointer. y = x * w[0].
struct RawInForward : torch::autograd::Function<RawInForward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w.contiguous().const_data_ptr<float>()[0];
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const float first = saved[1].const_data_ptr<float>()[0];
    at::Tensor gradient = torch::zeros_like(saved[1]);
    gradient.view(-1)[0] = (gradients[0] * saved[0]).sum();
    return {gradients[0] * first, gradient};
  }
};
struct RawInBackward : torch::autograd::Function<RawInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w.view(-1)[0];
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    return RawInForward::backward(context, std::move(gradients));
  }
};

TEST_F(TaggedStorageTest, RawPointerInForwardNamesTheParameterAndUseMendsIt) {
  auto t = PairTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  EXPECT_THAT(
      CatchTorch("forward",
                 [&] { RawInForward::apply(x, t.tagged->b->weight); }),
      FailsWith(AllOf(HasSubstr("'b.weight'"), HasSubstr("tessera::Use(w)"))));
  t.ExpectFreed();
  for (int i = 0; i < 2; ++i) {
    t.Train([&](auto& m) {
      auto pin = Use(m->b->weight);  // costs nothing for a plain tensor
      return MeanSquare(RawInForward::apply(m(x), m->b->weight));
    });
  }
}

TEST_F(TaggedStorageTest, RawPointerInBackwardOfACustomFunctionWorks) {
  auto t = PairTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  for (int i = 0; i < 2; ++i) {
    t.Train([&](auto& m) {
      return MeanSquare(RawInBackward::apply(m(x), m->a->weight));
    });
  }
}

// A process group of the user's own that writes only when it is waited for.
class LateWork : public c10d::Work {
 public:
  explicit LateWork(std::vector<at::Tensor> tensors)
      : tensors_(std::move(tensors)) {}
  bool wait(std::chrono::milliseconds) override {
    for (const at::Tensor& t : std::exchange(tensors_, {})) HiddenWrite(t);
    return true;
  }

 private:
  std::vector<at::Tensor> tensors_;
};
class LateBackend : public c10d::Backend {
 public:
  LateBackend() : Backend(/*rank=*/0, /*size=*/1) {}
  const std::string getBackendName() const override { return "late"; }
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions&) override {
    return c10::make_intrusive<LateWork>(tensors);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<LateWork>(tensors);
  }
};

TEST_F(TaggedStorageTest, CollectiveOfTheUserOnParametersIsKept) {
  auto t = PairTwins();
  t.Create();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, /*size=*/1);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<LateBackend>());
  for (auto* m : {&t.plain, &t.tagged}) {
    std::vector<at::Tensor> weights = {(*m)->a->weight, (*m)->b->weight};
    std::vector<at::Tensor> bias = {(*m)->b->bias.detach()};
    auto broadcast = group->broadcast(weights);
    auto allreduce = group->allreduce(bias);
    TESSERA_EXPECT_OK(CatchTorch("wait", [&] {
      broadcast->wait();
      allreduce->wait();
    }));
  }
  t.ExpectFreed();
  t.ExpectSameParameters();
}

void OtherFallback(const c10::OperatorHandle&, torch::jit::Stack*) {}

TEST_F(TaggedStorageTest, SecondRegistrationOfTheKeyIsRefused) {
  torch::Library other(torch::Library::IMPL, "_", kTagKey, __FILE__, __LINE__);
  EXPECT_THAT(
      CatchTorch(
          "register",
          [&] {
            other.fallback(
                torch::CppFunction::makeFromBoxedFunction<&OtherFallback>());
          }),
      FailsWith(HasSubstr("multiple backend fallbacks")));
  TESSERA_EXPECT_OK(CheckTagFallback());
  auto t = LinearTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8});
  t.Train([&](auto& m) { return MeanSquare(m(x)); });
}

}  // namespace
}  // namespace tessera
