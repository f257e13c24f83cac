// Matchers and assertions for absl::Status and absl::StatusOr, for tests only.
//
//   EXPECT_THAT(Open("a"), StatusIs(absl::StatusCode::kNotFound,
//                                   HasSubstr("a")));
//   EXPECT_THAT(Count(), IsOkAndHolds(Gt(3)));
//   TESSERA_ASSERT_OK_AND_ASSIGN(auto file, Open("b"));
#ifndef BASE_STATUS_MATCHERS_H_
#define BASE_STATUS_MATCHERS_H_

#include <ostream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace status_internal {

inline const absl::Status& StatusOf(const absl::Status& status) {
  return status;
}
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& value) {
  return value.status();
}

// StatusOr's value is matched as a const reference, so move-only types work.
template <typename Inner>
class IsOkAndHoldsMatcher {
 public:
  explicit IsOkAndHoldsMatcher(Inner inner) : inner_(std::move(inner)) {}

  template <typename StatusOrType>
  operator ::testing::Matcher<StatusOrType>() const {  // NOLINT: gmock's way
    return ::testing::Matcher<StatusOrType>(new Impl<StatusOrType>(inner_));
  }

 private:
  template <typename StatusOrType>
  class Impl : public ::testing::MatcherInterface<StatusOrType> {
   public:
    using Value = typename std::remove_cv_t<
        std::remove_reference_t<StatusOrType>>::value_type;

    explicit Impl(const Inner& inner)
        : inner_(::testing::SafeMatcherCast<const Value&>(inner)) {}

    bool MatchAndExplain(
        StatusOrType actual,
        ::testing::MatchResultListener* listener) const override {
      if (!actual.ok()) {
        *listener << "which has the error " << actual.status();
        return false;
      }
      return inner_.MatchAndExplain(*actual, listener);
    }
    void DescribeTo(std::ostream* os) const override {
      *os << "is OK and its value ";
      inner_.DescribeTo(os);
    }
    void DescribeNegationTo(std::ostream* os) const override {
      *os << "is not OK or its value ";
      inner_.DescribeNegationTo(os);
    }

   private:
    ::testing::Matcher<const Value&> inner_;
  };

  Inner inner_;
};

}  // namespace status_internal

MATCHER(IsOk, negation ? "is not OK" : "is OK") {
  const absl::Status& status = status_internal::StatusOf(arg);
  if (!status.ok()) *result_listener << "which is " << status;
  return status.ok();
}

template <typename Inner>
status_internal::IsOkAndHoldsMatcher<std::decay_t<Inner>> IsOkAndHolds(
    Inner&& inner) {
  return status_internal::IsOkAndHoldsMatcher<std::decay_t<Inner>>(
      std::forward<Inner>(inner));
}

MATCHER_P2(StatusIs, code, message,
           std::string(negation ? "has not" : "has") + " the code " +
               absl::StatusCodeToString(code) + " and a message that " +
               ::testing::DescribeMatcher<std::string>(message)) {
  const absl::Status& status = status_internal::StatusOf(arg);
  const std::string actual_message(status.message());
  if (status.code() == code && ::testing::Value(actual_message, message)) {
    return true;
  }
  *result_listener << "which is " << status;
  return false;
}
template <typename Code>
auto StatusIs(Code code) {
  return StatusIs(code, ::testing::_);
}

}  // namespace tessera

// PrintTo makes tests print the value as text instead of bytes. gtest looks for
// it in absl's namespace.
namespace absl {
template <typename T>
void PrintTo(const StatusOr<T>& value, std::ostream* os) {
  if (value.ok()) {
    *os << "OK: " << ::testing::PrintToString(*value);
  } else {
    *os << value.status();
  }
}
}  // namespace absl

#define TESSERA_EXPECT_OK(...) EXPECT_THAT((__VA_ARGS__), ::tessera::IsOk())
#define TESSERA_ASSERT_OK(...) ASSERT_THAT((__VA_ARGS__), ::tessera::IsOk())

// Assigns as TESSERA_ASSIGN_OR_RETURN does, but an error fails and ends the
// test.
#define TESSERA_ASSERT_OK_AND_ASSIGN(lhs, ...)                              \
  TESSERA_STATUS_INTERNAL_ASSERT_ASSIGN(                                    \
      TESSERA_STATUS_INTERNAL_CONCAT(tessera_status_or_, __COUNTER__), lhs, \
      (__VA_ARGS__))
#define TESSERA_STATUS_INTERNAL_ASSERT_ASSIGN(holder, lhs, expression) \
  auto holder = expression;                                            \
  ASSERT_TRUE(holder.ok()) << holder.status();                         \
  TESSERA_STATUS_INTERNAL_UNPAREN(lhs) = std::move(holder).value()

#endif  // BASE_STATUS_MATCHERS_H_
