#include "base/command/help_layout.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace tessera {
namespace {

constexpr size_t kWidth = 79;
constexpr size_t kColumn = 24;  // where the explanation of a name begins

}  // namespace

std::string WrapText(absl::string_view text, size_t indent, size_t at) {
  std::string lines;
  bool begins = true;
  for (const absl::string_view word :
       absl::StrSplit(text, absl::ByAnyChar(" \n"), absl::SkipEmpty())) {
    if (!begins && at + 1 + word.size() > kWidth) {
      absl::StrAppend(&lines, "\n", std::string(indent, ' '));
      at = indent;
      begins = true;
    }
    absl::StrAppend(&lines, begins ? "" : " ", word);
    at += word.size() + (begins ? 0 : 1);
    begins = false;
  }
  return lines;
}

std::string HelpRow(absl::string_view name, absl::string_view text) {
  std::string row = absl::StrCat("  ", name);
  if (row.size() + 2 > kColumn) {
    absl::StrAppend(&row, "\n", std::string(kColumn, ' '));
  } else {
    row.resize(kColumn, ' ');
  }
  absl::StrAppend(&row, WrapText(text, kColumn, kColumn), "\n");
  return row;
}

}  // namespace tessera
