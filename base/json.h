// Strings as JSON writes them. Reading JSON is config/reader's.
#ifndef BASE_JSON_H_
#define BASE_JSON_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// UTF-8 text between quotes: quotes, backslashes and control characters are
// escaped, everything else stays as it is.
std::string QuoteJson(absl::string_view text);

// Any bytes between quotes: as QuoteJson, but a byte from 0x80 on becomes the
// character of its number ("\u00e9" for 0xE9), so the result is ASCII, and a
// reader who takes characters for bytes (Latin-1) has the bytes back.
std::string QuoteJsonBytes(absl::string_view bytes);

}  // namespace tessera
#endif  // BASE_JSON_H_
