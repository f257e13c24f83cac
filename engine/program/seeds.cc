#include "engine/program/seeds.h"

#include <optional>

#include "ATen/Context.h"
#include "absl/base/attributes.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "engine/program/start.h"

namespace tessera {
namespace {

ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);
struct Seeds {
  uint64_t seed;
  int rank;
};
std::optional<Seeds> g_seeds ABSL_GUARDED_BY(g_mutex);

}  // namespace

void SeedAll(uint64_t seed, const World& world) {
  at::manual_seed(seed);
  absl::MutexLock lock(&g_mutex);
  g_seeds = {seed, world.rank()};
}

void SeedThisRank(int alike, int stage_ranks) {
  std::optional<Seeds> seeds;
  {
    absl::MutexLock lock(&g_mutex);
    seeds.swap(g_seeds);
  }
  if (!seeds.has_value()) return;
  const int rank = stage_ranks > 0 ? seeds->rank % stage_ranks : seeds->rank;
  at::manual_seed(seeds->seed + 1 + static_cast<uint64_t>(rank / alike));
}

}  // namespace tessera
