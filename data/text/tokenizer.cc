#include "data/text/tokenizer.h"

#include "absl/strings/str_cat.h"

namespace tessera {

absl::Status ByteTokenizer::Encode(absl::string_view text,
                                   std::vector<int32_t>* ids) const {
  for (const char c : text) ids->push_back(static_cast<uint8_t>(c));
  return absl::OkStatus();
}

absl::StatusOr<std::string> ByteTokenizer::Decode(
    absl::Span<const int32_t> ids) const {
  std::string text;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "token ", i, " is ", ids[i], ", the vocabulary has ", vocab_size()));
    }
    if (ids[i] != eos_id()) text.push_back(static_cast<char>(ids[i]));
  }
  return text;
}

}  // namespace tessera
