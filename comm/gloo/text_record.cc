#include "comm/gloo/text_record.h"

#include <algorithm>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tessera {

void TextRecord::Write(absl::string_view text, char* record) {
  const auto bytes = static_cast<int64_t>(text.size());
  std::memcpy(record, &bytes, sizeof(bytes));
  std::memcpy(record + sizeof(bytes), text.data(),
              std::min(bytes, kInlineBytes));
}

absl::StatusOr<int64_t> TextRecord::Read(const char* record,
                                         std::string* text) {
  int64_t bytes = 0;
  std::memcpy(&bytes, record, sizeof(bytes));
  if (bytes < 0 || bytes > kMaxTextBytes) {
    return absl::InternalError(absl::StrCat(
        "a text of ", bytes, " bytes, expected 0 to ", kMaxTextBytes));
  }
  text->assign(record + sizeof(bytes), std::min(bytes, kInlineBytes));
  return bytes;
}

}  // namespace tessera
