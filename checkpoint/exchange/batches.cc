#include "checkpoint/exchange/batches.h"

#include <algorithm>
#include <string>

#include "base/status.h"
#include "checkpoint/format/manifest.h"

namespace tessera {
namespace {

constexpr int64_t kBatchBytes = 64 << 20;  // of all sources
constexpr int kReadThreads = 4;

struct Part {
  size_t range;        // index of the range
  int64_t begin, end;  // elements
  int64_t bytes;
};
// What one call reads, in the order of the ranges.
struct Batch {
  std::vector<Part> parts;
  int64_t bytes = 0;
};

// Groups ranges into batches of at most `max_bytes`, a multiple of kBlockBytes.
// A larger range is cut into several batches, at whole blocks from its begin
// on.
std::vector<Batch> InBatches(const RangesOf& of, int64_t max_bytes) {
  std::vector<Batch> batches;
  for (size_t r = 0; r < of.ranges.size(); ++r) {
    const WantedElements& range = of.ranges[r];
    const int64_t size = DtypeBytes(of.reader->manifest()
                                        .storages(range.storage)
                                        .states(range.state)
                                        .dtype());
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

// Reads the bytes of a batch, one part after the other.
absl::Status ReadOne(const Batch& batch, const RangesOf& of,
                     std::string* bytes) {
  bytes->resize(static_cast<size_t>(batch.bytes));
  char* to = bytes->data();
  std::vector<WantedElements> wanted;
  for (const Part& part : batch.parts) {
    const WantedElements& range = of.ranges[part.range];
    wanted.push_back({range.storage, range.state, part.begin, part.end, to});
    to += part.bytes;
  }
  return of.reader->Read(wanted, kReadThreads);
}

}  // namespace

absl::Status ReadInBatches(const std::vector<RangesOf>& sources,
                           const TakePart& take) {
  std::vector<std::string> bytes(sources.size());
  const auto share = static_cast<int64_t>(kBatchBytes / sources.size());
  for (const Batch& batch : InBatches(sources[0], share)) {
    for (size_t i = 0; i < sources.size(); ++i) {
      TESSERA_RETURN_IF_ERROR(ReadOne(batch, sources[i], &bytes[i]));
    }
    size_t at = 0;
    for (const Part& part : batch.parts) {
      const auto n = static_cast<size_t>(part.bytes);
      std::vector<absl::string_view> of_part;
      for (const std::string& one : bytes) {
        of_part.push_back(absl::string_view(one).substr(at, n));
      }
      TESSERA_RETURN_IF_ERROR(take(part.range, part.begin, of_part));
      at += n;
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
