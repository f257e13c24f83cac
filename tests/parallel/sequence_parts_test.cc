// Ordinary modules that are given parts of sequences: loss, and the sum of the
// ranks' gradients, are those of whole sequences, in float64, where sums in
// another order differ by some 1e-16 of the addends.

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "gtest/gtest.h"
#include "parallel/tensor/divide_sequence.h"
#include "parallel/tensor/placed.h"
#include "tests/parallel/tensor_programs.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

namespace F = torch::nn::functional;
using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;

Tensor Attend(DividedNet& net, const Tensor& x, int64_t heads,
              int64_t key_heads, const Tensor& mask, bool causal) {
  const auto split = [](const Tensor& of, int64_t into) {
    return of.view({of.size(0), of.size(1), into, -1}).transpose(1, 2);
  };
  const int64_t dims = DividedBlockImpl::kDim / heads * key_heads;
  const Tensor mixed = at::scaled_dot_product_attention(
      split(net->a->q(x), heads),
      split(net->a->k(x).slice(2, 0, dims), key_heads),
      split(net->a->v(x).slice(2, 0, dims), key_heads),
      mask.defined() ? std::optional<Tensor>(mask) : std::nullopt, 0., causal,
      std::nullopt, /*enable_gqa=*/heads != key_heads);
  return net->a->o(mixed.transpose(1, 2).flatten(2));
}

Tensor RandomMask(at::IntArrayRef sizes) {
  Tensor mask = (at::arange(c10::multiply_integers(sizes)) % 7).view(sizes);
  return mask.gt(1).logical_or(mask.eq(0)).to(at::kBool);
}

TensorPrograms SequencePrograms() {
  return {
      {"positions",
       [](DividedNet& net, const Tensor& t) {
         const Tensor places = net->words(at::arange(t.size(1)));
         const Tensor x = net->words(t) + places + net->words->weight[3];
         return ProgramLoss(net, net->b(net->a(x)), t);
       }},
      {"heads that share keys",
       [](DividedNet& net, const Tensor& t) {
         return ProgramLoss(net, Attend(net, net->words(t), 12, 6, {}, true),
                            t);
       }},
      {"one head",
       [](DividedNet& net, const Tensor& t) {
         return ProgramLoss(net, Attend(net, net->words(t), 1, 1, {}, true), t);
       }},
      {"one head of one sequence",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->words(t).narrow(0, 0, 1);
         return Attend(net, x, 1, 1, {}, true).square().mean() +
                Attend(net, x, 1, 1, {}, false).abs().mean();
       }},
      {"masks",
       [](DividedNet& net, const Tensor& t) {
         const int64_t n = t.size(1);
         const Tensor x = net->words(t), one = x.narrow(0, 1, 1);
         return Attend(net, x, 6, 6, RandomMask({n, n}), false).square().sum() +
                Attend(net, x, 6, 6, RandomMask({2, 1, n, n}), false)
                    .square()
                    .sum() +
                Attend(net, x, 6, 6, RandomMask({6, n, n}), false).sum() +
                Attend(net, one, 1, 1, RandomMask({n, n}), false)
                    .square()
                    .sum() +
                Attend(net, one, 1, 1, RandomMask({1, n}), false)
                    .square()
                    .sum();
       }},
      {"a bias of attention that is trained",
       [](DividedNet& net, const Tensor& t) {
         const Tensor bias =
             net->words->weight.narrow(0, 0, 6).narrow(1, 0, 6).unsqueeze(0);
         return ProgramLoss(net, Attend(net, net->words(t), 6, 6, bias, false),
                            t);
       }},
      {"keys of another sequence",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->words(t), memory = net->words(at::arange(5));
         const Tensor mixed = at::scaled_dot_product_attention(
             net->a->Heads(net->a->q(x)),
             net->a->Heads(net->a->k(memory.unsqueeze(0).expand({2, 5, 12}))),
             net->a->Heads(net->a->v(memory.unsqueeze(0).expand({2, 5, 12}))));
         return ProgramLoss(net, net->a->o(mixed.transpose(1, 2).flatten(2)),
                            t);
       }},
      {"rotations",
       [](DividedNet& net, const Tensor& t) {
         const Tensor q = net->a->Heads(net->a->q(net->words(t)));
         const Tensor angles =
             at::arange(t.size(1)).unsqueeze(1) * at::arange(1, 3, at::kDouble);
         const Tensor halves = at::cat({-q.slice(3, 1), q.slice(3, 0, 1)}, 3);
         const Tensor turned = q * angles.cos() + halves * angles.sin();
         return ProgramLoss(net, turned.transpose(1, 2).flatten(2), t);
       }},
      {"the next token",
       [](DividedNet& net, const Tensor& t) {
         const Tensor logits = net->head(net->Hidden(t));
         return F::cross_entropy(logits.slice(1, 0, -1).flatten(0, 1),
                                 t.slice(1, 1).flatten());
       }},
      {"losses of elements",
       [](DividedNet& net, const Tensor& t) {
         const Tensor y = net->Hidden(t), wanted = at::sin(y.detach());
         const auto sum = at::Reduction::Sum;
         return at::mse_loss(y, wanted) + at::l1_loss(y, wanted, sum) +
                at::smooth_l1_loss(y, at::zeros_like(y)) +
                at::huber_loss(y, at::ones({12}, at::kDouble)) +
                at::binary_cross_entropy_with_logits(
                    y, at::rand({6, 12}, at::kDouble)
                           .lt(2)
                           .to(at::kDouble)
                           .expand({2, 6, 12}));
       }},
      {"losses of classes",
       [](DividedNet& net, const Tensor& t) {
         const Tensor logits = net->head(net->Hidden(t));
         const Tensor likely = at::log_softmax(logits, -1).flatten(0, 1);
         const Tensor wanted = ProgramTargets(t);
         return at::nll_loss(likely, wanted.flatten()) +
                F::cross_entropy(logits.transpose(1, 2), wanted) +
                F::cross_entropy(
                    logits.flatten(0, 1), wanted.flatten(),
                    F::CrossEntropyFuncOptions().reduction(torch::kNone))
                    .square()
                    .mean() +
                F::cross_entropy(logits.flatten(0, 1), wanted.flatten(),
                                 F::CrossEntropyFuncOptions().weight(
                                     at::arange(1, 19, at::kDouble)));
       }},
      {"classes that do not count",  // of more samples at the end
       [](DividedNet& net, const Tensor& t) {
         const Tensor logits = net->head(net->Hidden(t));
         const Tensor counts = at::arange(t.size(1)).lt(t.size(1) - 2);
         const Tensor wanted =
             ProgramTargets(t).masked_fill(counts.logical_not(), -100);
         return F::cross_entropy(logits.flatten(0, 1), wanted.flatten()) +
                F::cross_entropy(logits.transpose(1, 2), wanted).square();
       }},
      {"weights that are computed",
       [](DividedNet& net, const Tensor& t) {
         const Tensor w = net->a->q->weight;
         const Tensor unit = w / w.norm(2, 1, true);
         const Tensor low = net->a->k->weight.slice(0, 0, 2);
         const Tensor x = net->words(t);
         const Tensor y = at::linear(x, unit + low.t().matmul(low)) +
                          x.matmul(net->a->v->weight.t());
         return ProgramLoss(net, y, t);
       }},
      {"a convolution and a mean of all",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->words(t);
         const Tensor y =
             at::conv1d(x.transpose(1, 2), net->a->q->weight.unsqueeze(2));
         const Tensor pooled = x.mean(1) + x.amax(1) + y.mean(2);
         return F::cross_entropy(net->head(pooled),
                                 ProgramTargets(t).select(1, 0));
       }},
      {"a position of all",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->Hidden(t);
         return F::cross_entropy(net->head(x.select(1, -1)),
                                 ProgramTargets(t).select(1, 0)) +
                x.index({at::tensor({0, 1}), at::tensor({2, 5})}).sum();
       }},
      {"a word before the others",
       [](DividedNet& net, const Tensor& t) {
         const Tensor first = net->words->weight.slice(0, 0, 1).unsqueeze(0);
         const Tensor x = at::cat({first.expand({2, 1, 12}), net->words(t)}, 1);
         return net->b(net->a(x)).select(1, 0).square().sum();
       }},
      {"writes",
       [](DividedNet& net, const Tensor& t) {
         Tensor y = net->words(t).clone();
         y += net->words->weight[1];
         Tensor scale = net->a->n1->weight * 2;  // of copies alone
         scale += y.detach().mean(1).mean(0);
         scale.mul_(net->a->n2->weight + 1);
         Tensor all = at::zeros({12}, at::kDouble);
         all += scale;
         return ProgramLoss(net, y * scale + all, t);
       }},
      {"rows that experts choose",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->Hidden(t).flatten(0, 1);
         const Tensor shares = net->a->up(x).narrow(1, 0, 2).softmax(-1);
         Tensor y = at::zeros_like(x);
         for (int64_t i = 0; i < 2; ++i) {
           auto expert = i == 0 ? net->a->q : net->a->o;
           const Tensor rows = shares.argmax(-1).eq(i).nonzero().squeeze(-1);
           const Tensor share = shares.select(1, i).index_select(0, rows);
           const Tensor mixed = expert(x.index_select(0, rows));
           y = y.index_add(0, rows, mixed * share.unsqueeze(-1));
         }
         return ProgramLoss(net, y.view({2, 6, 12}), t);
       }},
      {"a recurrence",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->Hidden(t);
         Tensor state = at::zeros({2, 12}, at::kDouble);
         std::vector<Tensor> states;
         for (int64_t i = 0; i < x.size(1); ++i) {
           state = at::tanh(net->a->q(state) + x.select(1, i));
           states.push_back(state);
         }
         return ProgramLoss(net, at::stack(states, 1), t);
       }},
      {"numbers of all",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->Hidden(t);
         const Tensor y = (x - x.mean()) / (x.std() + 1) + x / x.norm();
         return ProgramLoss(net, y * x.detach().amax(), t);
       }},
      {"random numbers of positions that come first",
       [](DividedNet& net, const Tensor& t) {
         torch::manual_seed(9);
         const Tensor x = net->words(t).transpose(0, 1);
         const Tensor y = at::dropout(x, 0.5, true) + at::randn_like(x) +
                          at::dropout(net->a->Heads(x), 0.5, true)
                              .transpose(1, 2)
                              .flatten(2);
         return ProgramLoss(net, y.transpose(0, 1), t);
       }},
      {"writes to positions that come first",
       [](DividedNet& net, const Tensor& t) {
         Tensor x = net->words(t.t()) * 1;
         x.cumsum_(0);
         return ProgramLoss(net, x.transpose(0, 1), t);
       }},
      {"a mean that 16 bits hold",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->words(t) * 0 + 40000;
         return x.to(at::kHalf).mean().to(at::kDouble);
       }},
      {"experts of each sequence",
       [](DividedNet& net, const Tensor& t) {
         const Tensor x = net->words(t);
         const Tensor w = at::stack({net->a->q->weight, net->a->k->weight});
         return ProgramLoss(net, at::einsum("btd,bde->bte", {x, w}), t);
       }},
  };
}

const TensorPrograms& Programs() {
  static const auto* const all = [] {
    auto* const programs = new TensorPrograms(ForwardPrograms());
    programs->merge(SequencePrograms());
    // torch::autograd::grad with respect to a placed tensor is an error.
    programs->erase("a penalty of gradients");
    return programs;
  }();
  return *all;
}

// Makes the parameters copies; returns their parts, by name.
std::map<std::string, Tensor> CopyNet(DividedNet& net,
                                      const std::shared_ptr<PartGroup>& group) {
  std::map<std::string, Tensor> parts;
  for (const auto& each : net->named_parameters()) {
    const Tensor part = each.value().detach().requires_grad_();
    PlaceInPlace(each.value(), part, TensorPlacement::Copy(), group);
    parts[each.key()] = part;
  }
  return parts;
}

TESSERA_RANK_FUNCTION(SameAsWholeSequences) {
  const TensorProgram& program = Programs().at(std::string(args));
  const auto make = [] {
    torch::manual_seed(3);
    return DividedNet();
  };
  torch::manual_seed(4);
  const Tensor tokens =
      torch::randint(DividedNetImpl::kWords, {kProgramBatch, kProgramLength});
  DividedNet whole = make();
  const Tensor expected = program(whole, tokens);
  expected.backward();

  DividedNet net = make();
  const auto group = std::make_shared<PartGroup>(world.communicator());
  const std::map<std::string, Tensor> parts = CopyNet(net, group);
  const Tensor loss = Whole(program(net, DivideSequence(*net, tokens, 1)));
  loss.backward();
  std::string wrong;
  const double differs = (loss - expected).abs().item<double>() /
                         std::max(expected.abs().item<double>(), 1e-30);
  if (!(differs < 1e-13)) absl::StrAppend(&wrong, "loss by ", differs, "; ");
  for (const auto& each : whole->named_parameters()) {
    const auto zeros = at::zeros_like(each.value());
    const Tensor mine = parts.at(each.key()).grad();
    const Tensor got = group->SumOf(mine.defined() ? mine : zeros);
    const Tensor grad = each.value().grad();
    const Tensor wanted = grad.defined() ? grad : zeros;
    wrong += GradientDiffers(*whole, each.key(), got, wanted);
  }
  return wrong;
}

class SequencePartsTest
    : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(SequencePartsTest, LossAndGradientsAreThoseOfWholeSequences) {
  const auto& [program, ranks] = GetParam();
  for (auto& answer :
       RankPool::Get(ranks)->Run("SameAsWholeSequences", program)) {
    EXPECT_THAT(answer, IsOkAndHolds("")) << program;
  }
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const auto& [name, program] : Programs()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, SequencePartsTest,
                         testing::Combine(testing::ValuesIn(Names()),
                                          testing::Values(2, 3)));

// DeepSpeed-Ulysses' four exchanges of an attention, as many in backward, and
// the sum of the loss: nothing is gathered.
TESSERA_RANK_FUNCTION(CountSequenceCollectives) {
  torch::manual_seed(3);
  DividedNet net;
  const auto group = std::make_shared<PartGroup>(world.communicator());
  CopyNet(net, group);
  const Tensor tokens =
      torch::randint(DividedNetImpl::kWords, {kProgramBatch, kProgramLength});
  Programs().at("transformer")(net, DivideSequence(*net, tokens, 1)).backward();
  return absl::StrCat(group->collectives());
}

TEST(SequenceParts, TakeAsManyCollectivesAsUlysses) {
  for (auto& answer : RankPool::Get(2)->Run("CountSequenceCollectives", "")) {
    EXPECT_THAT(answer, IsOkAndHolds(absl::StrCat(2 * 8 + 1)));
  }
}

TEST(DivideSequenceTest, LeavesWhatNoEngineHas) {
  DividedNet net;
  const Tensor tokens = at::zeros({2, 5}, at::kLong);
  EXPECT_TRUE(DivideSequence(*net, tokens, 1).is_same(tokens));
}

TESSERA_RANK_FUNCTION(DivideWhatCannotBe) {
  DividedNet net;
  CopyNet(net, std::make_shared<PartGroup>(world.communicator()));
  std::string errors;
  for (const int64_t dim : {1, 2, -3}) {
    const absl::Status status = CatchTorch("", [&] {
      (void)DivideSequence(*net, at::zeros({2, 5}, at::kLong), dim);
    });
    absl::StrAppend(&errors, status.ToString(), "\n");
  }
  return errors;
}

TEST(DivideSequenceTest, NamesTheDimension) {
  for (auto& answer : RankPool::Get(2)->Run("DivideWhatCannotBe", "")) {
    EXPECT_THAT(answer, IsOkAndHolds(AllOf(
                            HasSubstr("dimension 1 of a tensor [2, 5] is to be "
                                      "divided by 2 ranks"),
                            HasSubstr("dimension 2 of"),
                            HasSubstr("dimension -3 of"))));
  }
}

}  // namespace
}  // namespace tessera
