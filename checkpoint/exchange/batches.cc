#include "checkpoint/exchange/batches.h"

#include <algorithm>

#include "base/status.h"
#include "checkpoint/format/manifest.h"

namespace tessera {
namespace {

constexpr int64_t kHeldBytes = 64 << 20;
constexpr int kThreads = 4;

}  // namespace

std::vector<ReadBatch> InBatches(const proto::CheckpointManifest& manifest,
                                 const std::vector<WantedElements>& ranges,
                                 int64_t max_bytes) {
  std::vector<ReadBatch> batches;
  for (size_t r = 0; r < ranges.size(); ++r) {
    const WantedElements& range = ranges[r];
    const int64_t size = DtypeBytes(
        manifest.storages(range.storage).states(range.state).dtype());
    for (int64_t at = range.begin; at < range.end;) {
      const int64_t to = std::min(at + max_bytes / size, range.end);
      const int64_t bytes = (to - at) * size;
      if (batches.empty() || batches.back().bytes + bytes > max_bytes) {
        batches.emplace_back();
      }
      batches.back().parts.push_back({r, at, to, bytes});
      batches.back().bytes += bytes;
      at = to;
    }
  }
  return batches;
}

absl::Status ReadOne(const ReadBatch& batch,
                     const std::vector<WantedElements>& ranges,
                     CheckpointReader* reader, std::string* bytes) {
  bytes->resize(static_cast<size_t>(batch.bytes));
  char* to = bytes->data();
  std::vector<WantedElements> wanted;
  for (const ReadBatch::Part& part : batch.parts) {
    const WantedElements& range = ranges[part.range];
    wanted.push_back({range.storage, range.state, part.begin, part.end, to});
    to += part.bytes;
  }
  return reader->Read(wanted, kThreads);
}

absl::Status ReadInBatches(CheckpointReader* reader,
                           const std::vector<WantedElements>& ranges,
                           const TakePart& take) {
  std::string bytes;
  for (const ReadBatch& batch :
       InBatches(reader->manifest(), ranges, kHeldBytes)) {
    TESSERA_RETURN_IF_ERROR(ReadOne(batch, ranges, reader, &bytes));
    absl::string_view rest = bytes;
    for (const ReadBatch::Part& part : batch.parts) {
      const auto n = static_cast<size_t>(part.bytes);
      TESSERA_RETURN_IF_ERROR(take(part.range, part.begin, rest.substr(0, n)));
      rest.remove_prefix(n);
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
