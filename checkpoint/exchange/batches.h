// Reads ranges of elements of a checkpoint some 64 MiB at a time. Each call of
// CheckpointReader::Read goes through all files and their pieces, so one call
// for each of many small tensors would take the product of both.
#ifndef CHECKPOINT_EXCHANGE_BATCHES_H_
#define CHECKPOINT_EXCHANGE_BATCHES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/format/checkpoint_reader.h"

namespace tessera {

// Ranges of elements of a checkpoint, whose `to` does not count.
struct RangesOf {
  CheckpointReader* reader;
  std::vector<WantedElements> ranges;
};

// Calls `take` for parts of the ranges, in order, with the bytes from element
// `begin` on: of each of `sources`, whose ranges have the same lengths and
// dtypes. LOCAL.
using TakePart = std::function<absl::Status(
    size_t range, int64_t begin, absl::Span<const absl::string_view> bytes)>;
absl::Status ReadInBatches(const std::vector<RangesOf>& sources,
                           const TakePart& take);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_BATCHES_H_
