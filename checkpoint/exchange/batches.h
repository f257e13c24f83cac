// Reads ranges of elements of a checkpoint some 64 MiB at a time. Each call of
// CheckpointReader::Read goes through all files and their pieces, so one call
// for each of many small tensors would take the product of both.
#ifndef CHECKPOINT_EXCHANGE_BATCHES_H_
#define CHECKPOINT_EXCHANGE_BATCHES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format/checkpoint_reader.h"

namespace tessera {

// What one call reads, in the order of the ranges.
struct ReadBatch {
  struct Part {
    size_t range;        // index of the range
    int64_t begin, end;  // elements
    int64_t bytes;
  };
  std::vector<Part> parts;
  int64_t bytes = 0;
};

// Groups `ranges`, whose `to` does not count, into batches of at most
// `max_bytes`, a multiple of kBlockBytes. A larger range is cut into several
// batches, at whole blocks from its begin on.
std::vector<ReadBatch> InBatches(const proto::CheckpointManifest& manifest,
                                 const std::vector<WantedElements>& ranges,
                                 int64_t max_bytes);

// Reads the bytes of a batch, one part after the other. LOCAL.
absl::Status ReadOne(const ReadBatch& batch,
                     const std::vector<WantedElements>& ranges,
                     CheckpointReader* reader, std::string* bytes);

// Calls `take(range, begin, bytes)` for all parts, in order. LOCAL.
using TakePart = std::function<absl::Status(size_t range, int64_t begin,
                                            absl::string_view bytes)>;
absl::Status ReadInBatches(CheckpointReader* reader,
                           const std::vector<WantedElements>& ranges,
                           const TakePart& take);

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_BATCHES_H_
