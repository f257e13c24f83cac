// Handles UTF-8 as far as configurations need it.
#ifndef CONFIG_READER_UTF8_H_
#define CONFIG_READER_UTF8_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// Returns the bytes of the UTF-8 character at the front of `text`, 0 if it is
// malformed (overlong forms, surrogates and values beyond U+10FFFF included).
int Utf8Length(absl::string_view text);

// Returns whether all of `text` is UTF-8.
bool IsUtf8(absl::string_view text);

void AppendUtf8(uint32_t code, std::string& out);

}  // namespace tessera
#endif  // CONFIG_READER_UTF8_H_
