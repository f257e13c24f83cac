// Divides a list into ranges of about the same cost.
#ifndef PARALLEL_PIPELINE_LINEAR_PARTITION_H_
#define PARALLEL_PIPELINE_LINEAR_PARTITION_H_

#include <cstddef>
#include <vector>

#include "absl/types/span.h"

namespace tessera {

// Returns where each of `parts` consecutive, non-empty ranges of the list
// begins. The most expensive one costs as little as possible; then the costs
// are as equal as possible (the sum of their squares is least); then the last
// cut is the earliest, and so on. REQUIRES: 1 <= parts <= costs.size(), no
// negative cost. O(parts * costs.size() * the longest range).
std::vector<size_t> LinearPartition(absl::Span<const double> costs, int parts);

}  // namespace tessera
#endif  // PARALLEL_PIPELINE_LINEAR_PARTITION_H_
