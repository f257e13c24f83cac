// The memory of a step as files show it over time, and as the error of a
// request that is refused says it.
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "config/reader/json_reader.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/memory/step_memory_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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
      EXPECT_THAT(*page,
                  AllOf(HasSubstr("<svg"), HasSubstr("block1"),
                        HasSubstr("</html>"), Not(HasSubstr("src=")),
                        Not(HasSubstr("href=")), Not(HasSubstr("url("))));
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
