// Status helpers return early, assign, and add context to messages.
//
//   absl::Status Run() {
//     TESSERA_RETURN_IF_ERROR(Prepare());
//     TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<File> file, Open("a"));
//     TESSERA_ASSIGN_OR_RETURN((auto [begin, end]), Range(*file));
//     return Annotate(Read(*file, begin, end), "reading a");
//   }
//
// A left side that holds a comma goes in parentheses, as above.
#ifndef BASE_STATUS_H_
#define BASE_STATUS_H_

#include <string>
#include <type_traits>
#include <utility>

#include "absl/base/optimization.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Returns `status` with "context: " before its message; code and payloads stay.
// An OK status is returned as it is.
absl::Status Annotate(const absl::Status& status, absl::string_view context);

// Writes a status as text that can be sent to other ranks: "" if it is OK,
// otherwise "<code> <message>". Payloads are left out.
std::string StatusToText(const absl::Status& status);
// Returns the status whose text StatusToText wrote; Internal, quoting `text`,
// if it is not such a text.
absl::Status StatusFromText(absl::string_view text);

namespace status_internal {
inline absl::Status ToStatus(absl::Status status) { return status; }
template <typename T>
absl::Status ToStatus(absl::StatusOr<T> value) {
  return std::move(value).status();
}
template <typename T,
          std::enable_if_t<!std::is_convertible_v<T&&, absl::Status>, int> = 0>
absl::Status ToStatus(T&&) {
  static_assert(sizeof(T) == 0,
                "TESSERA_RETURN_IF_ERROR takes an absl::Status or an "
                "absl::StatusOr");
  return absl::OkStatus();
}

template <typename T>
inline constexpr bool kIsStatusOr = false;
template <typename T>
inline constexpr bool kIsStatusOr<absl::StatusOr<T>> = true;

// Returns false for a function that cannot return a Status, by the beginning of
// its __PRETTY_FUNCTION__: "int main(int, char **)". For other types the
// compiler says that a Status is not one.
constexpr bool MayReturnStatus(const char* function) {
  for (const char* type : {"int ", "void ", "bool "}) {
    const char* c = function;
    while (*type != '\0' && *c == *type) ++c, ++type;
    if (*type == '\0') return false;
  }
  return true;
}
}  // namespace status_internal

}  // namespace tessera

// Evaluates an absl::Status or absl::StatusOr once and returns its error from
// the enclosing function, which returns either of the two types; main does not
// (TESSERA_MAIN in engine/program/start.h).
#define TESSERA_RETURN_IF_ERROR(...)                                \
  TESSERA_STATUS_INTERNAL_RETURN(                                   \
      TESSERA_STATUS_INTERNAL_CONCAT(tessera_status_, __COUNTER__), \
      ::tessera::status_internal::ToStatus(__VA_ARGS__))

// TESSERA_ASSIGN_OR_RETURN(lhs, expression): returns the error of the StatusOr,
// or moves its value to `lhs`, which may declare a variable. Expands to several
// statements, so it cannot be the body of an `if` without braces.
#define TESSERA_ASSIGN_OR_RETURN(lhs, ...)                               \
  TESSERA_STATUS_INTERNAL_ASSIGN(                                        \
      TESSERA_STATUS_INTERNAL_CONCAT(                                    \
          TESSERA_ASSIGN_OR_RETURN_needs_braces_after_if_, __COUNTER__), \
      lhs, (__VA_ARGS__))

// Names are unique, so that the expression may hold a lambda that uses these
// macros too. The name of the StatusOr is what a compiler says of one that is
// declared in an `if` without braces and used behind it, so its declaration
// comes first.
#define TESSERA_STATUS_INTERNAL_RETURN(status, ...) \
  do {                                              \
    TESSERA_STATUS_INTERNAL_CHECK_FUNCTION;         \
    ::absl::Status status = __VA_ARGS__;            \
    if (ABSL_PREDICT_FALSE(!status.ok())) {         \
      return status;                                \
    }                                               \
  } while (false)

#define TESSERA_STATUS_INTERNAL_ASSIGN(holder, lhs, expression)            \
  auto holder = expression;                                                \
  TESSERA_STATUS_INTERNAL_CHECK_FUNCTION;                                  \
  static_assert(::tessera::status_internal::kIsStatusOr<decltype(holder)>, \
                "TESSERA_ASSIGN_OR_RETURN takes an absl::StatusOr<T>; "    \
                "an absl::Status goes to TESSERA_RETURN_IF_ERROR");        \
  if (ABSL_PREDICT_FALSE(!holder.ok())) {                                  \
    return std::move(holder).status();                                     \
  }                                                                        \
  TESSERA_STATUS_INTERNAL_UNPAREN(lhs) = std::move(holder).value()

#define TESSERA_STATUS_INTERNAL_CHECK_FUNCTION                                 \
  static_assert(                                                               \
      ::tessera::status_internal::MayReturnStatus(__PRETTY_FUNCTION__),        \
      "TESSERA_RETURN_IF_ERROR and TESSERA_ASSIGN_OR_RETURN return an "        \
      "absl::Status: the function around them must return absl::Status or "    \
      "absl::StatusOr<T>. In place of main, write absl::Status Run(int argc, " \
      "char** argv) and TESSERA_MAIN(Run)")

#define TESSERA_STATUS_INTERNAL_CONCAT_(a, b) a##b
#define TESSERA_STATUS_INTERNAL_CONCAT(a, b) \
  TESSERA_STATUS_INTERNAL_CONCAT_(a, b)

// UNPAREN(x) and UNPAREN((x)) are both x: STRIP (x) becomes STRIP x, and the
// pasted TESSERA_GONE_..STRIP is empty.
#define TESSERA_STATUS_INTERNAL_UNPAREN(x) \
  TESSERA_STATUS_INTERNAL_PASTE(TESSERA_STATUS_INTERNAL_STRIP x)
#define TESSERA_STATUS_INTERNAL_STRIP(...) \
  TESSERA_STATUS_INTERNAL_STRIP __VA_ARGS__
#define TESSERA_STATUS_INTERNAL_PASTE(...) \
  TESSERA_STATUS_INTERNAL_PASTE_(__VA_ARGS__)
#define TESSERA_STATUS_INTERNAL_PASTE_(...) TESSERA_GONE_##__VA_ARGS__
#define TESSERA_GONE_TESSERA_STATUS_INTERNAL_STRIP

#endif  // BASE_STATUS_H_
