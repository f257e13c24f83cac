// Regions of a forward that is written down by hand.
#include "engine/plan/replay/recomputation.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "sharding/recompute/matmul_operators.h"

namespace tessera {
namespace {

using Kind = TraceEvent::Kind;

// Parameters 0 and 4 are of a module that is computed again, 1 is of another, 2
// of none, 3 of several.
class RecomputationTest : public ::testing::Test {
 protected:
  RecomputationTest() {
    trace_.operators = {"aten::mm", "aten::gelu"};
    options_.module_of = {0, 1, RecomputationOptions::kNone,
                          RecomputationOptions::kUnseen, 0};
  }

  // An operator that is given a parameter (-1: none); the number of its result.
  int32_t Run(const std::string& op, int32_t parameter,
              const std::vector<int32_t>& reads, int64_t bytes) {
    if (parameter >= 0 && !backward_) Add(Kind::kBegin, parameter);
    Use(reads);
    if (parameter >= 0) Add(Kind::kTouch, parameter);
    const auto made = static_cast<int32_t>(trace_.allocations.size());
    trace_.allocations.emplace_back();
    Add(Kind::kAllocate, made, bytes);
    forward_of_.push_back(begun_);
    Add(Kind::kOperator, op == "mm" ? 0 : 1, 0);
    begun_ = static_cast<int64_t>(trace_.events.size());
    return made;
  }
  void Free(int32_t allocation) {
    Add(Kind::kFree, allocation);
    begun_ = static_cast<int64_t>(trace_.events.size());
  }
  void Backward() {
    backward_ = true;
    trace_.backward = trace_.events.size();
  }
  // The node of the operator that made `of`: reads what it saved, and frees it.
  void Node(int32_t of, const std::vector<int32_t>& saved,
            const std::vector<int32_t>& frees, int32_t parameter = -1) {
    forward_ = forward_of_[static_cast<size_t>(of)];
    Use(saved);
    if (parameter >= 0) Add(Kind::kTouch, parameter);
    Add(Kind::kOperator, parameter >= 0 ? 0 : 1);
    for (const int32_t freed : frees) Add(Kind::kFree, freed);
  }

  void Add(Kind kind, int32_t what, int64_t bytes = 0) {
    TraceEvent event;
    event.kind = kind;
    event.backward = backward_;
    event.what = what;
    event.bytes = bytes;
    event.forward = forward_;
    trace_.events.push_back(event);
  }
  void Use(const std::vector<int32_t>& read) {
    const auto now = static_cast<int64_t>(trace_.events.size());
    for (const int32_t a : read) {
      trace_.uses.push_back({now, a, false});
      if (!backward_) {
        trace_.allocations[static_cast<size_t>(a)].last_forward_use = now;
      }
    }
  }

  // "gone 2@12, outlive 1@27; again at 20: !4 p0 +(200) mm +2 gelu -(200)":
  // what leaves before which event, what tapes hold for longer than autograd,
  // and what runs again: of the parameters 4 and 0, making 200 bytes for the
  // time and the allocation 2.
  std::string Result() const {
    const Recomputation made = Recompute(trace_, options_);
    std::string gone = "gone", outlive = "outlive", text;
    for (const Absence& absence : made.absences) {
      if (absence.until >= 0) {
        absl::StrAppend(&text, "; ", absence.allocation, " away ", absence.from,
                        "-", absence.until);
        continue;
      }
      const bool outlives =
          made.outlives[static_cast<size_t>(absence.allocation)];
      absl::StrAppend(outlives ? &outlive : &gone, " ", absence.allocation, "@",
                      absence.from);
    }
    for (const Rerun& rerun : made.reruns) {
      absl::StrAppend(&text, "; again at ", rerun.event, ":");
      for (const int32_t p : rerun.used_before) absl::StrAppend(&text, " !", p);
      for (const TraceEvent& step : rerun.steps) {
        if (step.kind == Kind::kTouch) {
          absl::StrAppend(&text, " p", step.what);
        } else if (step.kind == Kind::kOperator) {
          absl::StrAppend(&text, step.what == 0 ? " mm" : " gelu");
        } else if (step.what >= 0) {
          absl::StrAppend(&text, " +", step.what);
        } else {
          absl::StrAppend(&text, step.kind == Kind::kFree ? " -" : " +", "(",
                          step.bytes, ")");
        }
      }
    }
    if (made.moved_bytes > 0) absl::StrAppend(&text, "; ", made.moved_bytes);
    return absl::StrCat(gone, ", ", outlive, text);
  }

  // mm(x), gelu, mm of module 0, one of no module, and backward.
  void OneModule() {
    const int32_t x = Run("gelu", -1, {}, 100);
    const int32_t a = Run("mm", 0, {x}, 200);
    const int32_t b = Run("gelu", -1, {a}, 300);
    const int32_t c = Run("mm", 4, {b}, 400);
    const int32_t d = Run("mm", 2, {c}, 500);
    Backward();
    Node(d, {c}, {c, d}, 2);
    Node(c, {b}, {b}, 4);
    Node(b, {a}, {a});
    Node(a, {x}, {x}, 0);
  }
  // mm and gelu with parameter 0, mm and gelu with `second`, one of no module.
  // `saves_result`: the first gelu's node needs its result, too.
  void TwoModules(int32_t second, bool saves_result = false) {
    const int32_t x = Run("gelu", -1, {}, 100);
    const int32_t a = Run("mm", 0, {x}, 200);
    const int32_t b = Run("gelu", -1, {a}, 50);
    const int32_t c = Run("mm", second, {b}, 300);
    const int32_t d = Run("gelu", -1, {c}, 60);
    const int32_t e = Run("mm", 2, {d}, 70);
    Backward();
    Node(e, {d}, {d, e}, 2);
    Node(d, {c}, {c});
    if (saves_result) {
      Node(c, {b}, {}, second);
      Node(b, {a, b}, {a, b});
    } else {
      Node(c, {b}, {b}, second);
      Node(b, {a}, {a});
    }
    Node(a, {x}, {x}, 0);
  }

  // `n` modules, each mm and gelu of 100 bytes, whose nodes save what they
  // read; the last of no module that is computed again.
  void Chain(int n) {
    options_.module_of.clear();
    std::vector<int32_t> made = {Run("gelu", -1, {}, 100)};
    for (int i = 0; i < n; ++i) {
      options_.module_of.push_back(i + 1 < n ? i : RecomputationOptions::kNone);
      made.push_back(Run("mm", i, {made.back()}, 100));
      made.push_back(Run("gelu", -1, {made.back()}, 100));
    }
    Backward();
    for (size_t i = made.size(); i-- > 1;) {
      Node(made[i], {made[i - 1]}, {made[i - 1]},
           i % 2 == 1 ? static_cast<int32_t>(i / 2) : -1);
    }
  }

  bool backward_ = false;
  int64_t begun_ = 0, forward_ = -1;
  std::vector<int64_t> forward_of_;
  Trace trace_;
  RecomputationOptions options_;
};

TEST_F(RecomputationTest, WithoutUnitsNothingIs) {
  OneModule();
  options_.module_of.clear();
  EXPECT_EQ(Result(), "gone, outlive");
}

// The node's weight is unpacked first.
TEST_F(RecomputationTest, WhatItsNodesSavedIsGivenUp) {
  OneModule();
  EXPECT_EQ(Result(),
            "gone 1@12 2@12, outlive; again at 20: !4 p0 +1 mm +2 gelu");
}

TEST_F(RecomputationTest, ProductsAreHeldUntilTheLastNode) {
  OneModule();
  options_.keeps = IsMatmulOrAttention;
  EXPECT_EQ(Result(), "gone 2@12, outlive 1@27; again at 20: !4 +2 gelu");
}

// Autograd saves none of what leads to what it saves.
TEST_F(RecomputationTest, TemporariesOfTheForwardAreThoseOfTheReplay) {
  const int32_t x = Run("gelu", -1, {}, 100);
  const int32_t a = Run("mm", 0, {x}, 200);
  const int32_t b = Run("gelu", -1, {a}, 300);
  Free(a);
  const int32_t c = Run("gelu", -1, {b}, 350);
  Free(b);
  const int32_t d = Run("mm", 4, {c}, 400);
  const int32_t e = Run("mm", 2, {d}, 500);
  Backward();
  Node(e, {d}, {d, e}, 2);
  Node(d, {c}, {c}, 4);
  Node(a, {x}, {x}, 0);
  EXPECT_EQ(Result(),
            "gone 3@16, outlive; again at 24: !4 p0 +(200) mm +(300) gelu "
            "-(200) +3 gelu -(300)");
  options_.keeps = IsMatmulOrAttention;
  EXPECT_EQ(Result(),
            "gone 3@16, outlive 1@29; again at 24: !4 +(300) gelu +3 gelu "
            "-(300)");
}

TEST_F(RecomputationTest, ABudgetKeepsTheFirstThatFit) {
  TwoModules(1);
  EXPECT_EQ(Result(),
            "gone 1@8 3@14, outlive; again at 22: p1 +3 mm; again at 27: p0 +1 "
            "mm");
  options_.budget_bytes = 200;
  EXPECT_EQ(Result(), "gone 3@14, outlive; again at 22: p1 +3 mm");
  options_.budget_bytes = 499;
  EXPECT_EQ(Result(), "gone 3@14, outlive; again at 22: p1 +3 mm");
  options_.budget_bytes = 500;
  EXPECT_EQ(Result(), "gone, outlive");
}

// It is there until they have used it, and comes back for its own.
TEST_F(RecomputationTest, WhatOthersSavedTooStaysForThem) {
  TwoModules(1, /*saves_result=*/true);
  EXPECT_EQ(Result(),
            "gone 1@8 2@26 3@14, outlive; again at 22: p1 +3 mm; again at 26: "
            "p0 +1 mm +2 gelu");
}

TEST_F(RecomputationTest, ARegionBeginsAnewWithItsFirstParameter) {
  TwoModules(0);
  EXPECT_EQ(Result(),
            "gone 1@8 3@14, outlive; again at 22: p0 +3 mm; again at 27: p0 +1 "
            "mm");
}

TEST_F(RecomputationTest, SharedParametersEndNoRegion) {
  TwoModules(3);
  EXPECT_EQ(Result(),
            "gone 1@14 2@14 3@14, outlive; again at 22: p0 +1 mm +2 gelu p3 +3 "
            "mm");
}

TEST_F(RecomputationTest, TheLastRegionIsKept) {
  options_.module_of[2] = 0;
  OneModule();
  EXPECT_EQ(Result(), "gone, outlive");
}

TEST_F(RecomputationTest, WhatStaysIsElsewhereUntilTheNextOneAsks) {
  Chain(4);
  options_.recomputes = false;
  options_.moves_from = 100;
  // The last module's tensors that are on their way never leave.
  EXPECT_EQ(Result(),
            "gone, outlive; 0 away 14-36; 1 away 14-36; 2 away 20-31; 3 away "
            "20-31; 600");
  options_.moves_from = 101;
  EXPECT_EQ(Result(), "gone, outlive");
  options_.moves_from = 100;
  options_.budget_bytes = 400;
  EXPECT_EQ(Result(), "gone, outlive; 200");
  options_.budget_bytes = 0;
  options_.recomputes = true;
  EXPECT_EQ(Result(),
            "gone 1@8 3@14 5@20, outlive; 0 away 20-36; again at 31: p2 +5 mm; "
            "again at 36: p1 +3 mm; again at 41: p0 +1 mm; 300");
}

}  // namespace
}  // namespace tessera
