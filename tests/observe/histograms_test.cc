// Tests the histograms that the configuration asks for: those of whole
// parameters, of what each rank has of them, against a plain computation.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "base/file.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "monitor/histogram.h"
#include "monitor/metrics_writer.h"
#include "tests/observe/metrics_lines.h"
#include "tests/observe/monitors_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

using Histograms = std::map<std::string, Histogram>;

Histogram Plain(const at::Tensor& values) {
  const at::Tensor numbers =
      values.detach().to(at::kCPU, at::kDouble).contiguous();
  return HistogramOf(absl::MakeConstSpan(numbers.const_data_ptr<double>(),
                                         static_cast<size_t>(numbers.numel())));
}

// Sums in another order differ by at most a rounding of each addition.
bool SumsAgree(double got, double expected, int64_t count, double magnitude) {
  return std::abs(got - expected) <=
         std::ldexp(static_cast<double>(count) * magnitude, -52);
}

// "" if equal, else what differs.
std::string Difference(const Histograms& got, const Histograms& expected) {
  std::vector<std::string> all;
  for (const auto& [tag, e] : expected) {
    const auto found = got.find(tag);
    if (found == got.end()) {
      all.push_back(absl::StrCat(tag, " is absent"));
      continue;
    }
    const Histogram& g = found->second;
    const double largest = std::max(std::abs(e.min), std::abs(e.max));
    const double n = static_cast<double>(e.count);
    const bool same =
        g.min == e.min && g.max == e.max && g.count == e.count &&
        g.not_finite == e.not_finite && g.limits == e.limits &&
        g.counts == e.counts && SumsAgree(g.sum, e.sum, e.count, n * largest) &&
        SumsAgree(g.sum_squares, e.sum_squares, e.count, n * largest * largest);
    if (!same) {
      all.push_back(absl::StrCat(tag, ": counts ", absl::StrJoin(g.counts, " "),
                                 ", expected ", absl::StrJoin(e.counts, " ")));
    }
  }
  if (got.size() != expected.size()) {
    all.push_back(absl::StrCat(got.size(), " of ", expected.size()));
  }
  return absl::StrJoin(all, "; ");
}

// args: a spec. Every second step has histograms. Rank 0 returns how many were
// as a plain computation makes them, or what differs.
TESSERA_RANK_FUNCTION(HistogramsOfShards) {
  const TrainingSpec spec = TrainingSpec::FromText(args);
  auto model = BuildModel(spec.model, world.rank());
  std::map<int64_t, Histograms> got, expected;
  EngineOptions options;
  options.communicator = world.communicator();
  options.metrics_writers = {WriterOf([&](const StepMetrics& metrics) {
    for (const StepMetrics::Values& each : metrics.histograms) {
      got[metrics.step][each.tag] = each.histogram;
    }
    return absl::OkStatus();
  })};
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           Engine::Create(model, ConfigOf(spec), options));
  for (int i = 0; i < spec.steps * spec.accumulation; ++i) {
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(world.rank(), i)));
    const int64_t step = engine->step() + 1;
    if (step % 2 == 0 && (i + 1) % spec.accumulation == 0) {
      for (const auto& parameter : model->named_parameters()) {
        const std::string& name = parameter.key();
        TESSERA_ASSIGN_OR_RETURN(const at::Tensor gradient,
                                 engine->Gradient(name));
        if (!gradient.defined()) continue;
        TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, engine->Master(name));
        expected[step]["gradients/" + name] = Plain(gradient);
        expected[step]["weights/" + name] = Plain(master);
      }
    }
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  if (world.rank() != 0) return std::string("as rank 0");
  size_t equal = 0;
  for (const auto& [step, histograms] : expected) {
    const std::string difference = Difference(got[step], histograms);
    if (!difference.empty()) {
      return absl::StrCat("step ", step, ": ", difference);
    }
    equal += histograms.size();
  }
  if (got.size() != expected.size()) return std::string("other steps, too");
  return absl::StrCat(equal == 0 ? "none" : "equal");
}

constexpr char kEverySecond[] = "histograms{every_steps:2}";

TEST_F(MonitorsTest, HistogramsAreThoseOfWholeParameters) {
  for (int stage = 0; stage <= 3; ++stage) {
    TrainingSpec spec = Spec(stage, kEverySecond);
    spec.steps = 4;
    EXPECT_THAT(RunOnRanks(2, "HistogramsOfShards", spec.ToText()),
                ElementsAre("equal", "as rank 0"))
        << "stage " << stage;
  }
}

// Replicas of shards count once; micro-batches are one gradient; masters are
// float32 beside 16 bits; shards are on a disk.
TEST_F(MonitorsTest, HistogramsOfOtherPlacesAndDtypes) {
  TrainingSpec replicas = Spec(3, kEverySecond);
  replicas.shard_group = 1;
  TrainingSpec accumulated = Spec(2, kEverySecond);
  accumulated.accumulation = 2;
  TrainingSpec narrow = Spec(3, kEverySecond);
  narrow.dtype = "bf16";
  TrainingSpec on_disk = Spec(3, kEverySecond);
  on_disk.states_on_disk = 1;
  on_disk.gradients_on_disk = true;
  for (TrainingSpec spec : {replicas, accumulated, narrow, on_disk}) {
    spec.steps = 2;
    EXPECT_THAT(RunOnRanks(2, "HistogramsOfShards", spec.ToText()),
                ElementsAre("equal", "as rank 0"))
        << spec.ToText();
  }
}

TEST_F(MonitorsTest, HistogramsOfChosenParameters) {
  const TrainingSpec spec = Spec(
      3, Jsonl(folder_.path()) +
             ",histograms{every_steps:3,weights:false,parameters:'*.bias'}");
  RunOnRanks(2, "Losses", spec.ToText());
  const auto text = ReadWholeFile(folder_ / "run/metrics.jsonl");
  ASSERT_TRUE(text.ok()) << text.status();
  std::vector<std::string> lines = absl::StrSplit(*text, '\n');
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_THAT(lines[1], Not(HasSubstr("histograms")));
  EXPECT_THAT(lines[2],
              AllOf(HasSubstr("\"histograms\": {\"gradients/"),
                    HasSubstr(".bias\": {\"min\": "),
                    Not(HasSubstr(".weight\"")), Not(HasSubstr("\"weights/"))));
  const TrainingSpec wrong =
      Spec(3, Jsonl(folder_.path()) +
                  ",histograms{every_steps:3,parameters:'biass'}");
  EXPECT_THAT(
      RunOnRanks(2, "Losses", wrong.ToText()),
      Each(HasSubstr("histograms.parameters: 'biass' is not a parameter")));
}

}  // namespace
}  // namespace tessera
