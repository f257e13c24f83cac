// Activations of divided modules that backward computes again
// (sharding/recompute), as operators or by a function of the user's: to the
// bit, although what collectives made cannot be computed by one rank.

#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/group/self_communicator.h"
#include "gtest/gtest.h"
#include "parallel/tensor/placed.h"
#include "sharding/dispatch/saved_tensors.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/recompute/checkpointed/checkpointed.h"
#include "sharding/recompute/recomputed_units.h"
#include "tests/parallel/tensor_programs.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

using at::Tensor;

// The parameters of the blocks, and the others, as an engine has them: the
// parts where they are divided.
class Flats {
 public:
  // Recomputes the blocks, if `units` is not null.
  absl::Status Make(const std::map<std::string, Tensor>& parts,
                    RecomputedUnits* units) {
    for (const char* const prefix : {"a.", "b.", ""}) {
      const std::string unit = prefix;
      std::vector<NamedParameter> named;
      for (const auto& [name, part] : parts) {
        const std::string of = name[1] == '.' ? name.substr(0, 2) : "";
        if (of == unit) named.push_back({name, part, index_++});
      }
      TESSERA_ASSIGN_OR_RETURN(
          auto flat, FlatParameter::Prepare(
                         absl::StrCat("unit ", unit), std::move(named),
                         FlatParameterOptions(), MakeSelfCommunicator(),
                         std::make_shared<Schedule>(ScheduleOptions())));
      TESSERA_RETURN_IF_ERROR(flat->Adopt());
      for (const auto& parameter : flat->parameters()) {
        if (units == nullptr || unit.empty()) continue;
        units->Add(unit, flat.get(), parameter.slot);
      }
      flats_.push_back(std::move(flat));
    }
    return absl::OkStatus();
  }
  ~Flats() {
    for (const auto& flat : flats_) flat->Abandon();
  }

 private:
  std::vector<std::shared_ptr<FlatParameter>> flats_;
  int index_ = 0;
};

// With all that is not simply computed again: sums and gathers of parts, random
// numbers, writes, functions of the user's that save placed tensors.
Tensor SecondBlock(DividedNet& net, const Tensor& x) {
  Tensor y = net->b->up(net->b->n2(x));
  y = at::dropout(y, 0.25, true);
  y = y + y.cumsum(2) * 0.01;  // without a rule
  y.relu_();
  y = DoubledByFunction(y);
  const Tensor z = ProductByFunction(x.flatten(0, 1), net->b->up->weight);
  Tensor sum = at::matmul(y, net->b->down->weight.t());
  sum.mul_(0.5);
  return x + sum.sin() + net->b->down(z.tanh()).view_as(x);
}

// What a rank has after forward and backward.
struct Result {
  std::vector<Tensor> tensors;  // loss and gradients
  RecomputeReport report;
};

absl::StatusOr<Result> Train(const World& world, absl::string_view how) {
  torch::manual_seed(3);
  DividedNet net;
  const auto group = std::make_shared<PartGroup>(world.communicator());
  const std::map<std::string, Tensor> parts = DivideNet(net, group);
  RecomputedUnits units{RecomputeOptions()};
  Flats flats;
  TESSERA_RETURN_IF_ERROR(
      flats.Make(parts, how == "operators" ? &units : nullptr));
  const Tensor tokens =
      torch::randint(DividedNetImpl::kWords, {kProgramBatch, kProgramLength});
  const auto first = [&](const Tensor& x) { return net->a(x); };
  const auto second = [&](const Tensor& x) { return SecondBlock(net, x); };
  const Tensor x = net->words(tokens);
  const Tensor y = how == "function"
                       ? Checkpointed(second, Checkpointed(first, x))
                       : second(first(x));
  Result result;
  const Tensor loss = ProgramLoss(net, y, tokens);
  units.EndForward();
  loss.backward();
  units.EndBackward();
  result.report = units.TakeReport();
  result.tensors.push_back(loss.detach());
  for (const auto& [name, part] : parts) {
    result.tensors.push_back(part.grad().defined() ? part.grad().clone()
                                                   : Tensor());
  }
  return result;
}

TESSERA_RANK_FUNCTION(RecomputedBits) {
  InstallSavedTensorHooks();
  TESSERA_ASSIGN_OR_RETURN(const Result plain, Train(world, ""));
  TESSERA_ASSIGN_OR_RETURN(const Result again, Train(world, args));
  std::string differ;
  for (size_t i = 0; i < plain.tensors.size(); ++i) {
    const Tensor &a = plain.tensors[i], &b = again.tensors[i];
    const bool same =
        a.defined() == b.defined() && (!a.defined() || at::equal(a, b));
    if (!same) absl::StrAppend(&differ, i, " ");
  }
  return absl::StrCat("differ: ", differ, "; given up: ", again.report.given_up,
                      "; unable: ", absl::StrJoin(again.report.unable, ", "),
                      "; held: ", absl::StrJoin(again.report.held, ", "));
}

TEST(TensorRecompute, OperatorsGiveTheSameBits) {
  for (auto& answer : RankPool::Get(2)->Run("RecomputedBits", "operators")) {
    EXPECT_THAT(answer,
                IsOkAndHolds("differ: ; given up: 2; unable: ; held: "));
  }
}

TEST(TensorRecompute, AFunctionGivesTheSameBits) {
  for (auto& answer : RankPool::Get(2)->Run("RecomputedBits", "function")) {
    EXPECT_THAT(answer,
                IsOkAndHolds("differ: ; given up: 0; unable: ; held: "));
  }
}

}  // namespace
}  // namespace tessera
