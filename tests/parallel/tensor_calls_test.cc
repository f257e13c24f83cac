// What programs do with an engine whose layers, or sequences, are divided,
// besides training.
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "evaluation/evaluate.h"
#include "evaluation/metric.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

absl::StatusOr<Trainee> TraineeOf(absl::string_view args, const World& world) {
  return Trainee::Make(TrainingSpec::FromText(args), world.communicator());
}

// The ranks of a group read the same samples, and these count once.
TESSERA_RANK_FUNCTION(EvaluateFiveSamples) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world));
  Mean mean("index");
  const auto add = [&](absl::Span<const int64_t> samples) -> absl::Status {
    t.Loss(samples[0]);
    mean.Add(
        torch::tensor(std::vector<int64_t>(samples.begin(), samples.end())));
    return absl::OkStatus();
  };
  EvaluateOptions options;
  options.batch_size = 2;
  TESSERA_RETURN_IF_ERROR(
      Evaluate(t.engine.get(), {&mean}, /*num_samples=*/5, add, options));
  TESSERA_RETURN_IF_ERROR(t.engine->Close());
  return absl::StrCat(mean.value(), " of ", mean.weight());
}

TEST(TensorCalls, EvaluationCountsEachSampleOnce) {
  for (const char* const spec :
       {"model=Gpt tensor=2", "model=Gpt sequence=2"}) {
    EXPECT_THAT(RunOnRanks(4, "EvaluateFiveSamples", spec), Each("2 of 5"));
  }
}

// Where one rank of a group fails the others do not wait for its part.
TESSERA_RANK_FUNCTION(OneFails) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world));
  at::Tensor loss = t.Loss(0);
  if (world.rank() == 1) loss = loss.expand({2});
  const absl::Status status = t.engine->Backward(loss);
  return status.ok() ? "OK" : "failed";
}

TEST(TensorCalls, AFailureOfOneRankIsOneOfAll) {
  for (const char* const spec :
       {"model=Gpt tensor=2 stage=1", "model=Gpt sequence=2 stage=0"}) {
    EXPECT_THAT(RunOnRanks(2, "OneFails", spec),
                Each(AnyOf("failed", HasSubstr("UNAVAILABLE"))));
  }
}

// Replicas hold other parts than their neighbours.
TESSERA_RANK_FUNCTION(WriteAndSave) {
  TESSERA_ASSIGN_OR_RETURN(Trainee t, TraineeOf(args, world));
  TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
  {
    torch::NoGradGuard no_grad;
    for (const at::Tensor& p : t.model->parameters()) p.mul_(0.5);
  }
  TESSERA_RETURN_IF_ERROR(t.TrainStep(1));
  {
    torch::NoGradGuard no_grad;
    for (const at::Tensor& p : t.model->parameters()) {
      p.masked_fill_(p.gt(0.1), 0);
    }
  }
  TESSERA_RETURN_IF_ERROR(t.engine->FullStateDict().status());
  return t.Finish().status().ToString();
}

TEST(TensorCalls, WritesToPartsAreNoDifference) {
  for (const char* const axis : {"tensor=2 shard_group=1", "sequence=2"}) {
    EXPECT_THAT(RunOnRanks(4, "WriteAndSave",
                           absl::StrCat("model=Gpt stage=3 ", axis,
                                        " more=sharding{check_writes:true}")),
                Each("OK"));
  }
}

// One module after the other way: what an engine has left of gradients does not
// hide them.
TESSERA_RANK_FUNCTION(TrainInTurns) {
  TrainingSpec spec = TrainingSpec::FromText(args);
  auto model = BuildModel(spec.model, world.rank() / 2);
  for (const auto& [tensor, sequence] :
       {std::pair(1, 1), {2, 1}, {1, 2}, {1, 1}, {1, 2}, {2, 1}}) {
    spec.tensor = tensor;
    spec.sequence = sequence;
    TESSERA_ASSIGN_OR_RETURN(auto engine,
                             MakeEngine(model, spec, world.communicator()));
    for (int64_t i = 0; i < 2; ++i) {
      TESSERA_RETURN_IF_ERROR(
          engine->Backward(model->Loss(engine->data_rank(), i)));
      if (i == 0) model->zero_grad();  // drops it
    }
    TESSERA_RETURN_IF_ERROR(engine->Step());
    TESSERA_RETURN_IF_ERROR(engine->Close());
  }
  Record record;
  for (const auto& p : model->named_parameters()) {
    record.push_back(ParameterLine(p.key(), p.value().detach()));
  }
  return ToText(record);
}

TEST(TensorCalls, AModuleIsDividedAndWholeInTurns) {
  const auto answers = RunOnRanks(2, "TrainInTurns", "model=Gpt stage=1");
  EXPECT_THAT(answers, Each(answers[0]));
  EXPECT_THAT(answers[0], HasSubstr("parameter"));
}

}  // namespace
}  // namespace tessera
