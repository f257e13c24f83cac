// Writes strings as JSON; config/reader reads JSON.
#ifndef BASE_JSON_H_
#define BASE_JSON_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// Puts UTF-8 text between quotes: quotes, backslashes and control characters
// are escaped, everything else stays as it is.
std::string QuoteJson(absl::string_view text);

// Puts any bytes between quotes. It does what QuoteJson does, but a byte from
// 0x80 on becomes the character of its number ("\u00e9" for 0xE9): the result
// is ASCII, and a reader who takes characters for bytes (Latin-1) gets the
// bytes back.
std::string QuoteJsonBytes(absl::string_view bytes);

}  // namespace tessera
#endif  // BASE_JSON_H_
