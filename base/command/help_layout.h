// Lays out help for a terminal of 80 columns: that of `tessera`, and that of
// programs that call tessera::Start.
#ifndef BASE_COMMAND_HELP_LAYOUT_H_
#define BASE_COMMAND_HELP_LAYOUT_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// Breaks `text` at white space into lines that begin at column `indent`. The
// first line begins at column `at`, behind what the caller has written there.
std::string WrapText(absl::string_view text, size_t indent, size_t at);

// Returns the row of a flag or a command: its name and, from column 24 on, what
// it is. A long name has a line of its own.
std::string HelpRow(absl::string_view name, absl::string_view text);

}  // namespace tessera
#endif  // BASE_COMMAND_HELP_LAYOUT_H_
