#include "base/torch_guard.h"

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/Tensor.h"
#include "absl/strings/cord.h"
#include "base/status_matchers.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pointee;
using ::testing::StartsWith;

at::Tensor Parameter(std::initializer_list<int64_t> sizes) {
  return at::ones(sizes).set_requires_grad(true);
}

TEST(CatchTorch, PassesResultsOn) {
  TESSERA_EXPECT_OK(CatchTorch("x", [] {}));
  TESSERA_EXPECT_OK(CatchTorch("x", [] { return absl::OkStatus(); }));
  EXPECT_THAT(CatchTorch("x", [] { return 3; }), IsOkAndHolds(3));
  EXPECT_THAT(CatchTorch("x", [] { return absl::StatusOr<int>(4); }),
              IsOkAndHolds(4));
  EXPECT_THAT(CatchTorch("x", [] { return std::make_unique<int>(5); }),
              IsOkAndHolds(Pointee(5)));
}

TEST(CatchTorch, ReturnedErrorsStayAsTheyAre) {
  EXPECT_THAT(CatchTorch("x", [] { return absl::NotFoundError("y"); }),
              StatusIs(StatusCode::kNotFound, "y"));
}

TEST(CatchTorch, RealTorchErrorHasNoBacktrace) {
  EXPECT_THAT(
      CatchTorch("forward",
                 [] {
                   at::ones({2, 3}).mm(at::ones({4, 5}));
                 }),
      StatusIs(StatusCode::kInternal,
               "forward: mat1 and mat2 shapes cannot be multiplied (2x3 and "
               "4x5)"));
}

TEST(CatchTorch, RealIndexErrorIsInvalidArgument) {
  EXPECT_THAT(CatchTorch("forward", [] { at::ones({2}).select(0, 5); }),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(StartsWith("forward: select(): index 5 out of "
                                        "range"),
                             Not(HasSubstr("\n")))));
}

// Address sanitizer ends the process instead of refusing.
#if !__has_feature(address_sanitizer)
TEST(CatchTorch, RealCpuAllocationFailureIsResourceExhausted) {
  EXPECT_THAT(CatchTorch("forward", [] { at::empty({int64_t{1} << 58}); }),
              StatusIs(StatusCode::kResourceExhausted,
                       AllOf(StartsWith("forward: "),
                             HasSubstr("can't allocate memory"))));
}
#endif

TEST(CatchTorch, EachExceptionHasItsCode) {
  const auto code_of = [](auto thrower) {
    return CatchTorch("x", thrower).code();
  };
  EXPECT_EQ(code_of([] { TORCH_CHECK_WITH(OutOfMemoryError, false, "m"); }),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(code_of([] { throw std::bad_alloc(); }),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(code_of([] { TORCH_CHECK_WITH(DistError, false, "m"); }),
            StatusCode::kUnavailable);
  EXPECT_EQ(code_of([] { TORCH_CHECK_WITH(DistBackendError, false, "m"); }),
            StatusCode::kUnavailable);
  EXPECT_EQ(code_of([] { TORCH_CHECK_WITH(DistNetworkError, false, "m"); }),
            StatusCode::kUnavailable);
  EXPECT_EQ(code_of([] { TORCH_CHECK_WITH(DistStoreError, false, "m"); }),
            StatusCode::kUnavailable);
  EXPECT_EQ(code_of([] { TORCH_CHECK_INDEX(false, "m"); }),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([] { TORCH_CHECK_VALUE(false, "m"); }),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([] { TORCH_CHECK_TYPE(false, "m"); }),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([] { TORCH_CHECK(false, "m"); }), StatusCode::kInternal);
  EXPECT_EQ(code_of([] { throw std::runtime_error("m"); }),
            StatusCode::kInternal);
}

TEST(CatchTorch, MessagesArePrefixedAndOnOneLine) {
  EXPECT_THAT(CatchTorch("step", [] { throw std::runtime_error("a\n\n b\n"); }),
              StatusIs(StatusCode::kInternal, "step: a; b"));
  EXPECT_THAT(
      CatchTorch("step", [] { throw 3; }),
      StatusIs(StatusCode::kInternal, "step: an exception of unknown type"));
  EXPECT_THAT(CatchTorch("step",
                         [] {
                           throw std::runtime_error(
                               "lost peer\nException raised from f at a.cc:1\n"
                               "frame #0: g");
                         }),
              StatusIs(StatusCode::kInternal, "step: lost peer"));
  EXPECT_THAT(
      CatchTorch(
          "step",
          [] { throw std::runtime_error("1\n2\n3\n4\n5\n6\n7\n8\n9\n10"); }),
      StatusIs(StatusCode::kInternal, "step: 1; 2; 3; 4; 5; 6; 7; 8; ..."));
}

TEST(StatusException, ComesBackAsItIs) {
  absl::Status thrown =
      absl::DeadlineExceededError("[layers.7] rank 2 is late");
  thrown.SetPayload("url", absl::Cord("payload"));
  EXPECT_EQ(CatchTorch("backward", [&] { throw StatusException(thrown); }),
            thrown);
  EXPECT_EQ(CatchTorch("backward", [&] { ThrowIfError(thrown); }), thrown);
  TESSERA_EXPECT_OK(CatchTorch("x", [] { ThrowIfError(absl::OkStatus()); }));
  EXPECT_STREQ(StatusException(thrown).what(), "[layers.7] rank 2 is late");
}

TEST(StatusExceptionDeath, RefusesOk) {
  EXPECT_DEATH(throw StatusException(absl::OkStatus()), "of an OK status");
}

TEST(StatusException, NestedGuardsKeepTheFirstStatus) {
  const absl::Status status = CatchTorch("outer", [] {
    ThrowIfError(CatchTorch("inner", [] { TORCH_CHECK(false, "m"); }));
  });
  EXPECT_THAT(status, StatusIs(StatusCode::kInternal, "inner: m"));
}

// The engine runs hooks on its own threads of control, stores what they throw
// as an exception_ptr and throws it again from backward().
TEST(StatusException, SurvivesAPostAccumulateHook) {
  const absl::Status thrown = absl::UnavailableError("[layers.7] rank 2 ended");
  at::Tensor w = Parameter({3});
  struct Hook : torch::autograd::PostAccumulateGradHook {
    explicit Hook(absl::Status s) : status(std::move(s)) {}
    void operator()(const torch::autograd::Variable&) override {
      ++calls;
      throw StatusException(status);
    }
    absl::Status status;
    int calls = 0;
  };
  auto hook = std::make_unique<Hook>(thrown);
  Hook* const raw = hook.get();
  torch::autograd::impl::set_post_acc_grad_hooks(w, std::move(hook));
  const at::Tensor loss = (w * 2).sum();
  EXPECT_EQ(CatchTorch("backward", [&] { loss.backward(); }), thrown);
  EXPECT_EQ(raw->calls, 1);
}

TEST(StatusException, SurvivesATensorHook) {
  const absl::Status thrown = absl::DataLossError("bad gradient");
  const at::Tensor w = Parameter({3});
  const at::Tensor y = w * 2;
  y.register_hook([&](at::Tensor) { throw StatusException(thrown); });
  const at::Tensor loss = y.sum();
  EXPECT_EQ(CatchTorch("backward", [&] { loss.backward(); }), thrown);
}

// A backward inside a backward (checkpointing does this) passes it on as well.
TEST(StatusException, SurvivesReentrantBackward) {
  const absl::Status thrown = absl::DataLossError("inner");
  const at::Tensor w = Parameter({3});
  const at::Tensor y = w * 2;
  y.register_hook([&](at::Tensor) {
    const c10::AutoGradMode grad_on(true);  // it is off in backward
    const at::Tensor inner = Parameter({2});
    const at::Tensor z = inner * 3;
    z.register_hook([&](at::Tensor) { throw StatusException(thrown); });
    z.sum().backward();
  });
  const at::Tensor loss = y.sum();
  EXPECT_EQ(CatchTorch("backward", [&] { loss.backward(); }), thrown);
}

TEST(CatchTorch, AutogradStaysUsableAfterAnError) {
  const at::Tensor w = Parameter({3});
  const at::Tensor y = w * 2;
  const unsigned hook = y.register_hook(
      [](at::Tensor) { throw StatusException(absl::InternalError("once")); });
  EXPECT_THAT(CatchTorch("backward", [&] { y.sum().backward({}, true); }),
              Not(IsOk()));
  y.remove_hook(hook);
  TESSERA_EXPECT_OK(CatchTorch("backward", [&] { y.sum().backward(); }));
  EXPECT_EQ(w.grad().sum().item<float>(), 6);
}

}  // namespace
}  // namespace tessera
