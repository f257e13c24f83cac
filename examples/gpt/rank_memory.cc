#include "examples/gpt/rank_memory.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/memory/memory.h"
#include "comm/all_gather_values.h"

namespace {

std::string Megabytes(int64_t bytes) {
  return absl::StrCat(static_cast<int64_t>(std::lround(bytes / 1e6)));
}

// Returns "412/409", or "405..412" for more ranks than fit.
std::string PerRank(const std::vector<RankMemory>& memory,
                    int64_t RankMemory::*field) {
  std::vector<int64_t> values;
  for (const RankMemory& rank : memory) values.push_back(rank.*field);
  if (values.size() <= 4) {
    return absl::StrJoin(values, "/", [](std::string* out, int64_t bytes) {
      absl::StrAppend(out, Megabytes(bytes));
    });
  }
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return absl::StrCat(Megabytes(*least), "..", Megabytes(*most));
}

}  // namespace

absl::StatusOr<std::vector<RankMemory>> GatherMemory(
    const tessera::MemoryLedger& ledger, tessera::Communicator& communicator) {
  const auto resident = tessera::ReadResidentMemory();  // absent: shown as 0
  RankMemory mine;
  if (resident.ok()) mine.resident_bytes = resident->rss_bytes;
  mine.counted_peak_bytes = ledger.total().peak_bytes;
  return tessera::AllGatherValue(&communicator, mine, {"memory of each rank"});
}

std::string Describe(const std::vector<RankMemory>& memory) {
  return absl::StrCat(PerRank(memory, &RankMemory::resident_bytes),
                      " MB, counted peak ",
                      PerRank(memory, &RankMemory::counted_peak_bytes));
}
