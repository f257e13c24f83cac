// How far apart two names are, to tell a user which one may have been meant.
#ifndef BASE_EDIT_DISTANCE_H_
#define BASE_EDIT_DISTANCE_H_

#include "absl/strings/string_view.h"

namespace tessera {

// Single-character insertions, deletions and replacements that turn a into b.
int EditDistance(absl::string_view a, absl::string_view b);

}  // namespace tessera
#endif  // BASE_EDIT_DISTANCE_H_
