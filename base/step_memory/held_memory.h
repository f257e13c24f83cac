// HeldMemory is what a process holds at one moment of its training, by kind:
// the kinds of the ledger (base/memory/ledger.h), and tensors of libtorch's CPU
// allocator by when they were made. On a device all tensors of its allocator
// are "tensors".
//
//   activations   in a forward of this step
//   temporary     in a backward or a Step of this step, including what is
//                 recomputed for a backward
//   tensors       before this step, or outside of any engine
#ifndef BASE_STEP_MEMORY_HELD_MEMORY_H_
#define BASE_STEP_MEMORY_HELD_MEMORY_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

// The first kinds are those of MemoryKind, in the same order.
enum class HeldKind {
  kParameters,
  kGradients,
  kOptimizer,
  kWorking,
  kCommunication,
  kOther,
  kActivations,
  kTemporary,
  kTensors,
};
inline constexpr int kNumHeldKinds = static_cast<int>(HeldKind::kTensors) + 1;
// Returns "parameters", ..., "activations", "temporary", "tensors".
absl::string_view HeldKindName(HeldKind kind);

// Values are bytes.
struct HeldMemory {
  std::array<int64_t, kNumHeldKinds> by_kind{};

  int64_t operator[](HeldKind kind) const {
    return by_kind[static_cast<size_t>(kind)];
  }
  int64_t total() const;
};

// MemoryPhase is a part of a training run. kOutside lasts until an engine's
// Create, and from the end of the last engine on.
enum class MemoryPhase { kOutside, kForward, kBackward, kStep };
absl::string_view MemoryPhaseName(MemoryPhase phase);  // "outside", ...

struct HeldMoment {
  HeldMemory held;
  MemoryPhase phase = MemoryPhase::kOutside;
  std::string unit;  // the last one that was used; "" if none in this forward
};

struct UnitActivations {
  std::string unit;  // "" for what was made before the first unit was used
  int64_t bytes = 0;
};

// StepMemoryReport describes one step, on the device that the engine trains on.
struct StepMemoryReport {
  std::string device = "cpu";  // libtorch's name for it
  // The most bytes held at any moment since the previous step ended; on a
  // device, the peak of what libtorch's allocator has given out to the whole
  // process.
  int64_t peak_bytes = 0;
  // The memory held at the peak. A new moment is looked at when the peak has
  // grown by 64 KiB or by 1/1024 of itself, whichever is more, so its total is
  // less than peak_bytes by at most that. A device is looked at between units
  // and phases; there the total lacks what came and went in between.
  HeldMoment at_peak;
  // The activations of each unit: bytes of tensors that were made while it was
  // the last unit used in a forward and that were still there when the forward
  // ended (at Backward). Units are in the order of first use; units without
  // activations are left out. With several micro-batches these are those of the
  // one that held most. Empty on a device, whose blocks are not counted.
  std::vector<UnitActivations> activations;
  // The most that a device's allocator has taken from it, including blocks that
  // it keeps for later; 0 on the CPU.
  int64_t reserved_peak_bytes = 0;
  // The peak_bytes of the host, even if the engine trains on a device.
  int64_t host_peak_bytes = 0;
};

// Returns "12.3 MiB", "12.3 KiB" or "123 B".
std::string BytesText(int64_t bytes);
// Returns one line for the moment, "1234.5 MiB, in backward, unit blocks.3",
// and one for each kind of which at least `least_share` of all is held. No
// newline at the end.
std::string HeldTable(const HeldMoment& moment, double least_share = 0);
// Returns the peak's table, and at most `max_units` units, those with the most
// activations. The other units, kinds below 1 % of what is held and units below
// 1 % of the activations are added up in one row each.
std::string StepMemoryTable(const StepMemoryReport& report, size_t max_units);

}  // namespace tessera
#endif  // BASE_STEP_MEMORY_HELD_MEMORY_H_
