#include "base/json.h"

#include "absl/strings/str_format.h"

namespace tessera {
namespace {

std::string Quote(absl::string_view text, unsigned char last_plain) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7F || byte > last_plain) {
      absl::StrAppendFormat(&out, "\\u%04x", byte);
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

std::string QuoteJson(absl::string_view text) { return Quote(text, 0xFF); }

std::string QuoteJsonBytes(absl::string_view bytes) {
  return Quote(bytes, 0x7E);
}

}  // namespace tessera
