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
std::optional<uint64_t> g_rank_seed ABSL_GUARDED_BY(g_mutex);

}  // namespace

void SeedAll(uint64_t seed, const World& world) {
  at::manual_seed(seed);
  absl::MutexLock lock(&g_mutex);
  g_rank_seed = seed + 1 + static_cast<uint64_t>(world.rank());
}

void SeedThisRank() {
  std::optional<uint64_t> seed;
  {
    absl::MutexLock lock(&g_mutex);
    seed.swap(g_rank_seed);
  }
  if (seed.has_value()) at::manual_seed(*seed);
}

}  // namespace tessera
