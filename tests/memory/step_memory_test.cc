// The memory of a step as the engine reports it, against what is known of a
// model of large tensors.
#include "base/step_memory/step_memory.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch/tensor_memory.h"
#include "config/reader/json_reader.h"
#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "gmock/gmock.h"
#include "sharding/trace/trace.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// ---- a chain: each block keeps one tensor of kTensor bytes, its tanh

constexpr int kBlocks = 3;
constexpr int64_t kRows = 8192, kDim = 64;
constexpr int64_t kTensor = kRows * kDim * 4;  // 2 MiB
constexpr int64_t kRounding = 8 << 10;         // malloc's, of one tensor
constexpr int64_t kSmall = 64 << 10;           // all that is small, in a step

struct ChainBlock : torch::nn::Module {
  ChainBlock()
      : linear(register_module(
            "linear", torch::nn::Linear(
                          torch::nn::LinearOptions(kDim, kDim).bias(false)))),
        shift(register_parameter("shift", torch::zeros({kDim}))) {}
  // The operator that makes what is kept comes after a use of `shift`.
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(linear(x).add_(shift));
  }
  torch::nn::Linear linear;
  at::Tensor shift;
};

struct Chain : torch::nn::Module {
  Chain() {
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module(absl::StrCat("block", i),
                                       std::make_shared<ChainBlock>()));
    }
  }
  // The block `wide` makes `wide_tensors` for a moment.
  at::Tensor Loss(int rank, int wide = 0, int64_t wide_tensors = 0) {
    at::Tensor h = torch::full({kRows, kDim}, 0.1 * (rank + 1));
    for (int i = 0; i < kBlocks; ++i) {
      h = blocks[static_cast<size_t>(i)]->forward(h);
      if (i == wide) torch::empty({wide_tensors * kRows, kDim});
    }
    return h.square().mean();
  }
  std::vector<std::shared_ptr<ChainBlock>> blocks;
};

absl::StatusOr<std::unique_ptr<Engine>> MakeChain(
    const World& world, int stage, std::shared_ptr<Chain>* model,
    const std::string& timeline = "", bool planned = false) {
  torch::manual_seed(1);
  at::set_num_threads(1);
  *model = std::make_shared<Chain>();
  TrainingSpec spec;
  spec.stage = stage;
  proto::Config config = ConfigOf(spec);
  config.mutable_sharding()->add_unit_classes((*model)->blocks[0]->name());
  // Each block's `shift` persists, in a flat of all of them.
  config.mutable_zero_optimization()->set_stage3_param_persistence_threshold(
      kDim);
  if (!timeline.empty()) {
    config.mutable_memory_timeline()->set_path(timeline);
    config.mutable_memory_timeline()->set_step(2);
  }
  EngineOptions options;
  options.communicator = world.communicator();
  if (planned) {
    PlanOptions plan_options;
    plan_options.world_size = world.world_size();
    TESSERA_ASSIGN_OR_RETURN(
        PlanReport report,
        Plan(
            **model, [&] { return (*model)->Loss(0); }, config, plan_options));
    // Stage 2 would not fit into this memory.
    report.memory_bytes = report.stages[3].peak.total();
    options.plan = std::make_shared<PlanReport>(std::move(report));
  }
  return Engine::Create(*model, config, options);
}

absl::Status Expect(bool holds, absl::string_view what,
                    const StepMemoryReport& report) {
  if (holds) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("not so: ", what, "\n", StepMemoryTable(report, 10)));
}

// `tensors` large ones, and what is small.
bool Is(int64_t bytes, int64_t tensors) {
  return bytes >= tensors * kTensor &&
         bytes <= tensors * (kTensor + kRounding) + kSmall;
}

absl::Status CheckActivations(const StepMemoryReport& report) {
  const auto& units = report.activations;
  TESSERA_RETURN_IF_ERROR(
      Expect(units.size() == kBlocks + 1, "a row for each block", report));
  for (size_t i = 0; i < units.size(); ++i) {
    const std::string unit = i == 0 ? "" : absl::StrCat("block", i - 1);
    TESSERA_RETURN_IF_ERROR(
        Expect(units[i].unit == unit, "rows in order of use", report));
    TESSERA_RETURN_IF_ERROR(
        Expect(Is(units[i].bytes, 1), "one tensor of each", report));
  }
  return absl::OkStatus();
}

// The largest moment is in square's backward, grad * (2 * h.pow(1)): its four
// tensors, before the first block is used.
absl::Status CheckBackwardPeak(const StepMemoryReport& report,
                               const Engine& engine) {
  const HeldMoment& peak = report.at_peak;
  TESSERA_RETURN_IF_ERROR(Expect(peak.phase == MemoryPhase::kBackward,
                                 "the peak is in backward", report));
  TESSERA_RETURN_IF_ERROR(Expect(
      peak.unit == absl::StrCat("block", kBlocks - 1), "the unit", report));
  TESSERA_RETURN_IF_ERROR(
      Expect(Is(peak.held[HeldKind::kActivations], kBlocks + 1),
             "the input and a tensor of each block", report));
  TESSERA_RETURN_IF_ERROR(Expect(Is(peak.held[HeldKind::kTemporary], 4),
                                 "the tensors of square's backward", report));
  const int64_t distance = report.peak_bytes - peak.held.total();
  TESSERA_RETURN_IF_ERROR(Expect(
      distance >= 0 &&
          distance <= std::max<int64_t>(64 << 10, report.peak_bytes >> 10),
      "the moment is near the peak", report));
  const StateBytes state = engine.state_bytes();
  return Expect(peak.held[HeldKind::kOptimizer] >= state.optimizer &&
                    peak.held[HeldKind::kParameters] >= state.parameters,
                "the engine's own", report);
}

// args: stage.
TESSERA_RANK_FUNCTION(TrainChain) {
  CountTensorMemory();
  const int64_t before = StepMemory::Global().tensor_bytes();
  std::shared_ptr<Chain> model;
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, MakeChain(world, std::stoi(std::string(args)), &model));
  for (int step = 0; step < 3; ++step) {
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(world.rank())));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    const StepMemoryReport& report = engine->last_step().memory;
    TESSERA_RETURN_IF_ERROR(CheckActivations(report));
    TESSERA_RETURN_IF_ERROR(CheckBackwardPeak(report, *engine));
  }
  // A moment in the forward that is larger.
  constexpr int64_t kWide = 8;
  TESSERA_RETURN_IF_ERROR(
      engine->Backward(model->Loss(world.rank(), /*wide=*/1, kWide)));
  TESSERA_RETURN_IF_ERROR(engine->Step());
  const StepMemoryReport report = engine->last_step().memory;
  TESSERA_RETURN_IF_ERROR(CheckActivations(report));
  TESSERA_RETURN_IF_ERROR(
      Expect(report.at_peak.phase == MemoryPhase::kForward &&
                 report.at_peak.unit == "block1",
             "the peak is in block1's forward", report));
  TESSERA_RETURN_IF_ERROR(
      Expect(Is(report.at_peak.held[HeldKind::kActivations], 3 + kWide),
             "the input, two blocks, and the wide one", report));
  TESSERA_RETURN_IF_ERROR(
      Expect(report.at_peak.held[HeldKind::kTemporary] == 0, "none", report));
  engine.reset();
  model.reset();
  const int64_t after = StepMemory::Global().tensor_bytes();
  if (after != before) {
    return absl::InternalError(
        absl::StrCat("tensors: ", before, " before, ", after, " after"));
  }
  return "";
}

class StepMemoryTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  int stage() const { return std::get<0>(GetParam()); }
  RankPool* pool() const { return RankPool::Get(std::get<1>(GetParam())); }
};

TEST_P(StepMemoryTest, PeakAndActivationsAreThoseOfTheChain) {
  for (auto& answer : pool()->Run("TrainChain", absl::StrCat(stage()))) {
    TESSERA_EXPECT_OK(answer.status());
  }
}

// ---- nothing is lost in many steps

TESSERA_RANK_FUNCTION(TrainManySteps) {
  CountTensorMemory();
  const int64_t before = StepMemory::Global().tensor_bytes();
  TrainingSpec spec = TrainingSpec::FromText(args);
  auto model = BuildModel(spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  int64_t after_first = 0;
  for (int step = 0; step < 100; ++step) {
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(world.rank(), step)));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    if (step == 3) after_first = StepMemory::Global().tensor_bytes();
  }
  const int64_t after = StepMemory::Global().tensor_bytes();
  engine.reset();
  model.reset();
  const int64_t gone = StepMemory::Global().tensor_bytes();
  // A collective's last scalar may still be on its way.
  if (after <= after_first + 1024 && gone == before) return "";
  return absl::InternalError(absl::StrCat(before, " before, ", after_first,
                                          " after 4 steps, ", after,
                                          " after 100, ", gone, " at the end"));
}

TEST_P(StepMemoryTest, NothingIsLostInManySteps) {
  TrainingSpec spec;
  spec.stage = stage();
  for (auto& answer : pool()->Run("TrainManySteps", spec.ToText())) {
    TESSERA_EXPECT_OK(answer.status());
  }
}

INSTANTIATE_TEST_SUITE_P(All, StepMemoryTest,
                         ::testing::Combine(::testing::Values(0, 3),
                                            ::testing::Values(1, 2)),
                         [](const auto& info) {
                           return absl::StrCat("Stage", std::get<0>(info.param),
                                               "World",
                                               std::get<1>(info.param));
                         });

// ---- a step over time

// args: where the files go. The recorded step's peak, and another's.
TESSERA_RANK_FUNCTION(RecordSteps) {
  std::shared_ptr<Chain> model;
  TESSERA_ASSIGN_OR_RETURN(
      auto engine, MakeChain(world, /*stage=*/3, &model, std::string(args)));
  if (absl::IsFailedPrecondition(
          engine->WriteMemoryTimeline(absl::StrCat(args, "none"))) == false) {
    return absl::InternalError("nothing was recorded");
  }
  std::string peaks;
  for (int step = 0; step < 3; ++step) {
    if (step == 2) engine->RecordMemory();
    TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(world.rank())));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    if (step > 0) {
      absl::StrAppend(&peaks, engine->last_step().memory.peak_bytes, " ");
    }
  }
  TESSERA_RETURN_IF_ERROR(
      engine->WriteMemoryTimeline(absl::StrCat(args, "again")));
  return peaks;
}

struct Trace {
  int64_t most_held = 0, most_by_kind = 0;
  int forwards = 0, backwards = 0, steps = 0, units = 0;
  std::vector<std::string> activations;
};

absl::StatusOr<Trace> ReadTrace(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path));
  TESSERA_ASSIGN_OR_RETURN(const JsonValue json, ReadJson(text, path));
  Trace trace;
  for (const JsonValue& event : json.Find("traceEvents")->elements) {
    const std::string& kind = event.Find("ph")->text;
    const std::string& name = event.Find("name")->text;
    if (kind == "C") {
      int64_t sum = 0;
      for (const JsonMember& m : event.Find("args")->members) {
        sum += m.value.AsInt64().value();
      }
      int64_t& most = name == "held" ? trace.most_held : trace.most_by_kind;
      most = std::max(most, sum);
    } else if (kind == "X") {
      trace.forwards += name == "forward";
      trace.backwards += name == "backward";
      trace.steps += name == "step";
      trace.units += name == "block1";
    }
  }
  for (const JsonValue& unit :
       json.Find("otherData")->Find("activations")->elements) {
    trace.activations.push_back(unit.Find("unit")->text);
  }
  return trace;
}

TEST(StepMemoryTimelineTest, FilesHoldThePeak) {
  TempFolder folder;
  const auto answers = RankPool::Get(2)->Run("RecordSteps", folder / "memory");
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    TESSERA_ASSERT_OK(answers[rank].status());
    const std::vector<std::string> peaks = absl::StrSplit(*answers[rank], ' ');
    int step = 0;
    for (const char* name : {"memory", "memoryagain"}) {
      const std::string path = folder / absl::StrCat(name, rank);
      const auto trace = ReadTrace(path + ".json");
      TESSERA_ASSERT_OK(trace.status());
      EXPECT_EQ(absl::StrCat(trace->most_held), peaks[step]);
      EXPECT_EQ(absl::StrCat(trace->most_by_kind), peaks[step]);
      EXPECT_EQ(trace->forwards, 2);  // one ends where Step begins
      EXPECT_EQ(trace->backwards, 1);
      EXPECT_EQ(trace->steps, 1);
      EXPECT_GE(trace->units, 2);
      EXPECT_THAT(trace->activations,
                  ::testing::ElementsAre("", "block0", "block1", "block2"));
      const auto page = ReadWholeFile(path + ".html");
      TESSERA_ASSERT_OK(page.status());
      EXPECT_THAT(*page, AllOf(HasSubstr("<svg"), HasSubstr("block1"),
                               HasSubstr("</html>"), Not(HasSubstr("src=")),
                               Not(HasSubstr("http"))));
      ++step;
    }
  }
}

// ---- out of memory

// Its backward asks libtorch for more than there is.
struct Greedy : torch::autograd::Function<Greedy> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*, torch::autograd::variable_list g) {
    return {g[0] + torch::empty({int64_t{1} << 55})};
  }
};

// args: who refuses. The Status, of all ranks.
TESSERA_RANK_FUNCTION(RunOutOfMemory) {
  std::shared_ptr<Chain> model;
  MemoryLedger& ledger = MemoryLedger::Host();
  const bool last = world.rank() == world.world_size() - 1;
  const int64_t held = ledger.total().current_bytes;
  if (args == "create" && last) ledger.SetLimit(held + 20'000);
  auto engine =
      MakeChain(world, /*stage=*/2, &model, /*timeline=*/"", /*planned=*/true);
  ledger.SetLimit(MemoryLedger::kNoLimit);
  if (args == "create") return engine.status().ToString();
  TESSERA_RETURN_IF_ERROR(engine.status());
  at::Tensor loss = model->Loss(world.rank());
  if (args == "libtorch" && last) loss = Greedy::apply(loss);
  if (args == "ledger" && last) {
    ledger.SetLimit(ledger.total().current_bytes + 100);
  }
  const absl::Status status = (*engine)->Backward(loss);
  ledger.SetLimit(MemoryLedger::kNoLimit);
  return status.ToString();
}

class OutOfMemoryTest : public ::testing::TestWithParam<std::string> {};

TEST_P(OutOfMemoryTest, TheErrorSaysWhatWasHeld) {
  const auto answers = RankPool::Get(2)->Run("RunOutOfMemory", GetParam());
  TESSERA_ASSERT_OK(answers[1].status());
  EXPECT_THAT(*answers[1],
              AllOf(HasSubstr("RESOURCE_EXHAUSTED"),
                    HasSubstr("held by rank 1/2 when it was refused: "),
                    HasSubstr("\n  parameters"), HasSubstr("\nlargest units:"),
                    HasSubstr("\n  block0:  parameters"),
                    HasSubstr("\nplanned at stage 2:  parameters"),
                    HasSubstr("zero_optimization.stage 3")));
  if (GetParam() != "create") {
    EXPECT_THAT(*answers[1],
                AllOf(HasSubstr("in backward, unit block"),
                      HasSubstr("\n  activations"),
                      HasSubstr("\npeak of the step until then: ")));
  }
  for (absl::string_view line : absl::StrSplit(*answers[1], '\n')) {
    EXPECT_LT(line.size(), 700u) << line;
  }
  // A rank to which nothing was refused reports nothing of its own.
  TESSERA_ASSERT_OK(answers[0].status());
  EXPECT_THAT(*answers[0],
              AllOf(HasSubstr("rank 1"), Not(HasSubstr("held by rank"))));
}

INSTANTIATE_TEST_SUITE_P(All, OutOfMemoryTest,
                         ::testing::Values("create", "ledger", "libtorch"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tessera
