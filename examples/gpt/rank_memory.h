// Reads the memory of each rank, for the demo.
#ifndef EXAMPLES_GPT_RANK_MEMORY_H_
#define EXAMPLES_GPT_RANK_MEMORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/memory/ledger.h"
#include "comm/communicator.h"

// The memory of one rank: what the kernel says it holds now, and the most that
// the engine's counted buffers (shards, gradients, gathered copies) held at
// once.
struct RankMemory {
  int64_t resident_bytes = 0;
  int64_t counted_peak_bytes = 0;
};

// Returns that of all ranks, in their order; `ledger` is that of the device
// that trains. COLLECTIVE.
absl::StatusOr<std::vector<RankMemory>> GatherMemory(
    const tessera::MemoryLedger& ledger, tessera::Communicator& communicator);

// Returns "412/409 MB, counted peak 96/96"; for more than four ranks the
// minimum and the maximum: "405..412 MB, counted peak 96..97".
std::string Describe(const std::vector<RankMemory>& memory);

#endif  // EXAMPLES_GPT_RANK_MEMORY_H_
