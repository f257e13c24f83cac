#include "comm/communicator.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"

namespace tessera {
namespace {

// An OK status is "", another "<code> <message>".
std::string EncodeStatus(const absl::Status& status) {
  if (status.ok()) return "";
  return absl::StrCat(static_cast<int>(status.code()), " ", status.message());
}

absl::Status DecodeStatus(absl::string_view text, absl::string_view context) {
  const size_t space = text.find(' ');
  int code = 0;
  if (space == absl::string_view::npos ||
      !absl::SimpleAtoi(text.substr(0, space), &code)) {
    return absl::InternalError(absl::StrCat(context, ": '", text, "'"));
  }
  return absl::Status(static_cast<absl::StatusCode>(code),
                      absl::StrCat(context, ": ", text.substr(space + 1)));
}

}  // namespace

absl::Status Communicator::AgreeOk(const absl::Status& mine,
                                   absl::string_view where) {
  if (world_size() == 1) return mine;
  absl::StatusOr<std::vector<std::string>> all =
      AllGatherStrings(EncodeStatus(mine), CommTag{std::string(where)});
  if (!all.ok()) {
    if (mine.ok()) return all.status();
    // The own error is nearer to the cause than that nobody could be told.
    return absl::Status(
        mine.code(), absl::StrCat(mine.message(), " (the other ranks were not ",
                                  "told: ", all.status().message(), ")"));
  }
  for (int r = 0; r < world_size(); ++r) {
    const std::string& text = (*all)[r];
    if (!text.empty()) {
      return DecodeStatus(text, absl::StrCat("[", where, "] rank ", r));
    }
  }
  return absl::OkStatus();
}

absl::Status Communicator::Barrier(absl::string_view where) {
  return AllGatherStrings("", CommTag{std::string(where)}).status();
}

}  // namespace tessera
