#include "comm/mismatch_hint.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/match.h"

namespace tessera {
namespace {

// Words in the names (CommTag) of the collectives of Backward and Step, and of
// the gathers of a forward.
constexpr const char* kOfSteps[] = {
    "backward",     "reduction of",       "gather of unit",
    "gradient",     "Muon's directions",  "trust ratios",
    "the step of",  "factored variances", "look for overflows",
    "Engine::Step",
};

bool IsOfStep(absl::string_view name) {
  return std::any_of(
      std::begin(kOfSteps), std::end(kOfSteps),
      [&](const char* word) { return absl::StrContains(name, word); });
}

}  // namespace

std::string MismatchHint(absl::string_view one, absl::string_view other) {
  if (IsOfStep(one) && IsOfStep(other)) {
    return "; all ranks must run the same units in the same order, and as many "
           "batches: see Engine::AnyRankHasData";
  }
  return "; all ranks must make the same calls in the same order: look for one "
         "that a rank makes alone (in `if (rank == 0)`, say)";
}

}  // namespace tessera
