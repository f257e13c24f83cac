#include "report/html_text.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "config/reader/utf8.h"

namespace tessera {

std::string EscapeHtml(absl::string_view text) {
  std::string out;
  while (!text.empty()) {
    const int length = Utf8Length(text);
    const char c = text[0];
    const bool is_control =
        length == 1 && (c < ' ' || c == 0x7f) && c != '\n' && c != '\t';
    const auto bytes = static_cast<size_t>(std::max(length, 1));
    absl::StrAppend(&out, length == 0 || is_control ? "\xEF\xBF\xBD"
                                                    : text.substr(0, bytes));
    text.remove_prefix(bytes);
  }
  return absl::StrReplaceAll(out, {{"&", "&amp;"},
                                   {"<", "&lt;"},
                                   {">", "&gt;"},
                                   {"\"", "&quot;"},
                                   {"'", "&#39;"}});
}

std::string LinkTo(absl::string_view path) {
  std::string link = "./";
  for (const char c : path) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' ||
        c == '-' || c == '_' || c == '/') {
      link += c;
    } else {
      absl::StrAppendFormat(&link, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return link;
}

}  // namespace tessera
