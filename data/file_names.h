// Finds the files that a pattern stands for.
#ifndef DATA_FILE_NAMES_H_
#define DATA_FILE_NAMES_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Expands braces as a shell and WebDataset do, in the order of the pattern:
//
//   train-{000..099}.tar   train-000.tar, train-001.tar, ..., train-099.tar
//   {train,val}.bin        train.bin, val.bin
//
// Numbers are as wide as the wider of the two if one begins with a zero. Braces
// may stand side by side but not inside each other; a brace with neither a
// comma nor two numbers stays as it is. Returns InvalidArgument for a brace
// that is not closed, for {9..1}, and for more than a million names.
absl::StatusOr<std::vector<std::string>> ExpandBraces(
    absl::string_view pattern);

// Expands braces, and then names with *, ? or [ by glob(7), sorted by bytes.
// Returns NotFound if one of these matches no file; a name without such signs
// need not exist. The order depends only on the pattern and the existing files:
// ranks on hosts that see the same files see them in the same order. LOCAL.
absl::StatusOr<std::vector<std::string>> MatchFiles(absl::string_view pattern);

}  // namespace tessera
#endif  // DATA_FILE_NAMES_H_
