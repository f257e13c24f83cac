// Converts between libtorch's exceptions and our statuses.
//
//   absl::Status status = CatchTorch("backward", [&] { loss.backward(); });
//
// In the other direction, code that libtorch calls (hooks, dispatcher
// fallbacks) and that cannot return a Status throws a StatusException. It
// travels through libtorch, autograd's threads included, and comes out of
// CatchTorch as the very Status it carries.
//
//   c10::OutOfMemoryError, std::bad_alloc              ResourceExhausted
//   c10::DistError (backend, network, store)           Unavailable
//   c10::IndexError, ValueError, TypeError             InvalidArgument
//   StatusException                                    its own code
//   any other c10::Error, std::exception or object     Internal
//
// Messages are "what: the exception's first lines", without libtorch's
// backtrace. The message of a StatusException stays as it is.
#ifndef BASE_TORCH_GUARD_H_
#define BASE_TORCH_GUARD_H_

#include <exception>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Carries a Status that is not OK through code that knows only exceptions.
class StatusException : public std::exception {
 public:
  // REQUIRES: !status.ok().
  explicit StatusException(absl::Status status);
  ~StatusException() override;

  const absl::Status& status() const { return status_; }
  // Returns the status's message.
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  absl::Status status_;
  std::string message_;
};

// Throws a StatusException unless `status` is OK. Only for code that libtorch
// calls below a CatchTorch.
void ThrowIfError(absl::Status status);

namespace torch_guard_internal {

// Returns the Status for the exception being handled. REQUIRES: in a catch
// block.
absl::Status CurrentExceptionToStatus(absl::string_view what);

// Result is what CatchTorch returns for a function that returns T.
template <typename T>
struct Result {
  using Type = absl::StatusOr<T>;
};
template <typename T>
struct Result<absl::StatusOr<T>> {
  using Type = absl::StatusOr<T>;
};
template <>
struct Result<absl::Status> {
  using Type = absl::Status;
};
template <>
struct Result<void> {
  using Type = absl::Status;
};

}  // namespace torch_guard_internal

// Runs `f` and turns what it throws into a Status, as above. If `f` returns
// nothing or a Status, so does this; if it returns T or StatusOr<T>, this
// returns StatusOr<T>. An error that `f` returns is passed on as it is.
template <typename F>
auto CatchTorch(absl::string_view what, F&& f) ->
    typename torch_guard_internal::Result<
        std::decay_t<std::invoke_result_t<F&&>>>::Type {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<F&&>>) {
      std::forward<F>(f)();
      return absl::OkStatus();
    } else {
      return std::forward<F>(f)();
    }
  } catch (...) {
    return torch_guard_internal::CurrentExceptionToStatus(what);
  }
}

}  // namespace tessera
#endif  // BASE_TORCH_GUARD_H_
