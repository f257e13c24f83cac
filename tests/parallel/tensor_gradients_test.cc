// Whose the gradient of a divided parameter is, and when: an engine's hooks
// take the part's away.

#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "parallel/tensor/placed.h"
#include "tests/parallel/tensor_programs.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

using at::Tensor;
using Hook = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// A divided parameter, and a loss of it.
struct Divided {
  explicit Divided(const World& world)
      : group(std::make_shared<PartGroup>(world.communicator())),
        parts(DivideNet(net, group)),
        parameter(net->a->up->weight),
        part(parts.at("a.up.weight")) {}
  void Backward() const {
    const Tensor x = at::ones({2, DividedNetImpl::kDim}, at::kDouble);
    at::matmul(x, parameter.t()).square().sum().backward();
  }

  DividedNet net;
  std::shared_ptr<PartGroup> group;
  std::map<std::string, Tensor> parts;
  Tensor parameter, part;
};

// What part.grad() and parameter.grad() have to do with each other.
std::string GradientsOf(const Divided& of) {
  if (!of.parameter.grad().defined()) {
    return of.part.grad().defined() ? "the part's alone" : "none";
  }
  const Placed* const placed = PlacedOf(of.parameter.grad());
  return placed == nullptr                      ? "an ordinary tensor"
         : placed->part.is_same(of.part.grad()) ? "one"
                                                : "another than the part's";
}

TESSERA_RANK_FUNCTION(GradientOfAParameter) {
  Divided divided(world);
  std::string all = GradientsOf(divided);
  const auto add = [&] { absl::StrAppend(&all, ", ", GradientsOf(divided)); };
  divided.Backward();
  add();
  divided.Backward();
  add();
  divided.part.mutable_grad() = divided.part.grad() * 1;
  add();
  divided.part.mutable_grad().reset();
  add();
  divided.Backward();
  add();
  divided.net->zero_grad();
  absl::StrAppend(&all, divided.part.grad().defined() ? ", kept" : ", gone");
  return all;
}

TEST(TensorGradients, AreThoseOfTheParts) {
  for (auto& answer : RankPool::Get(2)->Run("GradientOfAParameter", "")) {
    EXPECT_THAT(answer, IsOkAndHolds("none, one, one, one, none, one, gone"));
  }
}

// Takes a parameter's gradient, as an engine does.
class TakesGradient final : public torch::autograd::PostAccumulateGradHook {
 public:
  TakesGradient(Hook previous, WeakStorage* taken)
      : previous_(std::move(previous)), taken_(taken) {}
  void operator()(const Tensor& tensor) override {
    if (previous_ != nullptr) (*previous_)(tensor);
    *taken_ = tensor.grad().storage().getWeakStorageImpl();
    tensor.mutable_grad().reset();
  }

 private:
  const Hook previous_;
  WeakStorage* const taken_;
};

// The user's own: looks at it.
class SeesGradient final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit SeesGradient(std::string* seen) : seen_(seen) {}
  void operator()(const Tensor& tensor) override {
    const bool placed =
        PlacedOf(tensor) != nullptr && PlacedOf(tensor.grad()) != nullptr;
    *seen_ += placed ? "seen, " : "not placed, ";
  }

 private:
  std::string* const seen_;
};

TESSERA_RANK_FUNCTION(GradientThatIsTaken) {
  Divided divided(world);
  std::string seen;
  WeakStorage taken{c10::intrusive_ptr<c10::StorageImpl>()};
  namespace impl = torch::autograd::impl;
  impl::set_post_acc_grad_hooks(
      divided.part,
      std::make_unique<TakesGradient>(
          std::move(impl::post_acc_grad_hooks(divided.part)), &taken));
  impl::set_post_acc_grad_hooks(divided.parameter,
                                std::make_unique<SeesGradient>(&seen));
  divided.Backward();
  absl::StrAppend(&seen, taken.expired() ? "freed, " : "held, ");
  return absl::StrCat(seen, GradientsOf(divided));
}

TEST(TensorGradients, WhatAnEngineTakesIsSeenBeforeAndNotHeld) {
  for (auto& answer : RankPool::Get(2)->Run("GradientThatIsTaken", "")) {
    EXPECT_THAT(answer, IsOkAndHolds("seen, freed, none"));
  }
}

// The parameter goes before its part, which an engine has.
TESSERA_RANK_FUNCTION(ParameterThatIsGone) {
  Tensor part, y;
  {
    Divided divided(world);
    divided.parameter.register_hook([](const Tensor& g) { return g * 2; });
    part = divided.part;
    y = (part * 3).sum();
  }
  y.backward();
  return absl::StrCat(part.grad().max().item<double>());
}

TEST(TensorGradients, APartOutlivesItsParameter) {
  for (auto& answer : RankPool::Get(2)->Run("ParameterThatIsGone", "")) {
    EXPECT_THAT(answer, IsOkAndHolds("3"));
  }
}

}  // namespace
}  // namespace tessera
