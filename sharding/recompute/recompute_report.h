// What became of the modules that activation_checkpointing.units means.
#ifndef SHARDING_RECOMPUTE_RECOMPUTE_REPORT_H_
#define SHARDING_RECOMPUTE_RECOMPUTE_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

struct RecomputeReport {
  // Forwards of one module, whose activations were given up, or kept: since
  // they were to be (the last one before a Backward, budget_bytes), or had to
  // be.
  int64_t given_up = 0, kept = 0;
  int64_t given_up_bytes = 0;
  // What left for elsewhere in between (activation_checkpointing.offload), and
  // came back.
  int64_t moved_bytes = 0, moved_back_bytes = 0;
  // "[blocks.3] why": modules whose activations have to be kept, since Create.
  std::vector<std::string> unable;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_RECOMPUTE_REPORT_H_
