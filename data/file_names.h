// The files that a pattern stands for.
#ifndef DATA_FILE_NAMES_H_
#define DATA_FILE_NAMES_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Braces as a shell and WebDataset read them, in the order of the pattern:
//
//   train-{000..099}.tar   train-000.tar, train-001.tar, ..., train-099.tar
//   {train,val}.bin        train.bin, val.bin
//
// Numbers are as wide as the wider of the two where one begins with a zero.
// Braces may stand side by side, not in each other; a brace with neither a
// comma nor two numbers stays as it is. InvalidArgument for one that is not
// closed, for {9..1}, and for more than a million names.
absl::StatusOr<std::vector<std::string>> ExpandBraces(
    absl::string_view pattern);

// The same, and then names with *, ? or [ by glob(7), sorted by bytes. NotFound
// where one matches no file. A name without such signs need not exist. So the
// order depends on the pattern and on which files there are alone: ranks on
// hosts that see the same files see them in the same order. LOCAL.
absl::StatusOr<std::vector<std::string>> MatchFiles(absl::string_view pattern);

}  // namespace tessera
#endif  // DATA_FILE_NAMES_H_
