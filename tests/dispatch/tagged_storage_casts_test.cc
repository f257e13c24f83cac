// Casts by hand of parameters that an engine owns, which are saved for
// backward, and what becomes of saved casts when something is changed.
#include <torch/torch.h>

#include <functional>
#include <regex>
#include <string>
#include <vector>

#include "tests/dispatch/autocast_scope.h"
#include "tests/dispatch/held_bytes.h"
#include "tests/dispatch/tagged_storage_util.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Casts a parameter, a view of it, and one to a wider dtype.
at::Tensor HandCasts(Pair& m, const at::Tensor& x) {
  const at::Tensor a = m->a->weight.to(at::kBFloat16);
  const at::Tensor b = m->b->weight.t().narrow(0, 2, 4).to(at::kHalf);
  const at::Tensor c = m->b->weight.to(at::kDouble);
  const at::Tensor h = torch::tanh(x.to(at::kBFloat16).mm(a.t()));
  const at::Tensor g = torch::tanh(h.narrow(1, 1, 4).to(at::kHalf).mm(b));
  return MeanSquare(g.to(at::kDouble).mm(c) * m->a->bias.to(at::kDouble));
}

TEST_F(TaggedStorageTest, CastsByHand) {
  auto t = PairTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  auto held = [&](Pair& m) {
    HeldBytes bytes;
    const at::Tensor loss = HandCasts(m, x);
    return bytes.get();
  };
  int64_t plain;
  {
    PlainAutograd plain_autograd;
    plain = held(t.plain);
  }
  EXPECT_EQ(plain - held(t.tagged), 64 * 2 + 32 * 2 + 64 * 8 + 8 * 8);
  for (int i = 0; i < 2; ++i) {
    t.Train([&](auto& m) { return HandCasts(m, x); });
  }
}

// A function of the user's own that saves a cast which it made itself.
struct SavesACast : torch::autograd::Function<SavesACast> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const at::Tensor& w) {
    const at::Tensor cast = w.to(at::kBFloat16);
    context->save_for_backward({x, cast});
    return x.mm(cast.t());
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1]),
            gradients[0].t().mm(saved[0]).to(at::kFloat)};
  }
};

TEST_F(TaggedStorageTest, CastInAFunctionOfTheUser) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).to(at::kBFloat16).requires_grad_();
  for (int i = 0; i < 2; ++i) {
    t.Train(
        [&](auto& m) { return MeanSquare(SavesACast::apply(x, m->weight)); });
  }
}

// A cast that is no longer one is saved as it is.
TEST_F(TaggedStorageTest, CastThatWasChangedIsKept) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).to(at::kBFloat16).requires_grad_();
  t.Train([&](auto& m) {
    at::Tensor cast = m->weight.to(at::kBFloat16);
    {
      torch::NoGradGuard no_grad;
      cast.mul_(3);
    }
    return MeanSquare(x.mm(cast));
  });
  t.Train([&](auto& m) {
    at::Tensor cast = m->weight.detach().to(at::kBFloat16);
    at::Tensor alias = cast.data();
    alias.add_(1);
    return MeanSquare(x.mm(alias)) + MeanSquare(m->bias);
  });
  t.Train([&](auto& m) {  // the same memory, seen otherwise
    at::Tensor cast = m->weight.detach().to(at::kBFloat16);
    return MeanSquare(x.to(at::kHalf).mm(cast.view(at::kHalf))) +
           MeanSquare(m->bias);
  });
}

TEST_F(TaggedStorageTest, CastFromBeforeAStepKeepsItsValues) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).to(at::kBFloat16).requires_grad_();
  const at::Tensor plain = t.plain->weight.detach().to(at::kBFloat16);
  const at::Tensor tagged = t.tagged->weight.detach().to(at::kBFloat16);
  for (int i = 0; i < 2; ++i) {
    t.Train([&](torch::nn::Linear& m) {
      const at::Tensor& old = m.get() == t.plain.get() ? plain : tagged;
      return MeanSquare(torch::tanh(x.mm(old)).to(at::kFloat) * m->bias +
                        m(x.to(at::kFloat)));
    });
  }
}

TEST_F(TaggedStorageTest, StepBetweenForwardAndBackwardNamesTheCast) {
  auto t = PairTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  const std::vector<std::function<at::Tensor(Pair&)>> losses = {
      [&](auto& m) {
        LocalAutocast autocast(/*cache=*/false);
        return MeanSquare(m->a(x));
      },
      [&](auto& m) { return MeanSquare(x * m->a->weight.to(at::kDouble)[0]); },
      [&](auto& m) {  // with a version counter of its own
        return MeanSquare(x * m->a->weight.data().to(at::kDouble)[0]);
      }};
  auto train = [&](auto& m) { return MeanSquare(m(x)); };
  for (const auto& loss : losses) {
    const at::Tensor late = loss(t.tagged);
    t.Train(train);
    EXPECT_THAT(
        t.engine->Backward(late),
        FailsWith(AllOf(
            HasSubstr("modified by an inplace operation: [CPUFloatType [8, 8]] "
                      "is at version "),
            HasSubstr("parameter 'a.weight', which was cast to "),
            HasSubstr("clone()"))));
    t.ExpectFreed();
    t.Train(train);
  }
}

TEST_F(TaggedStorageTest, InPlaceChangeOfASavedCastIsTheErrorOfPlainTorch) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor x = torch::randn({4, 8}).requires_grad_();
  auto changed = [&](torch::nn::Linear& m) {
    at::Tensor cast = m->weight.to(at::kDouble);
    const at::Tensor loss = MeanSquare(x.to(at::kDouble).mm(cast));
    torch::NoGradGuard no_grad;
    cast.mul_(2);
    return loss;
  };
  const absl::Status expected =
      t.BackwardPlain(t.ForwardPlain([&](auto& m) { return changed(m); }));
  ASSERT_THAT(expected, FailsWith(HasSubstr("modified by an inplace")));
  // libtorch does not tell hooks where a saved tensor came from.
  const std::string words =
      std::regex_replace(std::string(expected.message()),
                         std::regex(", which is output \\d+ of \\w+,"), "");
  EXPECT_EQ(std::string(t.engine->Backward(changed(t.tagged)).message()),
            words);
  t.ExpectFreed();
}

}  // namespace
}  // namespace tessera
