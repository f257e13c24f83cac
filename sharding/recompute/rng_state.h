// RngState: where the default generators stood, and a scope in which they stand
// there again.
//
// Threads: any; a generator is locked while its state is read or set.
#ifndef SHARDING_RECOMPUTE_RNG_STATE_H_
#define SHARDING_RECOMPUTE_RNG_STATE_H_

#include <vector>

#include "ATen/core/Tensor.h"
#include "sharding/recompute/generator_state.h"

namespace tessera {

class RngState {
 public:
  // Of the CPU, and of each device of `devices` that has a default generator.
  static RngState Capture(const std::vector<at::Device>& devices);
  // Nothing has been drawn since, nor a generator been set.
  bool IsCurrent() const;
  // Sets the generators to it.
  void Set() const;
  // The generators of `of`, as they stand now.
  static RngState CaptureSame(const RngState& of);

 private:
  std::vector<GeneratorState> all_;
};

// For its life; then the generators stand where they stood before.
class RngScope {
 public:
  explicit RngScope(const RngState& state)
      : before_(RngState::CaptureSame(state)) {
    state.Set();
  }
  ~RngScope() { before_.Set(); }
  RngScope(const RngScope&) = delete;
  RngScope& operator=(const RngScope&) = delete;

 private:
  const RngState before_;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_RNG_STATE_H_
