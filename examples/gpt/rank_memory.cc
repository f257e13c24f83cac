#include "examples/gpt/rank_memory.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/memory/memory.h"
#include "base/status.h"

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
  const std::string mine = absl::StrCat(resident.ok() ? resident->rss_bytes : 0,
                                        " ", ledger.total().peak_bytes);
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      communicator.AllGatherStrings(mine, {"memory of each rank"}));
  std::vector<RankMemory> memory;
  for (const std::string& text : all) {
    const std::vector<std::string> parts = absl::StrSplit(text, ' ');
    RankMemory rank;
    if (parts.size() != 2 ||
        !absl::SimpleAtoi(parts[0], &rank.resident_bytes) ||
        !absl::SimpleAtoi(parts[1], &rank.counted_peak_bytes)) {
      return absl::InternalError(
          absl::StrCat("memory of a rank: got '", text, "'"));
    }
    memory.push_back(rank);
  }
  return memory;
}

std::string Describe(const std::vector<RankMemory>& memory) {
  return absl::StrCat(PerRank(memory, &RankMemory::resident_bytes),
                      " MB, counted peak ",
                      PerRank(memory, &RankMemory::counted_peak_bytes));
}
