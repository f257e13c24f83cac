// A program's own writers of metrics: what they get, on which rank, and what
// happens when they fail.
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "engine/observe/monitor.h"
#include "evaluation/evaluate.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "monitor/metrics_writer.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Keeps what it gets; is shared, so that it can be read when the engine is
// gone.
struct Kept : MetricsWriter {
  absl::Status Write(const StepMetrics& metrics) override {
    std::vector<std::string> names;
    for (const auto& scalar : metrics.scalars) {
      if (scalar.name == "loss" || scalar.name == "lr" ||
          scalar.tag == "eval/score") {
        names.push_back(absl::StrCat(
            scalar.name, "|", scalar.tag, "=",
            scalar.name == "eval/score" ? absl::StrCat(scalar.value) : ""));
      }
    }
    text += absl::StrCat(metrics.step, " of ", metrics.samples, ": ",
                         absl::StrJoin(names, " "), "; ");
    return absl::OkStatus();
  }
  absl::Status Flush() override {
    text += "flushed";
    return absl::OkStatus();
  }
  std::string text;
};

struct Failing : MetricsWriter {
  absl::Status Write(const StepMetrics&) override {
    throw std::runtime_error("no such server");
  }
};

// `args` has "f" for a writer that fails, "0" for writers of rank 0 alone.
// Returns what was written, then the parameters.
TESSERA_RANK_FUNCTION(WriteOwn) {
  auto model = BuildModel("Mlp", world.rank());
  TrainingSpec spec;
  spec.stage = 2;
  EngineOptions options;
  options.communicator = world.communicator();
  const auto kept = std::make_shared<Kept>();
  const bool mine = world.rank() == 0 || !absl::StrContains(args, "0");
  if (absl::StrContains(args, "f") && mine) {
    options.metrics_writers.push_back(std::make_shared<Failing>());
  }
  if (absl::StrContains(args, "k") && mine) {
    options.metrics_writers.push_back(kept);
  }
  int64_t calls = 0;
  if (absl::StrContains(args, "c") && mine) {
    options.metrics_writers.push_back(WriterOf([&calls](const StepMetrics& m) {
      calls += m.step;
      return absl::OkStatus();
    }));
  }
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           Engine::Create(model, ConfigOf(spec), options));
  for (int step = 0; step < 2; ++step) {
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(world.rank(), step)));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    if (step == 1) continue;
    Mean score("score");
    EvaluateOptions evaluation;
    evaluation.tag = "eval";
    TESSERA_RETURN_IF_ERROR(Evaluate(
        engine.get(), {&score}, 3,
        [&](absl::Span<const int64_t> samples) {
          score.Add(torch::full({1}, samples[0] + 0.5));
          return absl::OkStatus();
        },
        evaluation));
  }
  TESSERA_ASSIGN_OR_RETURN(const Record record, ParametersOf(*engine, *model));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(kept->text, ", ", calls, "\n", ToText(record));
}

TEST(MetricsWritersTest, APrograms) {
  std::vector<std::string> plain = RunOnRanks(2, "WriteOwn", "");
  EXPECT_THAT(TakeFirstLines(&plain), Each(", 0"));
  const std::string all =
      "1 of 2: loss|Train/Samples/train_loss= lr|Train/Samples/lr= "
      "eval/score|eval/score=1.5; "
      "2 of 4: loss|Train/Samples/train_loss= lr|Train/Samples/lr=; flushed, 3";
  // Also if the other rank has none, and if another writer fails.
  for (const char* const args : {"kc", "kc0", "fkc"}) {
    std::vector<std::string> got = RunOnRanks(2, "WriteOwn", args);
    EXPECT_THAT(TakeFirstLines(&got), ElementsAre(all, ", 0")) << args;
    EXPECT_EQ(got, plain) << args;
  }
  const std::string& log = RankPool::Get(2)->stderr_of(0);
  EXPECT_THAT(log,
              HasSubstr("metrics: Write: no such server; training continues"));
  EXPECT_EQ(log.find("no such server"), log.rfind("no such server")) << log;
}

TESSERA_RANK_FUNCTION(WriteNowhere) {
  EngineOptions options;
  options.communicator = world.communicator();
  options.metrics_writers = {nullptr};
  auto model = BuildModel("Mlp", world.rank());
  return Engine::Create(model, ConfigOf(TrainingSpec()), options)
      .status()
      .ToString();
}

TEST(MetricsWritersTest, ANullPointerIsRefused) {
  EXPECT_THAT(RunOnRanks(2, "WriteNowhere", ""),
              Each(AllOf(HasSubstr("INVALID_ARGUMENT"),
                         HasSubstr("metrics_writers: expected writers"))));
}

}  // namespace
}  // namespace tessera
