// Suggests what to look for where ranks are in different collectives. No torch.
#ifndef COMM_MISMATCH_HINT_H_
#define COMM_MISMATCH_HINT_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// Returns "; all ranks must ...", by the names of what two ranks are in. Ranks
// with different numbers of batches differ within training steps; any other
// difference comes from a call that one rank makes and another does not.
std::string MismatchHint(absl::string_view one, absl::string_view other);

}  // namespace tessera
#endif  // COMM_MISMATCH_HINT_H_
