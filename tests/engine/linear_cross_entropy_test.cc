// LinearCrossEntropy beside its formula in float64: loss and gradients, of all
// dtypes, reductions and chunk sizes. Under an engine:
// tests/equivalence/chunked_loss_test.cc; its memory:
// tests/memory/chunked_loss_memory_test.cc.
//
// The bounds, first order, with u of float32 (of float64 for float64) and w of
// the dtype (0 where it is float32 or float64), for a token with logits z:
//   dz     (D + 2) u (|h| |W| + |b|) + w |z|
//   loss   e = 2 max dz + (V + 4 + 2 R) u: half of 2 max dz for each of
//          log-sum-exp and the target's logit; V for the sum, 2 R for the
//          exponents' roundings, 4 for log, sum and the last difference. With
//          smoothing s besides V R s u, for the mean of all logits
//   p      p (exp(e + 3 u) - 1), relative as its exponent is absolute
//   d      p - T with T the target's distribution: the error of p, 4 u (p + T),
//          and w |d| as it is rounded for the products
//   hidden d W: |error of d| |W| + (V + 5) u |d| |W|, and 2 w for two roundings
//   weight d^T h: the same with N + 5, w |d|^T |h| for the chunks' products, w
//   bias   the sum of d: the same without h
// float16 has absolute errors, too: half of 2^-24 for each rounding.
#include "nn/linear_cross_entropy.h"

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/torch_guard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/dispatch/autocast_scope.h"

namespace tessera {
namespace {

namespace F = torch::nn::functional;
using at::Tensor;
using ::testing::HasSubstr;
using Options = LinearCrossEntropyOptions;
using Reduction = Options::Reduction;

struct Case {
  std::vector<int64_t> tokens;  // sizes
  int64_t dim = 0, words = 0;
  at::ScalarType dtype = at::kFloat;
  int64_t chunk = 0;
  bool bias = false, ignored = false;
  double smoothing = 0;
  Reduction reduction = Reduction::kMean;

  bool narrow() const { return dtype != at::kFloat && dtype != at::kDouble; }
  double u() const { return dtype == at::kDouble ? 0x1p-53 : 0x1p-24; }
  double w() const {
    return dtype == at::kBFloat16 ? 0x1p-8 : dtype == at::kHalf ? 0x1p-11 : 0;
  }
  double tiny() const { return dtype == at::kHalf ? 0x1p-25 : 0; }
  std::string ToString() const {
    return absl::StrCat("[", absl::StrJoin(tokens, ", "), "] tokens of ", dim,
                        ", ", words, " words, ", at::toString(dtype), " chunk ",
                        chunk, bias ? " bias" : "", ignored ? " ignored" : "",
                        " smoothing ", smoothing,
                        reduction == Reduction::kSum ? " sum" : "");
  }
};

struct Inputs {
  explicit Inputs(const Case& c) {
    torch::manual_seed(5);
    std::vector<int64_t> sizes = c.tokens;
    sizes.push_back(c.dim);
    hidden = torch::randn(sizes).to(c.dtype).requires_grad_();
    weight = torch::randn({c.words, c.dim}).to(c.dtype).requires_grad_();
    targets = torch::randint(c.words, c.tokens, torch::kLong);
    options.chunk = c.chunk;
    options.label_smoothing = c.smoothing;
    options.reduction = c.reduction;
    if (c.ignored) {
      options.ignore_index = 3;
      targets.flatten().slice(0, 1, std::nullopt, 3).fill_(3);
    }
    if (c.bias) {
      options.bias = torch::randn({c.words}).to(c.dtype).requires_grad_();
    }
  }
  // Returns the gradients of hidden, weight and, if there is one, bias.
  std::vector<Tensor> Backward(const Tensor& loss, double factor) {
    std::vector<Tensor> leaves = {hidden, weight};
    if (options.bias.defined()) leaves.push_back(options.bias);
    return torch::autograd::grad({loss}, leaves,
                                 {torch::full({}, factor, loss.options())});
  }
  Tensor PlainLoss() const {
    const Tensor logits = at::linear(hidden, weight, options.bias);
    auto plain = F::CrossEntropyFuncOptions()
                     .ignore_index(options.ignore_index)
                     .label_smoothing(options.label_smoothing);
    if (options.reduction == Reduction::kSum) plain.reduction(torch::kSum);
    return F::cross_entropy(
        logits.flatten(0, -2).to(
            logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat),
        targets.flatten(), plain);
  }

  Tensor hidden, weight, targets;
  Options options;
};

// What is computed exactly, and by how much it may differ.
struct Exact {
  Exact(const Case& c, const Inputs& in, double factor) {
    const torch::NoGradGuard no_grad;
    const auto wide = [](const Tensor& t) {
      return t.detach().to(at::kDouble);
    };
    const Tensor h = wide(in.hidden).reshape({-1, c.dim}), m = wide(in.weight);
    const Tensor b = c.bias ? wide(in.options.bias) : torch::zeros({c.words});
    const Tensor z = h.mm(m.t()) + b;
    const Tensor targets = in.targets.flatten();
    const Tensor counts =
        targets.ne(in.options.ignore_index).to(at::kDouble).unsqueeze(1);
    const double u = c.u(), w = c.w(), s = c.smoothing;
    const auto V = static_cast<double>(c.words);
    const auto N = static_cast<double>(targets.numel());
    const Tensor dz = (static_cast<double>(c.dim) + 2) * u *
                          (h.abs().mm(m.t().abs()) + b.abs()) +
                      w * z.abs() + c.tiny();
    const Tensor distance = (z.amax(1, true) - z).amax(1, true);
    const Tensor e = 2 * dz.amax(1, true) + (V + 4 + 2 * distance) * u;
    const Tensor wanted = torch::zeros_like(z)
                              .scatter_(1, targets.unsqueeze(1), 1 - s)
                              .add_(s / V);
    const Tensor log_p = torch::log_softmax(z, 1);
    const Tensor losses = -(wanted * log_p).sum(1, true) * counts;
    const Tensor loss_bounds =
        counts * (e + V * distance * (s * u)) + (N + 4) * u * losses;
    const bool mean = c.reduction == Reduction::kMean;
    const double share = mean ? 1 / counts.sum().item<double>() : 1;
    Add(losses.sum() * share, loss_bounds.sum() * share);

    const Tensor p = log_p.exp(), d = (p - wanted) * counts;
    const Tensor dd =
        counts * (p * (e + 3 * u).expm1() + 4 * u * (p + wanted)) +
        w * d.abs() + c.tiny();
    const double scale = share * factor;
    const auto add = [&](const Tensor& value, const Tensor& error,
                         const Tensor& sum, double terms, double roundings) {
      Add(value * scale, (error + (terms + 5) * u * sum +
                          roundings * w * value.abs() + c.tiny()) *
                                 std::abs(scale) +
                             c.tiny());
    };
    const Tensor of_hidden = d.mm(m);
    add(of_hidden, dd.mm(m.abs()), d.abs().mm(m.abs()), V, 2);
    const Tensor size = d.t().abs().mm(h.abs());
    add(d.t().mm(h), dd.t().mm(h.abs()) + w * size, size, N, 1);
    if (c.bias) add(d.sum(0), dd.sum(0), d.abs().sum(0), N, 1);
  }
  void Add(const Tensor& value, const Tensor& bound) {
    values.push_back(value);
    bounds.push_back(bound);
  }
  // Expects loss and gradients `got` to be within the bounds.
  void ExpectNear(const std::vector<Tensor>& got, const char* whose) const {
    static const char* const kNames[] = {"loss", "hidden", "weight", "bias"};
    ASSERT_EQ(got.size(), values.size());
    for (size_t i = 0; i < got.size(); ++i) {
      const Tensor error =
          (got[i].detach().to(at::kDouble).reshape(values[i].sizes()) -
           values[i])
              .abs();
      const double worst = (error / bounds[i])
                               .masked_fill(error.eq(0), 0)  // of no bound
                               .max()
                               .item<double>();
      EXPECT_LE(worst, 1) << whose << ": " << kNames[i]
                          << ", shares of the bound";
    }
  }
  std::vector<Tensor> values, bounds;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const int64_t chunk : {0, 1, 7, 16, 40}) {
      Case c;
      c.tokens = {4, 10};
      c.dim = 24;
      c.words = 53;
      c.dtype = dtype;
      c.chunk = chunk;
      cases.push_back(c);
      c.bias = c.ignored = true;
      cases.push_back(c);
      c.smoothing = 0.1;
      c.reduction = Reduction::kSum;
      cases.push_back(c);
    }
  }
  cases.push_back({{700}, 16, 1031, at::kFloat, 256, true, true, 0.2});
  return cases;
}

TEST(LinearCrossEntropyTest, IsWithinTheBound) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.ToString());
    Inputs in(c);
    const double factor = 0.7;  // the loss's gradient
    const Exact exact(c, in, factor);
    const auto results = [&](const Tensor& loss) {
      std::vector<Tensor> all = in.Backward(loss, factor);
      EXPECT_EQ(all[0].scalar_type(), c.dtype);
      all.insert(all.begin(), loss);
      return all;
    };
    const Tensor loss =
        LinearCrossEntropy(in.hidden, in.weight, in.targets, in.options);
    EXPECT_EQ(loss.scalar_type(),
              c.dtype == at::kDouble ? c.dtype : at::kFloat);
    exact.ExpectNear(results(loss), "ours");
    // The bound is a fair one: the plain loss needs as much.
    if (c.dtype == at::kHalf) continue;  // it loses small gradients
    exact.ExpectNear(results(in.PlainLoss()), "plain");
  }
}

TEST(LinearCrossEntropyTest, HasTheSameBitsInEachRun) {
  Case c{{300}, 8, 40, at::kBFloat16, 64, true};
  Inputs in(c);
  const auto run = [&] {
    return in.Backward(
        LinearCrossEntropy(in.hidden, in.weight, in.targets, in.options), 1);
  };
  const auto first = run(), second = run();
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(at::equal(first[i], second[i])) << i;
  }
}

// Gradients of numbers that need none are not computed; without any, or without
// a graph, the loss has no history.
TEST(LinearCrossEntropyTest, ComputesWhatIsNeeded) {
  Case c{{9}, 8, 5, at::kFloat, 4, true};
  Inputs in(c);
  const auto loss = [&] {
    return LinearCrossEntropy(in.hidden, in.weight, in.targets, in.options);
  };
  const Tensor all = loss();
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(loss().requires_grad());
    EXPECT_TRUE(at::equal(loss(), all));
  }
  const Tensor of_hidden = in.Backward(all, 1)[0];
  in.weight.requires_grad_(false);
  in.options.bias.requires_grad_(false);
  EXPECT_TRUE(
      at::equal(torch::autograd::grad({loss()}, {in.hidden})[0], of_hidden));
  in.hidden = in.hidden.detach();
  EXPECT_FALSE(loss().requires_grad());
}

TEST(LinearCrossEntropyTest, ARetainedGraphGivesTheSameGradients) {
  Case c{{9}, 8, 5, at::kFloat, 4};
  Inputs in(c);
  const Tensor loss =
      LinearCrossEntropy(in.hidden, in.weight, in.targets, in.options);
  const auto once = torch::autograd::grad({loss}, {in.weight}, {}, true);
  const auto again = torch::autograd::grad({loss}, {in.weight});
  EXPECT_TRUE(at::equal(once[0], again[0]));
}

// As torch's: the mean of nothing is NaN, its gradient zero.
TEST(LinearCrossEntropyTest, OfNoTokens) {
  for (const int64_t tokens : {0, 4}) {
    Case c{{tokens}, 8, 5};
    Inputs in(c);
    in.targets.fill_(in.options.ignore_index);
    const Tensor loss =
        LinearCrossEntropy(in.hidden, in.weight, in.targets, in.options);
    EXPECT_TRUE(std::isnan(loss.item<float>()));
    for (const Tensor& gradient : in.Backward(loss, 1)) {
      EXPECT_TRUE(gradient.eq(0).all().item<bool>());
    }
    in.options.reduction = Reduction::kSum;
    EXPECT_EQ(LinearCrossEntropy(in.hidden, in.weight, in.targets, in.options)
                  .item<float>(),
              0);
  }
}

// The bits are those of tensors that were cast by hand, and gradients have the
// dtypes of what was given.
TEST(LinearCrossEntropyTest, UnderAutocast) {
  Case c{{20}, 8, 11, at::kFloat, 6, true};
  Inputs in(c);
  std::vector<Tensor> got;
  Tensor loss;
  {
    const LocalAutocast autocast(/*cache=*/true);
    loss = LinearCrossEntropy(in.hidden, in.weight, in.targets, in.options);
  }
  got = in.Backward(loss, 1);
  Options options = in.options;
  options.bias = in.options.bias.to(at::kBFloat16);
  const Tensor by_hand =
      LinearCrossEntropy(in.hidden.to(at::kBFloat16),
                         in.weight.to(at::kBFloat16), in.targets, options);
  EXPECT_TRUE(at::equal(loss, by_hand));
  const auto expected = in.Backward(by_hand, 1);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
  }
}

TEST(LinearCrossEntropyTest, TheDefaultChunk) {
  EXPECT_EQ(LinearCrossEntropyChunk(256), 131072);
  EXPECT_EQ(LinearCrossEntropyChunk(32000), 1024);
  EXPECT_EQ(LinearCrossEntropyChunk(50257), 512);
  EXPECT_EQ(LinearCrossEntropyChunk(1 << 30), 256);
}

std::string ErrorOf(const Tensor& hidden, const Tensor& weight,
                    const Tensor& targets, const Options& options = {}) {
  return CatchTorch(
             "", [&] { LinearCrossEntropy(hidden, weight, targets, options); })
      .ToString();
}

TEST(LinearCrossEntropyTest, Refuses) {
  const Tensor hidden = torch::ones({2, 3, 4}), weight = torch::ones({5, 4});
  const Tensor targets = torch::zeros({2, 3}, torch::kLong);
  const auto expect = [&](const std::string& error, const std::string& text) {
    EXPECT_THAT(error, HasSubstr(absl::StrCat(
                           "INVALID_ARGUMENT: LinearCrossEntropy: ", text)));
  };
  EXPECT_EQ(ErrorOf(hidden, weight, targets), "OK");
  expect(ErrorOf(hidden, torch::ones({5}), targets),
         "weight: expected [V, D], not empty, got [5]");
  expect(ErrorOf(torch::ones({2, 3, 5}), weight, targets),
         "hidden: expected [..., 4], got [2, 3, 5]");
  expect(ErrorOf(hidden, weight, targets.flatten()),
         "targets: expected [2, 3], got [6]");
  expect(ErrorOf(hidden, weight, targets.to(torch::kInt)),
         "targets: expected int64, got Int");
  expect(ErrorOf(hidden, weight.to(torch::kLong), targets),
         "hidden and weight: expected floating-point dtypes, got Float and "
         "Long");
  expect(ErrorOf(hidden, weight, targets + 5),
         "targets: expected 0 to 4, or ignore_index -100, got 5");
  Options options;
  options.bias = torch::ones({4});
  expect(ErrorOf(hidden, weight, targets, options),
         "bias: expected [5], got [4]");
  options.bias = torch::ones({5}, torch::kDouble);
  expect(ErrorOf(hidden, weight, targets, options),
         "bias: expected Float, got Double");
  options = {};
  options.chunk = -1;
  expect(ErrorOf(hidden, weight, targets, options),
         "chunk: expected 0 or more tokens, got -1");
  options = {};
  options.label_smoothing = std::numeric_limits<double>::quiet_NaN();
  expect(ErrorOf(hidden, weight, targets, options),
         "label_smoothing: expected 0 to 1, got nan");
}

TEST(LinearCrossEntropyTest, RefusesGradientsOfGradients) {
  Case c{{9}, 8, 5};
  Inputs in(c);
  const Tensor loss =
      LinearCrossEntropy(in.hidden, in.weight, in.targets, in.options);
  const auto error = CatchTorch("", [&] {
    torch::autograd::grad({loss}, {in.hidden}, {}, /*retain_graph=*/true,
                          /*create_graph=*/true);
  });
  EXPECT_THAT(error.ToString(),
              HasSubstr("UNIMPLEMENTED: LinearCrossEntropy: no gradients of "
                        "gradients"));
}

}  // namespace
}  // namespace tessera
