#include "checkpoint/exchange/terminal.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "config/reader/utf8.h"

namespace tessera {

std::string SizeText(int64_t bytes) {
  if (bytes < int64_t{1} << 20) return absl::StrCat(bytes, " bytes");
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

std::string Printable(absl::string_view text, absl::string_view keep) {
  std::string out;
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text[0]);
    const auto length = static_cast<size_t>(Utf8Length(text));
    // Control characters are those of one byte, and U+0080 to U+009F.
    const bool controls = first < 0x20 || first == 0x7F ||
                          (length == 2 && first == 0xC2 &&
                           static_cast<unsigned char>(text[1]) < 0xA0);
    if (length > 0 && (!controls || keep.find(text[0]) != keep.npos)) {
      absl::StrAppend(&out, text.substr(0, length));
      text.remove_prefix(length);
      continue;
    }
    absl::StrAppendFormat(&out, "\\x%02x", first);
    text.remove_prefix(1);
  }
  return out;
}

void ProgressLine::Show(int64_t done, int64_t of) {
  if (err_ == nullptr) return;
  const absl::Duration now = now_();
  if (now - last_ < absl::Seconds(1)) return;
  last_ = now;
  shown_ = true;
  *err_ << "\r" << SizeText(done) << " of " << SizeText(of) << std::flush;
}

}  // namespace tessera
