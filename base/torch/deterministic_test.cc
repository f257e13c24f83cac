#include "base/torch/deterministic.h"

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/Context.h"
#include "base/status_matchers.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/functions/utils.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

// Returns the settings, for example "warns cudnn".
std::string Now() {
  const at::Context& c = at::globalContext();
  std::string text = !c.deterministicAlgorithms()          ? "off"
                     : c.deterministicAlgorithmsWarnOnly() ? "warns"
                                                           : "errors";
  text += c.deterministicFillUninitializedMemory() ? " fill" : "";
  text += c.deterministicCuDNN() ? " cudnn" : "";
  text += c.benchmarkCuDNN() ? " benchmark" : "";
  return text;
}

class DeterministicTest : public ::testing::Test {
 protected:
  DeterministicTest() { Reset(); }
  ~DeterministicTest() override { Reset(); }
  static void Reset() {
    at::Context& c = at::globalContext();
    c.setDeterministicAlgorithms(false, false);
    c.setDeterministicFillUninitializedMemory(true);
    c.setDeterministicCuDNN(false);
    c.setBenchmarkCuDNN(false);
  }
};

TEST_F(DeterministicTest, OnWithinAndAsBeforeAfterwards) {
  at::globalContext().setBenchmarkCuDNN(true);
  ASSERT_EQ(Now(), "off fill benchmark");
  {
    const DeterministicScope scope(Determinism::kWarns);
    EXPECT_EQ(Now(), "warns cudnn");
  }
  EXPECT_EQ(Now(), "off fill benchmark");
  {
    const DeterministicScope scope(Determinism::kErrors);
    EXPECT_EQ(Now(), "errors cudnn");
  }
  EXPECT_EQ(Now(), "off fill benchmark");
}

TEST_F(DeterministicTest, TheStrictestScopeCountsAndTheLastOneRestores) {
  auto first = std::make_unique<DeterministicScope>(Determinism::kWarns);
  auto second = std::make_unique<DeterministicScope>(Determinism::kErrors);
  EXPECT_EQ(Now(), "errors cudnn");
  first.reset();
  EXPECT_EQ(Now(), "errors cudnn");
  first = std::make_unique<DeterministicScope>(Determinism::kWarns);
  second.reset();
  EXPECT_EQ(Now(), "warns cudnn");
  first.reset();
  EXPECT_EQ(Now(), "off fill");
}

TEST_F(DeterministicTest, WhatTheUserHadSetIsNotWeakened) {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  {
    const DeterministicScope scope(Determinism::kWarns);
    EXPECT_EQ(Now(), "errors fill cudnn");
  }
  EXPECT_EQ(Now(), "errors fill");
}

TEST_F(DeterministicTest, WhatTheUserSetsMeanwhileStays) {
  {
    const DeterministicScope scope(Determinism::kWarns);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    at::globalContext().setBenchmarkCuDNN(true);
  }
  EXPECT_EQ(Now(), "errors fill benchmark");
}

class Heard final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg().substr(0, 6));
  }
  std::vector<std::string> texts;
};

TEST_F(DeterministicTest, AnOperatorIsWarnedOfOnce) {
  Heard heard;
  const c10::WarningUtils::WarningHandlerGuard guard(&heard);
  {
    const DeterministicScope scope(Determinism::kWarns);
    for (int i = 0; i < 3; ++i) {
      at::globalContext().alertNotDeterministic("first_");
      at::globalContext().alertNotDeterministic("second");
      TORCH_WARN("others");
    }
    EXPECT_THAT(heard.texts,
                ElementsAre("first_", "second", "others", "others", "others"));
  }
  EXPECT_EQ(c10::WarningUtils::get_warning_handler(), &heard);
  const DeterministicScope scope(Determinism::kErrors);
  EXPECT_THROW(at::globalContext().alertNotDeterministic("first_"), c10::Error);
}

// A guard of the user's that was opened within a scope and ends after it puts
// the scope's handler back.
TEST_F(DeterministicTest, AHandlerThatComesBackHandsOnAndIsTakenAgain) {
  Heard heard;
  const c10::WarningUtils::WarningHandlerGuard guard(&heard);
  const auto warn = [] {
    for (int i = 0; i < 2; ++i) {
      at::globalContext().alertNotDeterministic("first_");
    }
  };
  auto scope = std::make_unique<DeterministicScope>(Determinism::kWarns);
  {
    Heard inner;
    const c10::WarningUtils::WarningHandlerGuard within(&inner);
    scope.reset();
  }
  ASSERT_NE(c10::WarningUtils::get_warning_handler(), &heard);
  TORCH_WARN("others");
  TORCH_WARN("others");
  EXPECT_THAT(heard.texts, ElementsAre("others", "others"));
  heard.texts.clear();
  for (int i = 0; i < 2; ++i) {
    scope = std::make_unique<DeterministicScope>(Determinism::kWarns);
    warn();
    scope.reset();
  }
  EXPECT_THAT(heard.texts, ElementsAre("first_", "first_"));
  EXPECT_EQ(c10::WarningUtils::get_warning_handler(), &heard);
}

// Hands on to what was there before it, as a user's may.
class HandsOn final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    ++calls;
    before->process(warning);
  }
  c10::WarningHandler* before = c10::WarningUtils::get_warning_handler();
  int calls = 0;
};

TEST_F(DeterministicTest, AHandlerThatHandsOnMakesNoCircle) {
  Heard heard;
  const c10::WarningUtils::WarningHandlerGuard guard(&heard);
  auto scope = std::make_unique<DeterministicScope>(Determinism::kWarns);
  HandsOn hands_on;
  {
    const c10::WarningUtils::WarningHandlerGuard within(&hands_on);
    scope.reset();
    scope = std::make_unique<DeterministicScope>(Determinism::kWarns);
    at::globalContext().alertNotDeterministic("first_");
    EXPECT_EQ(hands_on.calls, 1);
    EXPECT_THAT(heard.texts, ElementsAre("first_"));
    scope.reset();
  }
  // The first scope's is back, and hands on to what was there before it.
  TORCH_WARN("others");
  EXPECT_THAT(heard.texts, ElementsAre("first_", "others"));
}

TEST_F(DeterministicTest, AScopeThatEndsElsewhereLeavesThatThreadsOwn) {
  Heard heard;
  const c10::WarningUtils::WarningHandlerGuard guard(&heard);
  auto gone = std::make_unique<DeterministicScope>(Determinism::kWarns);
  std::thread([&] {
    Heard others;
    const c10::WarningUtils::WarningHandlerGuard guard(&others);
    const DeterministicScope own(Determinism::kWarns);
    gone.reset();
    for (int i = 0; i < 2; ++i) {
      at::globalContext().alertNotDeterministic("first_");
    }
    EXPECT_THAT(others.texts, ElementsAre("first_"));
  }).join();
  EXPECT_EQ(Now(), "off fill");
  // The handler here is still there, and does nothing until a scope begins.
  for (int i = 0; i < 2; ++i) TORCH_WARN("nondeterministic");
  EXPECT_THAT(heard.texts, ElementsAre("nondet", "nondet"));
  {
    const DeterministicScope scope(Determinism::kWarns);
    for (int i = 0; i < 2; ++i) {
      at::globalContext().alertNotDeterministic("first_");
    }
  }
  EXPECT_THAT(heard.texts, ElementsAre("nondet", "nondet", "first_"));
  EXPECT_EQ(c10::WarningUtils::get_warning_handler(), &heard);
}

TEST_F(DeterministicTest, CublasIsAskedForUnlessTheUserSaysHow) {
  constexpr char kName[] = "CUBLAS_WORKSPACE_CONFIG";
  unsetenv(kName);
  TESSERA_EXPECT_OK(SetDeterministicCublas());
  EXPECT_STREQ(std::getenv(kName), ":4096:8");
  setenv(kName, ":16:8", 1);
  TESSERA_EXPECT_OK(SetDeterministicCublas());
  EXPECT_STREQ(std::getenv(kName), ":16:8");
  setenv(kName, ":0:0", 1);
  EXPECT_THAT(SetDeterministicCublas(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("CUBLAS_WORKSPACE_CONFIG is ':0:0'")));
  EXPECT_STREQ(std::getenv(kName), ":0:0");
}

// A node that is called as libtorch's are.
struct NamedNode : torch::autograd::Node {
  explicit NamedNode(std::string name) : called(std::move(name)) {}
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  std::string name() const override { return called; }
  const std::string called;
};

at::Tensor Through(const at::Tensor& x, const std::string& name) {
  const auto node = std::make_shared<NamedNode>(name);
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  at::Tensor y = x.detach().clone();
  torch::autograd::create_gradient_edge(y, node);
  return y;
}

TEST(UnorderedBackwardsTest, AreFoundOnceEachBehindOtherNodes) {
  const at::Tensor x = at::ones({2}).requires_grad_();
  at::Tensor y = Through(x * 2, "ScaledDotProductCudnnAttentionBackward0");
  y = Through(y.exp(), "ScaledDotProductCudnnAttentionBackward0");
  const at::Tensor z = Through(x, "EfficientAttentionBackward0") + y.sin();
  const at::Tensor loss = z.sum();
  const auto both =
      UnorderedElementsAre("aten::_scaled_dot_product_cudnn_attention",
                           "aten::_efficient_attention_forward");
  EXPECT_THAT(UnorderedBackwards(loss), both);
  loss.backward();
  EXPECT_THAT(UnorderedBackwards(loss), both);
}

TEST(UnorderedBackwardsTest, AreNotThoseThatAddInOrder) {
  const at::Tensor x = at::ones({2}).requires_grad_();
  EXPECT_THAT(UnorderedBackwards(
                  Through(x, "ScaledDotProductFlashAttentionForCpuBackward0")),
              IsEmpty());
  EXPECT_THAT(UnorderedBackwards(x.detach()), IsEmpty());
}

}  // namespace
}  // namespace tessera
