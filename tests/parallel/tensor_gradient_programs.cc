#include <memory>
#include <utility>
#include <vector>

#include "tests/parallel/tensor_programs.h"

namespace tessera {
namespace {

using at::Tensor;

// Halves what has been accumulated, by the parameter's grad().
struct HalveGradient final : torch::autograd::PostAccumulateGradHook {
  void operator()(const Tensor& parameter) override {
    torch::NoGradGuard no_grad;
    parameter.grad().mul_(0.5);
  }
};

Tensor Up(DividedNet& net, const Tensor& t) {
  return net->a->up(net->words(t));
}

Tensor LossOfUp(DividedNet& net, const Tensor& y, const Tensor& t) {
  return ProgramLoss(net, net->a->down(y), t);
}

// ---- hooks ----

TensorPrograms HookPrograms() {
  return {
      {"a hook",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = Up(net, t);
         y.register_hook([](const Tensor& g) { return g * 3 + 0.01; });
         return LossOfUp(net, y.tanh(), t);
       }},
      {"a hook that comes late, and one that goes",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = Up(net, t);
         const Tensor loss = LossOfUp(net, y.tanh() + y, t);
         const unsigned gone =
             y.register_hook([](const Tensor& g) { return g * 100; });
         y.register_hook([](const Tensor& g) { return g * 3; });
         y.register_hook([](const Tensor& g) { return g + 0.01; });
         y.remove_hook(gone);
         return loss;
       }},
      {"a hook that looks at all of the gradient",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = Up(net, t);
         const auto norm = std::make_shared<Tensor>();
         y.register_hook([norm](const Tensor& g) {
           *norm = (g * g).sum();
           return g / (*norm + 1);
         });
         LossOfUp(net, y.tanh(), t).backward();
         return LossOfUp(net, Up(net, t) * *norm, t);
       }},
      {"hooks before and after a write",
       [](DividedNet& net, const Tensor& t) {
         Tensor y = Up(net, t) * 1;
         y.register_hook([](const Tensor& g) { return g * 3; });
         y.mul_(2);
         y.register_hook([](const Tensor& g) { return g + 0.01; });
         y.cumsum_(2);  // without a rule
         y.register_hook([](const Tensor& g) { return g * 0.5; });
         return LossOfUp(net, y.tanh(), t);
       }},
      {"hooks of what a function of the user's made",
       [](DividedNet& net, const Tensor& t) {
         Tensor y = DoubledByFunction(Up(net, t));
         y.register_hook([](const Tensor& g) { return g * 3; });
         const Tensor z = y.tanh();
         y.register_hook([](const Tensor& g) { return g + 0.01; });
         y.relu_();
         y.register_hook([](const Tensor& g) { return g * 0.5; });
         return LossOfUp(net, z + y, t);
       }},
      {"hooks of what a function of the user's was given",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = Up(net, t);
         y.register_hook([](const Tensor& g) { return g * 3; });
         const Tensor z = DoubledByFunction(y);
         y.register_hook([](const Tensor& g) { return g + 0.01; });
         return LossOfUp(net, z.tanh() + y, t);
       }},
      {"hooks of parameters",
       [](DividedNet& net, const Tensor& t) {
         for (const Tensor& p : net->parameters()) {
           p.register_hook([](const Tensor& g) { return g * 3 + 0.01; });
         }
         const Tensor y =
             ProductByFunction(net->words(t).flatten(0, 1), net->a->up->weight);
         const Tensor loss = ProgramLoss(net, net->Hidden(t), t);
         const unsigned gone = net->a->up->weight.register_hook(
             [](const Tensor& g) { return g * 100; });
         net->a->up->weight.remove_hook(gone);
         return loss + LossOfUp(net, y.relu().unsqueeze(0), t);
       }},
      {"hooks after accumulation",
       [](DividedNet& net, const Tensor& t) {
         for (const Tensor& p : net->parameters()) {
           torch::autograd::impl::set_post_acc_grad_hooks(
               p, std::make_unique<HalveGradient>());
         }
         ProgramLoss(net, net->Hidden(t), t).backward();
         return ProgramLoss(net, net->Hidden(t), t);
       }},
  };
}

// ---- gradients that are kept ----

TensorPrograms KeptPrograms() {
  return {
      {"a retained gradient",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = Up(net, t);
         y.retain_grad();
         for (int i = 0; i < 2; ++i) {  // accumulates
           LossOfUp(net, y.tanh(), t).backward({}, /*retain_graph=*/true);
         }
         TORCH_CHECK(y.retains_grad());
         return LossOfUp(net, Up(net, t) * (1 + y.grad()), t);
       }},
      {"a retained gradient of what is written",
       [](DividedNet& net, const Tensor& t) {
         Tensor y = DoubledByFunction(Up(net, t));
         y.retain_grad();
         y.relu_();
         LossOfUp(net, y.tanh(), t).backward();
         return LossOfUp(net, Up(net, t) * (1 + y.grad()), t);
       }},
      {"a leaf of the user's",
       [](DividedNet& net, const Tensor& t) {
         Tensor y = Up(net, t).detach().requires_grad_();
         LossOfUp(net, y.tanh(), t).backward();
         return LossOfUp(net, Up(net, t) * (1 + y.grad()), t);
       }},
      {"gradients of parameters",
       [](DividedNet& net, const Tensor& t) {
         ProgramLoss(net, net->Hidden(t), t).backward();
         Tensor penalty = at::zeros({}, at::kDouble);
         for (const Tensor& p : net->parameters()) {
           penalty = penalty + (p.grad().clone() * p).sum();
         }
         return ProgramLoss(net, net->Hidden(t), t) + penalty;
       }},
      {"gradients that are assigned",
       [](DividedNet& net, const Tensor& t) {
         int which = 0;
         for (const Tensor& p : net->parameters()) {
           torch::NoGradGuard no_grad;
           p.mutable_grad() = ++which % 2 == 0
                                  ? at::full(p.sizes(), 0.5, at::kDouble)
                                  : p.detach() * 1;
         }
         return ProgramLoss(net, net->Hidden(t), t);
       }},
      {"gradients that are dropped",
       [](DividedNet& net, const Tensor& t) {
         ProgramLoss(net, net->Hidden(t), t).backward();
         net->zero_grad();
         return LossOfUp(net, Up(net, t), t);
       }},
      {"gradients that are zeroed",
       [](DividedNet& net, const Tensor& t) {
         ProgramLoss(net, net->Hidden(t), t).backward();
         net->zero_grad(/*set_to_none=*/false);
         return LossOfUp(net, Up(net, t), t);
       }},
      {"gradients that are zeroed by hand",
       [](DividedNet& net, const Tensor& t) {
         ProgramLoss(net, net->Hidden(t), t).backward();
         for (const Tensor& p : net->parameters()) {
           p.grad().detach_();
           p.grad().zero_();
         }
         return LossOfUp(net, Up(net, t), t);
       }},
      {"history that is cut",
       [](DividedNet& net, const Tensor& t) {
         Tensor y = Up(net, t), z = DoubledByFunction(Up(net, t));
         y.detach_();
         z.detach_();
         TORCH_CHECK(y.is_leaf() && !z.requires_grad());
         return LossOfUp(net, y.tanh() + z, t);
       }},
      {"parameters that are frozen, and thawed",
       [](DividedNet& net, const Tensor& t) {
         net->a->up->weight.requires_grad_(false);
         net->a->o->weight.requires_grad_(false);
         ProgramLoss(net, net->Hidden(t), t).backward();
         net->a->o->weight.requires_grad_(true);
         return ProgramLoss(net, net->Hidden(t), t);
       }},
      {"parameters of another type, and back",
       [](DividedNet& net, const Tensor& t) {
         net->to(at::kFloat);
         ProgramLoss(net, net->Hidden(t), t).backward();
         net->zero_grad();
         net->to(at::kDouble);
         const Tensor y =
             ProductByFunction(net->words(t).flatten(0, 1), net->a->up->weight);
         return ProgramLoss(net, net->Hidden(t), t) +
                LossOfUp(net, y.relu().unsqueeze(0), t);
       }},
  };
}

// ---- optimizers, and operators of lists, which these use ----

TensorPrograms StepPrograms() {
  return {
      {"steps of an optimizer",
       [](DividedNet& net, const Tensor& t) {
         torch::optim::AdamW adam(
             net->parameters(),
             torch::optim::AdamWOptions(0.01).weight_decay(0.1));
         for (int i = 0; i < 2; ++i) {
           adam.zero_grad();
           ProgramLoss(net, net->Hidden(t), t).backward();
           torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1);
           adam.step();
         }
         adam.zero_grad();
         return ProgramLoss(net, net->Hidden(t), t);
       }},
      {"data of parameters",
       [](DividedNet& net, const Tensor& t) {
         for (const Tensor& p : net->parameters()) p.data().mul_(0.9);
         return ProgramLoss(net, net->Hidden(t), t);
       }},
      {"a forward without gradients",
       [](DividedNet& net, const Tensor& t) {
         double before = 0;
         {
           c10::InferenceMode guard;
           Tensor y = Up(net, t);
           y.mul_(0.5).cumsum_(2);
           before = LossOfUp(net, y, t).item<double>();
         }
         return ProgramLoss(net, net->Hidden(t), t) * before;
       }},
      {"lists that are written",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->words(t);
         std::vector<Tensor> ys = {net->a->up(x), x * 2, net->b->up(x)};
         at::_foreach_mul_(ys, 0.5);
         const std::vector<Tensor> others = {ys[2].detach().clone(), x,
                                             ys[0] * 1};
         at::_foreach_add_(ys, others, 0.25);
         const std::vector<Tensor> zs = at::_foreach_tanh(ys);
         at::_foreach_addcmul_(ys, zs, zs, 0.5);
         at::_foreach_add_(ys, at::ones({}, at::kDouble));
         return ProgramLoss(
             net, net->a->down(ys[0]) + ys[1] + net->b->down(ys[2]), t);
       }},
      {"lists of parameters",
       [](DividedNet& net, const Tensor& t) {
         std::vector<Tensor> all = net->parameters();
         {
           torch::NoGradGuard no_grad;
           const std::vector<Tensor> norms = at::_foreach_norm(all);
           at::_foreach_div_(all, at::_foreach_add(norms, 1.0));
           const std::vector<Tensor> old = at::_foreach_mul(all, 3.0);
           at::_foreach_lerp_(all, old, 0.25);
           at::_foreach_copy_(all, at::_foreach_clamp_max(all, 0.9));
         }
         return ProgramLoss(net, net->Hidden(t), t);
       }},
      {"lists that are written without a rule",
       [](DividedNet& net, const Tensor& t) {
         std::vector<Tensor> all = net->parameters();
         {
           torch::NoGradGuard no_grad;
           all.push_back(all[0]);
           Tensor infinite = at::zeros({1}, at::kFloat);
           at::_amp_foreach_non_finite_check_and_unscale_(
               all, infinite, at::full({1}, 0.5, at::kFloat));
         }
         return ProgramLoss(net, net->Hidden(t), t);
       }},
  };
}

}  // namespace

TensorPrograms GradientPrograms() {
  TensorPrograms all = HookPrograms();
  all.merge(KeptPrograms());
  all.merge(StepPrograms());
  return all;
}

}  // namespace tessera
