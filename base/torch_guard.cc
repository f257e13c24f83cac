#include "base/torch_guard.h"

#include <new>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "c10/util/Exception.h"

namespace tessera {
namespace {

constexpr int kMaxLines = 8;

// Joins up to kMaxLines lines of the message by "; ". Some errors hold a
// backtrace even in what_without_backtrace(); it ends the text.
std::string OneLine(absl::string_view message) {
  std::string result;
  int lines = 0;
  for (absl::string_view line : absl::StrSplit(message, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (absl::StartsWith(line, "Exception raised from ") ||
        absl::StartsWith(line, "C++ CapturedTraceback")) {
      break;
    }
    if (line.empty()) continue;
    if (lines == kMaxLines) {
      absl::StrAppend(&result, "; ...");
      break;
    }
    absl::StrAppend(&result, lines == 0 ? "" : "; ", line);
    ++lines;
  }
  return result;
}

absl::Status Make(absl::StatusCode code, absl::string_view what,
                  absl::string_view message) {
  return absl::Status(code, absl::StrCat(what, ": ", OneLine(message)));
}

// torch's CPU allocator throws a plain c10::Error.
absl::StatusCode CodeOfPlainError(absl::string_view message) {
  return absl::StrContains(message, "can't allocate memory")
             ? absl::StatusCode::kResourceExhausted
             : absl::StatusCode::kInternal;
}

}  // namespace

StatusException::StatusException(absl::Status status)
    : status_(std::move(status)), message_(status_.message()) {
  TESSERA_CHECK(!status_.ok()) << "StatusException of an OK status";
}

StatusException::~StatusException() = default;

void ThrowIfError(absl::Status status) {
  if (!status.ok()) throw StatusException(std::move(status));
}

namespace torch_guard_internal {

absl::Status CurrentExceptionToStatus(absl::string_view what) {
  using absl::StatusCode;
  try {
    throw;
  } catch (const StatusException& e) {
    return e.status();
  } catch (const c10::OutOfMemoryError& e) {
    return Make(StatusCode::kResourceExhausted, what,
                e.what_without_backtrace());
  } catch (const c10::DistError& e) {
    return Make(StatusCode::kUnavailable, what, e.what_without_backtrace());
  } catch (const c10::IndexError& e) {
    return Make(StatusCode::kInvalidArgument, what, e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    return Make(StatusCode::kInvalidArgument, what, e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    return Make(StatusCode::kInvalidArgument, what, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    const char* message = e.what_without_backtrace();
    return Make(CodeOfPlainError(message), what, message);
  } catch (const std::bad_alloc& e) {
    return Make(StatusCode::kResourceExhausted, what, e.what());
  } catch (const std::exception& e) {
    return Make(StatusCode::kInternal, what, e.what());
  } catch (...) {
    return Make(StatusCode::kInternal, what, "an exception of unknown type");
  }
}

}  // namespace torch_guard_internal
}  // namespace tessera
