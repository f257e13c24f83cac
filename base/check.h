// Checks for our own mistakes: a broken invariant ends the process.
//
//   TESSERA_CHECK(whole()) << "unit " << name;
//   TESSERA_CHECK_EQ(shard.numel() * world_size, padded_numel);
//   TESSERA_CHECK_OK(status);
//
//   F 08:45:01.123 r3/8 unit.cc:88] Check failed: a == b (3 vs 4) unit layers.7
//
// Checks are on in every build. A failed one prints file, line, rank, the
// operands and the text that SetFatalContext (base/log.h) registered, then
// calls abort(). What a user, a file, a peer or a memory limit can cause is an
// absl::Status instead.
#ifndef BASE_CHECK_H_
#define BASE_CHECK_H_

#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/base/optimization.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/log.h"
#include "base/status.h"

namespace tessera {
namespace check_internal {

template <typename T, typename = void>
struct IsPrintable : std::false_type {};
template <typename T>
struct IsPrintable<T, std::void_t<decltype(std::declval<std::ostream&>()
                                           << std::declval<const T&>())>>
    : std::true_type {};

template <typename T>
void Print(std::ostream& os, const T& value) {
  if constexpr (std::is_null_pointer_v<T>) {
    os << "nullptr";
  } else if constexpr (std::is_enum_v<T>) {
    os << +static_cast<std::underlying_type_t<T>>(value);
  } else if constexpr (IsPrintable<T>::value) {
    os << value;
  } else {
    os << "?";
  }
}

// Builds the text on failure only, out of the fast path.
template <typename A, typename B>
std::unique_ptr<std::string> Failure(const char* text, const A& a, const B& b) {
  std::ostringstream os;
  os << "Check failed: " << text << " (";
  Print(os, a);
  os << " vs ";
  Print(os, b);
  os << ") ";
  return std::make_unique<std::string>(os.str());
}

template <typename T>
constexpr bool kIsInteger = std::is_integral_v<T> && !std::is_same_v<T, bool>;

// Integers compare by value, whatever their signs: -1 is less than 0u.
template <typename A, typename B>
constexpr bool kMixedSigns =
    kIsInteger<A>&& kIsInteger<B>&& std::is_signed_v<A> != std::is_signed_v<B>;

struct Equal {
  template <typename A, typename B>
  bool operator()(const A& a, const B& b) const {
    if constexpr (kMixedSigns<A, B>) {
      if constexpr (std::is_signed_v<A>) {
        return a >= 0 && static_cast<std::make_unsigned_t<A>>(a) == b;
      } else {
        return b >= 0 && a == static_cast<std::make_unsigned_t<B>>(b);
      }
    } else {
      return a == b;
    }
  }
};

struct Less {
  template <typename A, typename B>
  bool operator()(const A& a, const B& b) const {
    if constexpr (kMixedSigns<A, B>) {
      if constexpr (std::is_signed_v<A>) {
        return a < 0 || static_cast<std::make_unsigned_t<A>>(a) < b;
      } else {
        return b > 0 && a < static_cast<std::make_unsigned_t<B>>(b);
      }
    } else {
      return a < b;
    }
  }
};

struct NotEqual {
  template <typename A, typename B>
  bool operator()(const A& a, const B& b) const {
    return !Equal()(a, b);
  }
};
struct Greater {
  template <typename A, typename B>
  bool operator()(const A& a, const B& b) const {
    return Less()(b, a);
  }
};
struct LessOrEqual {
  template <typename A, typename B>
  bool operator()(const A& a, const B& b) const {
    return Less()(a, b) || Equal()(a, b);
  }
};
struct GreaterOrEqual {
  template <typename A, typename B>
  bool operator()(const A& a, const B& b) const {
    return Less()(b, a) || Equal()(a, b);
  }
};

// Returns null if the relation holds.
template <typename Relation, typename A, typename B>
std::unique_ptr<std::string> Compare(const char* text, const A& a, const B& b) {
  if (ABSL_PREDICT_TRUE(Relation()(a, b))) return nullptr;
  return Failure(text, a, b);
}

inline std::unique_ptr<std::string> CheckOk(const char* text,
                                            const absl::Status& status) {
  if (ABSL_PREDICT_TRUE(status.ok())) return nullptr;
  std::ostringstream os;
  os << "Check failed: " << text << " is OK (" << status << ") ";
  return std::make_unique<std::string>(os.str());
}

}  // namespace check_internal
}  // namespace tessera

#define TESSERA_CHECK(...)                                                   \
  ABSL_PREDICT_TRUE(static_cast<bool>(__VA_ARGS__))                          \
  ? (void)0                                                                  \
  : ::tessera::log_internal::Voidify() &                                     \
          ::tessera::log_internal::FatalMessage(__FILE__, __LINE__).stream() \
              << "Check failed: " #__VA_ARGS__ " "

#define TESSERA_CHECK_EQ(a, b) TESSERA_CHECK_INTERNAL(Equal, ==, a, b)
#define TESSERA_CHECK_NE(a, b) TESSERA_CHECK_INTERNAL(NotEqual, !=, a, b)
#define TESSERA_CHECK_LT(a, b) TESSERA_CHECK_INTERNAL(Less, <, a, b)
#define TESSERA_CHECK_LE(a, b) TESSERA_CHECK_INTERNAL(LessOrEqual, <=, a, b)
#define TESSERA_CHECK_GT(a, b) TESSERA_CHECK_INTERNAL(Greater, >, a, b)
#define TESSERA_CHECK_GE(a, b) TESSERA_CHECK_INTERNAL(GreaterOrEqual, >=, a, b)

// Checks an absl::Status or absl::StatusOr.
#define TESSERA_CHECK_OK(...)                                     \
  TESSERA_CHECK_INTERNAL_FAIL(::tessera::check_internal::CheckOk( \
      #__VA_ARGS__, ::tessera::status_internal::ToStatus(__VA_ARGS__)))

#define TESSERA_CHECK_INTERNAL(relation, op, a, b)                             \
  TESSERA_CHECK_INTERNAL_FAIL(                                                 \
      ::tessera::check_internal::Compare<::tessera::check_internal::relation>( \
          #a " " #op " " #b, (a), (b)))

// The loop runs at most once, since its body ends the process. As a `while` it
// takes `<<` and can be nested in an `if` without braces.
#define TESSERA_CHECK_INTERNAL_FAIL(failure)                         \
  while (std::unique_ptr<std::string> tessera_failure = (failure))   \
  ::tessera::log_internal::FatalMessage(__FILE__, __LINE__).stream() \
      << *tessera_failure

#endif  // BASE_CHECK_H_
