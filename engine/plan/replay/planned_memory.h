// PlannedMemory: what a rank holds at one moment of a plan, by kind, and the
// most that it held.
#ifndef ENGINE_PLAN_REPLAY_PLANNED_MEMORY_H_
#define ENGINE_PLAN_REPLAY_PLANNED_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace tessera {

enum class PlanKind {
  kParameters,   // working copies between uses: shards, or whole
  kMasters,      // float32 values of 16-bit working copies
  kOptimizer,    // moments
  kGathered,     // whole copies of sharded parameters
  kGradients,    // local, packed, reduced
  kActivations,  // tensors of forward and backward
  kKernels,      // what one operator takes while it runs
};
inline constexpr int kNumPlanKinds = 7;

// Returns "parameters", "masters", ...
absl::string_view PlanKindName(PlanKind kind);

// Bytes by kind.
class PlannedBytes {
 public:
  int64_t operator[](PlanKind kind) const { return by_kind_[Index(kind)]; }
  // Adds bytes of a kind.
  void Add(PlanKind kind, int64_t bytes) {
    by_kind_[Index(kind)] += bytes;
    total_ += bytes;
  }
  PlannedBytes& operator+=(const PlannedBytes& other) {
    for (size_t i = 0; i < by_kind_.size(); ++i) {
      by_kind_[i] += other.by_kind_[i];
    }
    total_ += other.total_;
    return *this;
  }
  int64_t total() const { return total_; }

 private:
  static size_t Index(PlanKind kind) { return static_cast<size_t>(kind); }
  std::array<int64_t, kNumPlanKinds> by_kind_{};
  int64_t total_ = 0;
};

}  // namespace tessera
#endif  // ENGINE_PLAN_REPLAY_PLANNED_MEMORY_H_
