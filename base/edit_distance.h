// Measures how far apart two names are, to tell a user which one may have been
// meant.
#ifndef BASE_EDIT_DISTANCE_H_
#define BASE_EDIT_DISTANCE_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

// Returns the number of single-character insertions, deletions, replacements
// and exchanges of two neighbours that turn a into b; no character is edited
// twice.
int EditDistance(absl::string_view a, absl::string_view b);

// Returns the one of `names` that `name` probably means, or "". A candidate
// differs in at most one character in three, ignoring case, or one of the two
// begins with all of the other, which has at least six characters.
std::string NearestName(absl::string_view name,
                        const std::vector<std::string>& names);

}  // namespace tessera
#endif  // BASE_EDIT_DISTANCE_H_
