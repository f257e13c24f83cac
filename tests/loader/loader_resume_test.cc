// A training with a loader is saved in the middle of an epoch, and resumes with
// other numbers of ranks and workers: each sample comes exactly once, and the
// losses are those of the run that did not stop, to the bit.
#include <torch/torch.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/bits.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "data/distributed_order.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/client_state.h"
#include "loader/data_loader.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::EndsWith;
using ::testing::HasSubstr;

constexpr int64_t kGlobalBatch = 12, kWidth = 8;

// The arguments of a rank function, as text.
struct RunOptions {
  std::string dir;
  int64_t samples = 60;  // of the set: 5 steps
  int64_t steps = 10;    // to train to
  int64_t save_at = 0;   // 0: never
  int workers = 0;
  bool resume = false, async = false;

  std::string ToText() const {
    return absl::StrJoin(
        {dir, absl::StrCat(samples), absl::StrCat(steps), absl::StrCat(save_at),
         absl::StrCat(workers), absl::StrCat(resume), absl::StrCat(async)},
        "\n");
  }
  static RunOptions FromText(absl::string_view text) {
    const std::vector<std::string> parts = absl::StrSplit(text, '\n');
    RunOptions run;
    run.dir = parts.at(0);
    const auto number = [&](size_t i) {
      int64_t value = -1;
      return absl::SimpleAtoi(parts.at(i), &value) ? value : -1;
    };
    run.samples = number(1);
    run.steps = number(2);
    run.save_at = number(3);
    run.workers = static_cast<int>(number(4));
    run.resume = number(5) != 0;
    run.async = number(6) != 0;
    return run;
  }
};

// Small whole numbers, of the sample and of its augmentation: sums of them, and
// what they make of weights that are multiples of 1/16, are exact in any order,
// so that a step has the same bits at any number of ranks.
absl::StatusOr<std::vector<at::Tensor>> FetchNumbers(
    absl::Span<const int64_t> indices, const BatchContext& context) {
  const auto count = static_cast<int64_t>(indices.size());
  at::Tensor x = context.Empty({count, kWidth}, at::kFloat);
  auto* out = x.data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    SampleRandom random = context.Random(i);
    for (int64_t j = 0; j < kWidth; ++j) {
      const int64_t own = (indices[static_cast<size_t>(i)] * 7 + j * 3) % 5 - 2;
      *out++ = static_cast<float>(own + random.Below(3));
    }
  }
  return std::vector<at::Tensor>{x};
}

absl::StatusOr<std::unique_ptr<DataLoader>> MakeLoader(const World& world,
                                                       const RunOptions& run,
                                                       Fetch fetch) {
  DistributedSamplerOptions sampler;
  sampler.num_samples = run.samples;
  sampler.rank = world.rank();
  sampler.world_size = world.world_size();
  sampler.seed = 5;
  TESSERA_ASSIGN_OR_RETURN(auto order, DistributedOrder::Create(sampler));
  DataLoaderOptions options;
  options.batch_size = kGlobalBatch / world.world_size();
  options.workers = run.workers;
  options.seed = 17;
  return DataLoader::Create(std::move(order), std::move(fetch), options);
}

struct Training {
  torch::nn::Linear model{nullptr};
  std::unique_ptr<Engine> engine;
  std::unique_ptr<DataLoader> loader;
};

absl::StatusOr<Training> MakeTraining(const World& world,
                                      const RunOptions& run) {
  Training training;
  training.model =
      torch::nn::Linear(torch::nn::LinearOptions(kWidth, 1).bias(false));
  {
    const torch::NoGradGuard no_gradients;
    training.model->weight.copy_(torch::arange(kWidth).reshape({1, kWidth}));
  }
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(kGlobalBatch / world.world_size());
  config.set_gradient_clipping(0);
  config.mutable_zero_optimization()->set_stage(3);
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  config.mutable_optimizer()->set_type("SGD");
  config.mutable_optimizer()->mutable_params()->set_lr(0.0625);
  EngineOptions options;
  options.communicator = world.communicator();
  TESSERA_ASSIGN_OR_RETURN(training.engine,
                           Engine::Create(training.model, config, options));
  TESSERA_ASSIGN_OR_RETURN(training.loader,
                           MakeLoader(world, run, FetchNumbers));
  return training;
}

// The sum over all ranks' samples, in hexadecimal.
absl::StatusOr<std::string> Step(const World& world, const Training& training,
                                 const Batch& batch) {
  torch::nn::Linear model = training.model;
  const at::Tensor loss =
      model->forward(batch.tensors[0]).sum() * world.world_size();
  at::Tensor sum = (loss.detach() / world.world_size()).reshape({1});
  TESSERA_RETURN_IF_ERROR(training.engine->Backward(loss));
  TESSERA_RETURN_IF_ERROR(training.engine->Step());
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->AllReduceSum(sum, {"the loss"}).Wait());
  return HexFloat(sum.item<float>());
}

absl::Status Save(const RunOptions& run, const Training& training) {
  SaveOptions options;
  options.async = run.async;
  return training.engine->SaveCheckpoint(
      run.dir,
      PackClientState({{"loader", training.loader->State()},
                       {"steps", absl::StrCat(training.engine->step())}}),
      options);
}

absl::Status Resume(const World& world, const RunOptions& run,
                    const Training& training) {
  TESSERA_ASSIGN_OR_RETURN(const LoadCheckpointReport report,
                           training.engine->LoadCheckpoint(run.dir));
  TESSERA_ASSIGN_OR_RETURN(ClientParts parts,
                           UnpackClientState(report.client_state));
  if (parts["steps"] != absl::StrCat(training.engine->step())) {
    return absl::InternalError(parts["steps"]);
  }
  return world.communicator()->AgreeOk(training.loader->Load(parts["loader"]),
                                       "loader");
}

// Returns a line for each step, such as "7 0x1.8p+3 1:5,1:9": its number, the
// loss, and this rank's samples, by epoch, without padding.
TESSERA_RANK_FUNCTION(Train) {
  const RunOptions run = RunOptions::FromText(args);
  TESSERA_ASSIGN_OR_RETURN(Training training, MakeTraining(world, run));
  if (run.resume) TESSERA_RETURN_IF_ERROR(Resume(world, run, training));
  std::vector<std::string> lines;
  while (training.engine->step() < run.steps) {
    TESSERA_ASSIGN_OR_RETURN(const Batch batch, training.loader->Next());
    TESSERA_ASSIGN_OR_RETURN(const std::string loss,
                             Step(world, training, batch));
    std::vector<std::string> samples;
    for (const Sample& sample : batch.samples) {
      if (sample.padding) continue;
      samples.push_back(absl::StrCat(sample.epoch, ":", sample.index));
    }
    lines.push_back(absl::StrCat(training.engine->step(), " ", loss, " ",
                                 absl::StrJoin(samples, ",")));
    if (training.engine->step() == run.save_at) {
      TESSERA_RETURN_IF_ERROR(Save(run, training));
    }
  }
  TESSERA_RETURN_IF_ERROR(training.engine->WaitForCheckpoint());
  TESSERA_RETURN_IF_ERROR(training.engine->Close());
  return absl::StrJoin(lines, "\n");
}

// Outcome is what all ranks did together.
struct Outcome {
  std::vector<std::string> losses;                // of each step
  std::vector<std::vector<std::string>> samples;  // of each step
};

Outcome TrainOn(int world_size, const RunOptions& run) {
  Outcome outcome;
  for (const auto& answer :
       RankPool::Get(world_size)->Run("Train", run.ToText())) {
    if (!answer.ok()) {
      ADD_FAILURE() << answer.status();
      continue;
    }
    const std::vector<std::string> lines = absl::StrSplit(*answer, '\n');
    outcome.losses.resize(lines.size());
    outcome.samples.resize(lines.size());
    for (size_t i = 0; i < lines.size(); ++i) {
      const std::vector<std::string> words = absl::StrSplit(lines[i], ' ');
      const std::string loss = absl::StrCat(words.at(0), " ", words.at(1));
      if (!outcome.losses[i].empty()) EXPECT_EQ(loss, outcome.losses[i]);
      outcome.losses[i] = loss;
      for (const auto sample :
           absl::StrSplit(words.at(2), ',', absl::SkipEmpty())) {
        outcome.samples[i].push_back(std::string(sample));
      }
    }
  }
  return outcome;
}

// Checks the first `before` steps of one run, and all of another.
void ExpectExactlyOnce(const Outcome& first, size_t before, const Outcome& then,
                       int64_t samples, int64_t epochs) {
  std::multiset<std::string> seen;
  for (size_t i = 0; i < before; ++i) {
    seen.insert(first.samples[i].begin(), first.samples[i].end());
  }
  for (const auto& step : then.samples) seen.insert(step.begin(), step.end());
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    for (int64_t i = 0; i < samples; ++i) {
      const std::string sample = absl::StrCat(epoch, ":", i);
      EXPECT_EQ(seen.count(sample), 1u) << sample;
    }
  }
}

TEST(LoaderResumeTest, AResumedRunIsTheOneThatDidNotStop) {
  const TempFolder folder;
  RunOptions run;
  run.dir = folder.path();
  run.workers = 2;
  run.save_at = 3;
  for (const bool async : {false, true}) {
    // It goes on behind the save, which holds the place of then.
    run.async = async;
    run.resume = false;
    const Outcome whole = TrainOn(2, run);
    ASSERT_EQ(whole.losses.size(), 10u);
    EXPECT_EQ(
        std::set<std::string>(whole.losses.begin(), whole.losses.end()).size(),
        10u);
    ExpectExactlyOnce(whole, 10, {}, 60, 2);
    RunOptions rest = run;
    rest.resume = true;
    rest.save_at = 0;
    for (const int world_size : {1, 2, 3}) {
      rest.workers = world_size - 1;
      SCOPED_TRACE(absl::StrCat("on ", world_size, " ranks, ",
                                async ? "async" : "whole"));
      const Outcome resumed = TrainOn(world_size, rest);
      EXPECT_THAT(resumed.losses, ElementsAreArray(whole.losses.begin() + 3,
                                                   whole.losses.end()));
      ExpectExactlyOnce(whole, 3, resumed, 60, 2);
    }
  }
}

// The ends of epochs are padded to the number of ranks.
TEST(LoaderResumeTest, EachSampleComesOnceWhereRanksDoNotDivideThem) {
  const TempFolder folder;
  RunOptions run;
  run.dir = folder.path();
  run.samples = 35;
  run.workers = 1;
  run.save_at = 2;
  const Outcome whole = TrainOn(2, run);
  run.resume = true;
  run.save_at = 0;
  for (const int world_size : {1, 3}) {
    ExpectExactlyOnce(whole, 2, TrainOn(world_size, run), 35, 3);
  }
}

// A sample of rank 1 cannot be read: all know before the forward, and go on
// with the batch behind it.
TESSERA_RANK_FUNCTION(OneSampleIsBad) {
  const Fetch fetch = [&](absl::Span<const int64_t> indices,
                          const BatchContext& context)
      -> absl::StatusOr<std::vector<at::Tensor>> {
    if (world.rank() == 1 && context.samples()[0].epoch == 0) {
      return absl::DataLossError("picture 7 is damaged");
    }
    return FetchNumbers(indices, context);
  };
  RunOptions run;
  run.samples = kGlobalBatch;
  run.workers = 1;
  TESSERA_ASSIGN_OR_RETURN(auto loader, MakeLoader(world, run, fetch));
  const std::string start = loader->State();
  const absl::Status bad = loader->NextOnAll(*world.communicator()).status();
  const bool stayed = loader->State() == start;
  TESSERA_ASSIGN_OR_RETURN(const Batch next,
                           loader->NextOnAll(*world.communicator()));
  return absl::StrCat(StatusToText(bad), " then ", next.samples[0].epoch,
                      stayed ? ", stayed, " : ", moved, ", loader->State(),
                      " errors ", loader->stats().errors, " batches ",
                      loader->stats().batches);
}

TEST(LoaderResumeTest, AnErrorOfOneRankIsThatOfAll) {
  std::vector<std::string> texts;
  for (const auto& answer : RankPool::Get(2)->Run("OneSampleIsBad", "")) {
    texts.push_back(answer.ok() ? *answer : answer.status().ToString());
  }
  EXPECT_THAT(texts, Each(HasSubstr("picture 7 is damaged")));
  EXPECT_THAT(texts, Each(HasSubstr("loader: batch 0 (6 samples of epoch 0")));
  EXPECT_THAT(texts, Each(HasSubstr("rank 1")));
  EXPECT_THAT(texts, Each(HasSubstr(" then 1, stayed, tessera-loader 1 ")));
  EXPECT_THAT(texts, Each(EndsWith(" errors 1 batches 1")));
  EXPECT_EQ(texts[0], texts[1]);
}

}  // namespace
}  // namespace tessera
