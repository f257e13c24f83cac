#include "comm/hierarchical/packed_texts.h"

#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tessera {

std::string PackTexts(const std::vector<std::string>& texts) {
  std::string packed;
  for (const std::string& text : texts) {
    const uint64_t bytes = text.size();
    packed.append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
    packed += text;
  }
  return packed;
}

absl::StatusOr<std::vector<std::string>> UnpackTexts(absl::string_view packed,
                                                     size_t count) {
  std::vector<std::string> texts;
  while (!packed.empty()) {
    uint64_t bytes = UINT64_MAX;
    if (packed.size() >= sizeof(bytes)) {
      std::memcpy(&bytes, packed.data(), sizeof(bytes));
      packed.remove_prefix(sizeof(bytes));
    }
    if (bytes > packed.size() || texts.size() == count) {
      return absl::InternalError(absl::StrCat(
          "a rank sent no texts: length ", bytes, " where ", packed.size(),
          " bytes are left, after ", texts.size(), " texts of ", count));
    }
    texts.emplace_back(packed.substr(0, bytes));
    packed.remove_prefix(bytes);
  }
  if (texts.size() == count) return texts;
  return absl::InternalError(
      absl::StrCat("a rank sent ", texts.size(), " texts, expected ", count));
}

}  // namespace tessera
