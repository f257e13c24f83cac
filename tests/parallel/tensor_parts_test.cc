// Ordinary modules whose parameters are divided among ranks: loss and gradients
// are those of the whole module, in float64, where sums in another order differ
// by some 1e-16 of the addends.

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "parallel/tensor/placed.h"
#include "tests/parallel/tensor_programs.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

using at::Tensor;

const TensorPrograms& Programs() {
  static const auto* const all = [] {
    auto* const programs = new TensorPrograms(ForwardPrograms());
    programs->merge(GradientPrograms());
    return programs;
  }();
  return *all;
}

double RelativeDifference(const Tensor& a, const Tensor& b) {
  return (a - b).abs().max().item<double>() /
         std::max(b.abs().max().item<double>(), 1e-30);
}

// args: "<program>", or "sequences of <program>".
TESSERA_RANK_FUNCTION(SameAsWhole) {
  const bool sequences = absl::ConsumePrefix(&args, "sequences of ");
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
  const std::map<std::string, Tensor> parts = DivideNet(net, group);
  const Tensor given =
      sequences ? Divide(tokens, TensorPlacement::Shard(1), group) : tokens;
  const Tensor loss = Whole(program(net, given));
  loss.backward();
  std::string wrong;
  const double differs = RelativeDifference(loss, expected);
  if (!(differs < 1e-13)) absl::StrAppend(&wrong, "loss by ", differs, "; ");
  for (const auto& each : whole->named_parameters()) {
    const Tensor got = parts.at(each.key()).grad();
    Tensor wanted = each.value().grad();
    if (!wanted.defined() && !got.defined()) continue;
    if (!wanted.defined()) wanted = at::zeros_like(each.value());
    const int64_t dim = ProgramDividedAlong(each.key());
    if (dim >= 0) wanted = group->SliceOf(wanted, dim);
    if (!got.defined()) {
      absl::StrAppend(&wrong, each.key(), " has no gradient; ");
      continue;
    }
    wrong += GradientDiffers(*whole, each.key(), got, wanted);
  }
  return wrong;
}

class TensorPartsTest
    : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(TensorPartsTest, LossAndGradientsAreThoseOfTheWhole) {
  const auto& [program, ranks] = GetParam();
  for (auto& answer : RankPool::Get(ranks)->Run("SameAsWhole", program)) {
    EXPECT_THAT(answer, IsOkAndHolds(""));
  }
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const auto& [name, program] : Programs()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, TensorPartsTest,
                         testing::Combine(testing::ValuesIn(Names()),
                                          testing::Values(2, 3)));

// Returns the programs whose tokens are divided beside parameters.
std::vector<std::string> NamesOfSequences() {
  std::vector<std::string> names;
  for (const auto& [name, program] : Programs()) {
    // torch::autograd::grad with respect to a placed tensor is an error.
    if (name == "a penalty of gradients") continue;
    names.push_back("sequences of " + name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Sequences, TensorPartsTest,
                         testing::Combine(testing::ValuesIn(NamesOfSequences()),
                                          testing::Values(2, 3)));

// How many collectives a forward and backward take: Megatron-LM's four a block,
// those of the embedding (1) and of the loss (2: maxima; sums and targets), and
// one for the input's gradient of the head.
TESSERA_RANK_FUNCTION(CountCollectives) {
  torch::manual_seed(3);
  DividedNet net;
  const auto group = std::make_shared<PartGroup>(world.communicator());
  DivideNet(net, group);
  const Tensor tokens =
      torch::randint(DividedNetImpl::kWords, {kProgramBatch, kProgramLength});
  Programs().at("transformer")(net, tokens).backward();
  return absl::StrCat(group->collectives());
}

TEST(TensorParts, TakeAsManyCollectivesAsMegatron) {
  for (auto& answer : RankPool::Get(2)->Run("CountCollectives", "")) {
    EXPECT_THAT(answer, IsOkAndHolds(absl::StrCat(2 * 4 + 1 + 2 + 1)));
  }
}

}  // namespace
}  // namespace tessera
