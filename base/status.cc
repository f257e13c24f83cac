#include "base/status.h"

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace tessera {

absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  absl::Status result(status.code(),
                      absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload(
      [&result](absl::string_view url, const absl::Cord& payload) {
        result.SetPayload(url, payload);
      });
  return result;
}

std::string StatusToText(const absl::Status& status) {
  if (status.ok()) return "";
  return absl::StrCat(static_cast<int>(status.code()), " ", status.message());
}

absl::Status StatusFromText(absl::string_view text) {
  if (text.empty()) return absl::OkStatus();
  const size_t space = text.find(' ');
  int code = 0;
  // A status of code 0 would lose its message, and be OK.
  if (space == absl::string_view::npos ||
      !absl::SimpleAtoi(text.substr(0, space), &code) || code <= 0) {
    return absl::InternalError(absl::StrCat("'", text, "' is not a status"));
  }
  return absl::Status(static_cast<absl::StatusCode>(code),
                      text.substr(space + 1));
}

}  // namespace tessera
