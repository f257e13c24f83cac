#include "tests/parallel/tensor_programs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace tessera {
namespace {

namespace F = torch::nn::functional;
using at::Tensor;

// Two orders of a sum differ by at most twice its addends' number of roundings,
// of their magnitude (Higham, Accuracy and Stability of Numerical Algorithms,
// 4.2). The longest sums are over the inputs of a product, then over tokens.
constexpr double kRounding =
    2 * (4 * DividedBlockImpl::kDim + kProgramBatch * kProgramLength) *
    std::numeric_limits<double>::epsilon();

// Doubles, with a backward of its own.
struct DoubledFunction : torch::autograd::Function<DoubledFunction> {
  static Tensor forward(torch::autograd::AutogradContext* /*context*/,
                        const Tensor& x) {
    return x * 2;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/,
      torch::autograd::variable_list gradients) {
    return {gradients[0] * 2};
  }
};

// x @ w^T, with a backward of its own.
struct ProductFunction : torch::autograd::Function<ProductFunction> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x, const Tensor& w) {
    context->save_for_backward({x, w});
    return at::matmul(x, w.t());
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor& g = gradients[0];
    return {at::matmul(g, saved[1]), at::matmul(g.t(), saved[0])};
  }
};

}  // namespace

DividedBlockImpl::DividedBlockImpl() {
  for (auto* each : {&q, &k, &v, &o}) *each = torch::nn::Linear(kDim, kDim);
  up = torch::nn::Linear(kDim, 4 * kDim);
  down = torch::nn::Linear(4 * kDim, kDim);
  register_module("n1", n1);
  register_module("n2", n2);
  register_module("q", q);
  register_module("k", k);
  register_module("v", v);
  register_module("o", o);
  register_module("up", up);
  register_module("down", down);
}

Tensor DividedBlockImpl::Heads(const Tensor& x) {
  return x.view({x.size(0), x.size(1), kHeads, x.size(2) / kHeads})
      .transpose(1, 2);
}

Tensor DividedBlockImpl::forward(Tensor x) {
  const Tensor y = n1(x);
  const Tensor mixed = at::scaled_dot_product_attention(
      Heads(q(y)), Heads(k(y)), Heads(v(y)), {}, 0., true);
  x = x + o(mixed.transpose(1, 2).reshape(x.sizes()));
  return x + down(F::gelu(up(n2(x))));
}

DividedNetImpl::DividedNetImpl() {
  register_module("words", words);
  register_module("a", a);
  register_module("b", b);
  register_module("head", head);
  to(at::kDouble);
}

Tensor ProgramTargets(const Tensor& tokens) {
  return (tokens * 7 + 3).remainder(DividedNetImpl::kWords);
}

Tensor ProgramLoss(DividedNet& net, const Tensor& x, const Tensor& tokens) {
  return F::cross_entropy(net->head(x).flatten(0, 1),
                          ProgramTargets(tokens).flatten());
}

Tensor DoubledByFunction(const Tensor& x) { return DoubledFunction::apply(x); }

Tensor ProductByFunction(const Tensor& x, const Tensor& w) {
  return ProductFunction::apply(x, w);
}

int64_t ProgramDividedAlong(const std::string& name) {
  for (const char* const column : {".q.", ".k.", ".v.", ".up."}) {
    if (absl::StrContains(name, column)) return 0;
  }
  if (name == "words.weight" || name == "head.weight") return 0;
  const bool row = absl::StrContains(name, ".o.weight") ||
                   absl::StrContains(name, ".down.weight");
  return row ? 1 : -1;
}

std::string GradientDiffers(const torch::nn::Module& whole,
                            const std::string& parameter, const Tensor& got,
                            const Tensor& wanted) {
  const auto layer_of = [](const std::string& name) {
    return name.substr(0, name.rfind('.'));
  };
  double most = 0;  // of the layer
  for (const auto& each : whole.named_parameters()) {
    const Tensor gradient = each.value().grad();
    if (!gradient.defined() || layer_of(each.key()) != layer_of(parameter)) {
      continue;
    }
    most = std::max(most, gradient.abs().max().item<double>());
  }
  // One that is 0 in theory (of a key's bias) has addends of that magnitude.
  const double own = wanted.abs().max().item<double>();
  if (own > kRounding * most) most = own;
  const double by = (got - wanted).abs().max().item<double>();
  if (by <= kRounding * most) return "";
  return absl::StrCat(parameter, " by ", by, " of ", most, "; ");
}

std::map<std::string, Tensor> DivideNet(
    DividedNet& net, const std::shared_ptr<PartGroup>& group) {
  std::map<std::string, Tensor> parts;
  for (const auto& each : net->named_parameters()) {
    const int64_t dim = ProgramDividedAlong(each.key());
    if (dim < 0) {
      parts[each.key()] = each.value();
      continue;
    }
    Tensor part;
    {
      torch::NoGradGuard no_grad;
      part = group->SliceOf(each.value(), dim).clone();
    }
    part.requires_grad_();
    PlaceInPlace(each.value(), part, TensorPlacement::Shard(dim), group);
    parts[each.key()] = part;
  }
  return parts;
}

TensorPrograms ForwardPrograms() {
  return {
      {"transformer",
       [](DividedNet& net, const Tensor& t) {
         return ProgramLoss(net, net->Hidden(t), t);
       }},
      {"ignored targets",
       [](DividedNet& net, const Tensor& t) {
         Tensor next = ProgramTargets(t).flatten();
         next = next.masked_fill(next.lt(9), -100);
         return F::cross_entropy(
             net->head(net->Hidden(t)).flatten(0, 1), next,
             F::CrossEntropyFuncOptions().reduction(torch::kSum));
       }},
      {"smoothed targets",
       [](DividedNet& net, const Tensor& t) {
         return F::cross_entropy(
             net->head(net->Hidden(t)).flatten(0, 1),
             ProgramTargets(t).flatten(),
             F::CrossEntropyFuncOptions().label_smoothing(0.1));
       }},
      {"attention by hand",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->words(t);
         const Tensor q = net->a->Heads(net->a->q(x)),
                      k = net->a->Heads(net->a->k(x)),
                      v = net->a->Heads(net->a->v(x));
         Tensor scores = q.matmul(k.transpose(-2, -1)) / std::sqrt(2.0);
         const Tensor later =
             at::ones({kProgramLength, kProgramLength}, at::kBool).triu(1);
         scores.masked_fill_(later, -1e9);
         const Tensor mixed = at::softmax(scores, -1).matmul(v);
         return ProgramLoss(
             net, net->a->o(mixed.permute({0, 2, 1, 3}).flatten(2)), t);
       }},
      {"writes in place",
       [](DividedNet& net, const Tensor& t) {
         Tensor y = net->a->up(net->words(t));
         y.mul_(0.5).add_(1).cumsum_(2);  // without a rule
         y.select(0, 1).mul_(3);
         y.relu_();
         return ProgramLoss(net, net->a->down(y), t);
       }},
      {"operators without a rule",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         const Tensor flipped = y.flip({2}).cumsum(2) * 0.01;
         const Tensor parts = at::cat(at::chunk(y, 4, 2), 0);
         return ProgramLoss(net, net->a->down(y + flipped), t) +
                parts.square().mean();
       }},
      {"lists of parts",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         const std::vector<Tensor> rows = y.split(2, 1);
         const Tensor both =
             at::stack({at::cat(rows, 1), y.unsqueeze(0).squeeze(0)}, 0);
         return ProgramLoss(
             net, net->a->down(both.mean({0}) + both.sum({0}) * 0.1), t);
       }},
      {"a function of the user's",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = DoubledByFunction(net->a->up(net->words(t)));
         return ProgramLoss(net, net->a->down(y.relu()), t);
       }},
      {"sums over what is divided",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         const Tensor scale = y.sum({-1}, true) * 0.01;
         return ProgramLoss(net, net->a->down(y * scale), t) + y.mean();
       }},
      {"a function of what was written through a view",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         y.select(0, 1).mul_(3);
         return DoubledByFunction(y).square().mean() +
                ProgramLoss(net, net->words(t), t);
       }},
      {"a function of a parameter",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->words(t).flatten(0, 1);
         const Tensor y = ProductByFunction(x, net->a->up->weight);
         return ProgramLoss(net, net->a->down(y.relu()).unsqueeze(0), t);
       }},
      {"two steps",
       [](DividedNet& net, const Tensor& t) {
         ProgramLoss(net, net->Hidden(t), t).backward();
         {
           torch::NoGradGuard no_grad;
           for (Tensor& p : net->parameters()) p.mul_(0.9);
         }
         return ProgramLoss(net, net->Hidden(t), t);
       }},
      {"a function's result, written",
       [](DividedNet& net, const Tensor& t) {
         Tensor y = DoubledByFunction(net->a->up(net->words(t)));
         y.relu_();
         return ProgramLoss(net, net->a->down(y), t);
       }},
      {"means and types",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         const Tensor all = y.mean(at::IntArrayRef{});
         const Tensor one = at::full({1}, 2.0, at::kFloat).type_as(y).sum();
         const Tensor none = at::dropout(y, 1.0, true);
         Tensor out = at::zeros({0}, at::kDouble);
         {
           torch::NoGradGuard no_grad;
           at::mul_out(out, y, y);
         }
         return ProgramLoss(net, net->a->down(y + none), t) + all * one +
                out.sum();
       }},
      {"values that are read",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         const double most = y.abs().max().item<double>();
         Tensor scaled = y / most;
         if (scaled.select(1, 0).sum().item<double>() > 0) scaled = -scaled;
         return ProgramLoss(net, net->a->down(scaled), t);
       }},
      {"sizes by values",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = net->a->up(net->words(t));
         const Tensor rows = at::nonzero(y.gt(0.1));
         const Tensor some = y.masked_select(y.lt(-0.1));
         const Tensor words = y.index({t.gt(9)});
         return ProgramLoss(net, net->a->down(y), t) + some.square().sum() +
                words.mean() * static_cast<double>(rows.size(0));
       }},
      {"a penalty of gradients",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->words(t).detach().requires_grad_();
         const Tensor loss =
             ProgramLoss(net, net->a->down(net->a->up(x).tanh()), t);
         const Tensor gradient =
             torch::autograd::grad({loss}, {x}, {}, true, true)[0];
         return loss + gradient.square().sum();
       }},
      {"parameters by themselves",
       [](DividedNet& net, const Tensor& t) {
         Tensor penalty = at::zeros({}, at::kDouble);
         for (const Tensor& p : net->parameters())
           penalty = penalty + p.pow(2).sum();
         return ProgramLoss(net, net->Hidden(t), t) + penalty * 0.01;
       }},
  };
}

}  // namespace tessera
