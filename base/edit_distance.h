// How far apart two names are, to tell a user which one may have been meant.
#ifndef BASE_EDIT_DISTANCE_H_
#define BASE_EDIT_DISTANCE_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

// Single-character insertions, deletions and replacements, and exchanges of two
// neighbours, that turn a into b; no character is edited twice.
int EditDistance(absl::string_view a, absl::string_view b);

// The one of `names` that was probably meant by `name`, "" if none was: at most
// one character in three differs, case aside, or it begins with all of `name`
// (or `name` with it), six characters at least.
std::string NearestName(absl::string_view name,
                        const std::vector<std::string>& names);

}  // namespace tessera
#endif  // BASE_EDIT_DISTANCE_H_
