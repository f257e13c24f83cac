// RecomputeReport: what was recomputed and kept for the modules of
// activation_checkpointing.units.
#ifndef SHARDING_RECOMPUTE_RECOMPUTE_REPORT_H_
#define SHARDING_RECOMPUTE_RECOMPUTE_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

struct RecomputeReport {
  // Number of forwards of one module whose activations were given up, or kept:
  // by choice (the last one before a Backward, budget_bytes), or by necessity.
  int64_t given_up = 0, kept = 0;
  int64_t given_up_bytes = 0;
  // Bytes that were moved away for the meantime
  // (activation_checkpointing.offload), and that came back.
  int64_t moved_bytes = 0, moved_back_bytes = 0;
  // Modules whose activations have to be kept, since Create, as "[blocks.3]
  // why".
  std::vector<std::string> unable;
  // Results that had other bits when they were recomputed, since Create, as
  // "[blocks.3] keeps results that have other bits when they are recomputed:
  // my::op (16 bytes)". They are kept; the rest of their module is given up.
  std::vector<std::string> held;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_RECOMPUTE_REPORT_H_
