#include "base/step_memory/step_memory.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/memory/memory.h"
#include "base/page/page_style.h"
#include "base/status_matchers.h"
#include "base/step_memory/memory_timeline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kMiB = 1 << 20;

// A tensor as the allocator counts it.
class Tensor {
 public:
  explicit Tensor(int64_t bytes) : slot_(CurrentTensorSlot()), bytes_(bytes) {
    AddTensorBytes(slot_, bytes_);
  }
  ~Tensor() { RemoveTensorBytes(slot_, bytes_); }

 private:
  const int slot_;
  const int64_t bytes_;
};

void Use(const std::string& unit) {
  NoteUnitUse(StepMemory::Global().UnitNumber(unit));
}

std::vector<std::string> Texts(const std::vector<UnitActivations>& units) {
  std::vector<std::string> texts;
  for (const auto& unit : units) {
    texts.push_back(unit.unit + " " + std::to_string(unit.bytes / kMiB));
  }
  return texts;
}

class StepMemoryTest : public ::testing::Test {
 protected:
  StepMemory& memory_ = StepMemory::Global();
  StepMemory::Training training_;
};

TEST_F(StepMemoryTest, PeakIsOfLedgerAndTensors) {
  auto shard = AllocateCounted(3 * kMiB, MemoryKind::kParameters);
  TESSERA_ASSERT_OK(shard.status());
  memory_.EndStep();
  {
    Use("a");
    Tensor kept(5 * kMiB);
    { Tensor temporary(20 * kMiB); }
    Use("b");
    Tensor more(2 * kMiB);
    const StepMemory::PhaseScope backward(MemoryPhase::kBackward);
    Use("a");
    Tensor gradient(7 * kMiB);
  }
  const StepMemoryReport report = memory_.EndStep();
  EXPECT_EQ(report.peak_bytes, 28 * kMiB);
  EXPECT_EQ(report.at_peak.held.total(), 28 * kMiB);
  EXPECT_EQ(report.at_peak.held[HeldKind::kParameters], 3 * kMiB);
  EXPECT_EQ(report.at_peak.held[HeldKind::kActivations], 25 * kMiB);
  EXPECT_EQ(report.at_peak.held[HeldKind::kTemporary], 0);
  EXPECT_EQ(report.at_peak.phase, MemoryPhase::kForward);
  EXPECT_EQ(report.at_peak.unit, "a");
  EXPECT_THAT(Texts(report.activations), ElementsAre("a 5", "b 2"));
  EXPECT_EQ(memory_.EndStep().peak_bytes, 3 * kMiB);
}

TEST_F(StepMemoryTest, TemporaryIsWhatABackwardOrAStepMakes) {
  memory_.EndStep();
  Tensor input(kMiB);  // before the first unit
  for (const MemoryPhase phase : {MemoryPhase::kBackward, MemoryPhase::kStep}) {
    const StepMemory::PhaseScope scope(phase);
    Tensor temporary(4 * kMiB);
    EXPECT_EQ(memory_.Now().phase, phase);
    EXPECT_EQ(memory_.Now().held[HeldKind::kTemporary], 4 * kMiB);
    EXPECT_EQ(memory_.Now().held[HeldKind::kActivations], kMiB);
  }
  EXPECT_THAT(Texts(memory_.EndStep().activations), ElementsAre(" 1"));
}

// A tensor that outlives its step is not counted as an activation of later
// steps, neither when it is held nor when it is freed.
TEST_F(StepMemoryTest, OlderTensorsAreKeptApart) {
  Use("a");
  auto old = std::make_unique<Tensor>(8 * kMiB);
  for (int step = 0; step < 3; ++step) {
    memory_.EndStep();
    EXPECT_EQ(memory_.Now().held[HeldKind::kTensors], 8 * kMiB);
    Use("a");
    Tensor mine(kMiB);
    EXPECT_EQ(memory_.Now().held[HeldKind::kActivations], kMiB);
    EXPECT_EQ(memory_.Now().held[HeldKind::kTensors], 8 * kMiB);
  }
  memory_.EndStep();
  Use("b");
  Tensor mine(2 * kMiB);
  old.reset();
  EXPECT_EQ(memory_.Now().held[HeldKind::kActivations], 2 * kMiB);
  EXPECT_EQ(memory_.Now().held[HeldKind::kTensors], 0);
}

TEST_F(StepMemoryTest, AnOlderTensorGoesWithoutTakingFromItsUnit) {
  Use("a");
  auto old = std::make_unique<Tensor>(8 * kMiB);
  memory_.EndStep();
  Use("a");
  Tensor mine(2 * kMiB);
  old.reset();
  EXPECT_EQ(memory_.Now().held[HeldKind::kActivations], 2 * kMiB);
  EXPECT_EQ(memory_.Now().held[HeldKind::kTensors], 0);
}

TEST_F(StepMemoryTest, OfMicroBatchesTheOneThatHoldsMostCounts) {
  memory_.EndStep();
  for (const int64_t bytes : {2 * kMiB, 6 * kMiB, 4 * kMiB}) {
    Use("a");
    Tensor activation(bytes);
    const StepMemory::PhaseScope backward(MemoryPhase::kBackward);
  }
  EXPECT_THAT(Texts(memory_.EndStep().activations), ElementsAre("a 6"));
}

// Small growth is in the peak, though nobody looks at the kinds.
TEST_F(StepMemoryTest, PeaksAreExact) {
  memory_.EndStep();
  Tensor large(100 * kMiB);
  Tensor small(1000);
  const StepMemoryReport report = memory_.EndStep();
  EXPECT_EQ(report.peak_bytes, 100 * kMiB + 1000);
  EXPECT_EQ(report.at_peak.held.total(), 100 * kMiB);
}

TEST_F(StepMemoryTest, UnitsBeyondTheLastSlotAreOne) {
  memory_.EndStep();
  for (int i = 0; i < 600; ++i) {
    const std::string name = "many" + std::to_string(i);
    const int number = memory_.UnitNumber(name);
    EXPECT_LT(number, kTensorSlotsOfSet);
    EXPECT_EQ(number, memory_.UnitNumber(name));
  }
  Use("many599");
  Tensor mine(kMiB);
  EXPECT_EQ(memory_.Now().unit, "(other units)");
  EXPECT_EQ(memory_.Now().held[HeldKind::kActivations], kMiB);
}

TEST_F(StepMemoryTest, ARecordingHoldsThePeakAndThePhases) {
  memory_.EndStep();
  memory_.Record();
  {
    Use("a");
    Tensor kept(5 * kMiB);
    Use("b");
    Tensor more(2 * kMiB);
    const StepMemory::PhaseScope backward(MemoryPhase::kBackward);
    Use("a");
    Tensor gradient(7 * kMiB);
  }
  { const StepMemory::PhaseScope step(MemoryPhase::kStep); }
  const StepMemoryReport report = memory_.EndStep();
  const auto timeline = memory_.TakeTimeline();
  ASSERT_TRUE(timeline.has_value());
  EXPECT_FALSE(memory_.TakeTimeline().has_value());
  EXPECT_FALSE(memory_.records());
  EXPECT_EQ(report.peak_bytes, 14 * kMiB);
  int64_t most = 0;
  for (const auto& sample : timeline->samples) {
    most = std::max(most, sample.held.total());
  }
  EXPECT_EQ(most, report.peak_bytes);
  EXPECT_EQ(timeline->samples.back().held.total(), 0);
  using Slice = MemoryTimeline::Slice;
  EXPECT_THAT(timeline->phases, ElementsAre(Field(&Slice::name, "forward"),
                                            Field(&Slice::name, "backward"),
                                            Field(&Slice::name, "forward"),
                                            Field(&Slice::name, "step")));
  EXPECT_THAT(timeline->units,
              ElementsAre(Field(&Slice::name, "a"), Field(&Slice::name, "b"),
                          Field(&Slice::name, "b"), Field(&Slice::name, "a")));
}

// Two samples: 3 MiB of activations, then 1 KiB of parameters besides.
MemoryTimeline SmallTimeline() {
  MemoryTimeline timeline;
  MemoryTimeline::Sample sample;
  sample.held.by_kind[static_cast<size_t>(HeldKind::kActivations)] = 3 * kMiB;
  timeline.AddSample(sample);
  sample.at = 50'000'000;
  sample.held.by_kind[static_cast<size_t>(HeldKind::kParameters)] = 1024;
  timeline.AddSample(sample);
  timeline.phases = {{"forward", 0, 99'000'000},
                     {"forward", 99'000'000, 100'000'000},
                     {"unseen", 100'000'000, 100'000'000}};
  timeline.report.peak_bytes = sample.held.total();
  timeline.report.at_peak.held = sample.held;
  timeline.report.at_peak.unit = "a<b";
  timeline.report.activations = {{"", 1234567}};
  timeline.step = 1003;
  return timeline;
}

TEST(TimelinePageTest, SaysWhichStepAndHowMuch) {
  MemoryTimeline timeline = SmallTimeline();
  const std::string page = ToPage(timeline, 3);
  EXPECT_THAT(page, HasSubstr("<title>Memory of step 1,003, rank 3</title>"));
  EXPECT_THAT(page, HasSubstr("<b>3 MiB</b> (3,146,752 bytes), in outside, "
                              "unit a&lt;b."));
  EXPECT_THAT(page, HasSubstr("<td>1,234,567</td><td>1.18 MiB</td>"));
  EXPECT_THAT(page, HasSubstr("<title>at 52 ms: 3 MiB\nparameters: 1 KiB\n"
                              "activations: 3 MiB</title>"));
  // Each phase has its name, and a place in the table.
  EXPECT_THAT(page, HasSubstr("style=\"left:99.00%;width:1.00%\" "
                              "title=\"forward, 1 ms\">forward</span>"));
  EXPECT_THAT(page, HasSubstr("<td class=\"name\">forward</td><td>0</td>"
                              "<td>99</td><td>3 MiB</td>"));
  EXPECT_THAT(page, Not(HasSubstr("unseen")));
  timeline.step = 0;
  EXPECT_THAT(ToPage(timeline, 3),
              HasSubstr("<title>Memory of a step, rank 3</title>"));
}

// The page looks as a report does, and needs nothing from elsewhere.
TEST(TimelinePageTest, HasTheColorsOfAllPages) {
  const std::string page = ToPage(SmallTimeline(), 0);
  EXPECT_THAT(page, HasSubstr("prefers-color-scheme:dark"));
  EXPECT_THAT(page, HasSubstr("name=\"viewport\""));
  for (const char* const kind : {"parameters", "activations"}) {
    const std::string color = absl::StrCat(MemoryKindColor(kind));
    EXPECT_THAT(page, HasSubstr("<polygon class=\"f" + color + "\""));
    EXPECT_THAT(page, HasSubstr("<li><span class=\"key b" + color +
                                "\"></span>" + kind + "</li>"));
  }
  // The legend has what is drawn, and no more.
  EXPECT_THAT(page, Not(HasSubstr("communication")));
  for (const char* const word :
       {"src=", "href", "url(", "@import", "<script"}) {
    EXPECT_THAT(page, Not(HasSubstr(word)));
  }
}

TEST(MemoryTimelineTest, ManyChangesKeepTheLargest) {
  MemoryTimeline timeline;
  const int64_t n = 10 * MemoryTimeline::kMaxSamples;
  for (int64_t i = 0; i < n; ++i) {
    MemoryTimeline::Sample sample;
    sample.at = i;
    sample.held.by_kind[0] = i == n / 3 ? 1000 : i % 7;
    timeline.AddSample(sample);
  }
  EXPECT_LE(timeline.samples.size(), MemoryTimeline::kMaxSamples);
  EXPECT_GT(timeline.samples.size(), MemoryTimeline::kMaxSamples / 4);
  int64_t most = 0, before = -1;
  for (const auto& sample : timeline.samples) {
    most = std::max(most, sample.held.total());
    EXPECT_GT(sample.at, before);
    before = sample.at;
  }
  EXPECT_EQ(most, 1000);
  EXPECT_EQ(timeline.changes_per_sample, 16);
}

TEST_F(StepMemoryTest, RefusalsSayWhatWasHeld) {
  memory_.EndStep();
  const int64_t before = memory_.refusals();
  Use("a");
  Tensor mine(3 * kMiB);
  EXPECT_THAT(AllocateCounted(int64_t{1} << 60, MemoryKind::kWorking),
              StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(memory_.refusals(), before + 1);
  const StepMemory::Refusal refusal = memory_.last_refusal();
  EXPECT_EQ(refusal.moment.held[HeldKind::kActivations], 3 * kMiB);
  EXPECT_EQ(refusal.moment.held[HeldKind::kWorking], 0);
  EXPECT_THAT(Texts(refusal.activations), ElementsAre("a 3"));
  EXPECT_EQ(HeldTable(refusal.moment),
            "3.0 MiB, in forward, unit a\n  activations           3.0 MiB");
}

TEST(StepMemoryTableTest, RowsBelowOnePercentAreCounted) {
  StepMemoryReport report;
  report.peak_bytes = 1000 * kMiB;
  HeldMemory& held = report.at_peak.held;
  held.by_kind[static_cast<size_t>(HeldKind::kParameters)] = 985 * kMiB;
  held.by_kind[static_cast<size_t>(HeldKind::kGradients)] = 10 * kMiB;
  held.by_kind[static_cast<size_t>(HeldKind::kOther)] = 2 * kMiB;
  held.by_kind[static_cast<size_t>(HeldKind::kTensors)] = 3 * kMiB;
  report.activations = {
      {"", 5 * kMiB}, {"a", 190 * kMiB}, {"b", 1 * kMiB}, {"c", 3 * kMiB}};
  const std::string kinds =
      "peak of 1000.0 MiB; held then: 1000.0 MiB, outside of a step\n"
      "  parameters          985.0 MiB\n"
      "  gradients            10.0 MiB\n"
      "  (2 more kinds, 5.0 MiB in all)\n"
      "activations by unit:\n"
      "       190.0 MiB  a\n"
      "         5.0 MiB  (before the first unit)\n";
  EXPECT_EQ(StepMemoryTable(report, 10), kinds +
                                             "         3.0 MiB  c\n"
                                             "  (1 more unit, 1.0 MiB in all)");
  EXPECT_EQ(StepMemoryTable(report, 2),
            kinds + "  (2 more units, 4.0 MiB in all)");
  EXPECT_EQ(HeldTable(report.at_peak),
            "1000.0 MiB, outside of a step\n"
            "  parameters          985.0 MiB\n"
            "  gradients            10.0 MiB\n"
            "  other                 2.0 MiB\n"
            "  tensors               3.0 MiB");
}

}  // namespace
}  // namespace tessera
