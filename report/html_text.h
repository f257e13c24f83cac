// Text of files in a page.
#ifndef REPORT_HTML_TEXT_H_
#define REPORT_HTML_TEXT_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// Escapes text for an element or an attribute. Control characters and bytes
// that are not UTF-8, which XML may not hold, become U+FFFD.
std::string EscapeHtml(absl::string_view text);

// Returns a link to a file by its path from the page's folder, which EscapeHtml
// is still to be called for.
std::string LinkTo(absl::string_view path);

}  // namespace tessera
#endif  // REPORT_HTML_TEXT_H_
