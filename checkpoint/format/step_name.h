// Names the folders of a run's checkpoints.
#ifndef CHECKPOINT_FORMAT_STEP_NAME_H_
#define CHECKPOINT_FORMAT_STEP_NAME_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// Returns "step-00000120".
std::string StepFolderName(int64_t step);
// Returns the step in such a name; a name like "step-12" is a user's own and
// has none.
std::optional<int64_t> StepInName(absl::string_view name);
// Returns the step in the last name of a path.
std::optional<int64_t> StepInPath(absl::string_view path);

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_STEP_NAME_H_
