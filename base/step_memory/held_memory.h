// HeldMemory: what a process holds at one moment of its training, by kind: the
// kinds of the ledger (base/memory/ledger.h), and tensors of libtorch's CPU
// allocator by when they were made. On a device all of its allocator's are
// "tensors".
//
//   activations   in a forward of this step
//   temporary     in a backward or a Step of this step, what is computed again
//                 for a backward among it
//   tensors       before this step, or outside of any engine
#ifndef BASE_STEP_MEMORY_HELD_MEMORY_H_
#define BASE_STEP_MEMORY_HELD_MEMORY_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

// The first ones are MemoryKind's, in its order.
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
// "parameters", ..., "activations", "temporary", "tensors".
absl::string_view HeldKindName(HeldKind kind);

// Bytes.
struct HeldMemory {
  std::array<int64_t, kNumHeldKinds> by_kind{};

  int64_t operator[](HeldKind kind) const {
    return by_kind[static_cast<size_t>(kind)];
  }
  int64_t total() const;
};

// What a training does. kOutside: before an engine's Create, or after the last
// one has gone.
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

// Of one step, on the device that the engine trains on.
struct StepMemoryReport {
  std::string device = "cpu";  // libtorch's name for it
  // The most that was held there at any moment, since the step before ended; on
  // a device the peak of what libtorch's allocator has given out, to the whole
  // process.
  int64_t peak_bytes = 0;
  // What was held then. A new moment is looked at when the peak has grown by
  // 64 KiB or by 1/1024 of itself, whichever is more: so its total is less than
  // peak_bytes by at most that. On a device, which is looked at between units
  // and phases, it is less by what came and went in between.
  HeldMoment at_peak;
  // By unit, the bytes of tensors that were made while it was the last one used
  // in a forward and that were still there when the forward ended (at
  // Backward): its activations. In the order of first use; units without any
  // are left out. Of several micro-batches, those of the one that held most. On
  // a device nothing: nobody counts its blocks.
  std::vector<UnitActivations> activations;
  // The most that a device's allocator has taken from it, blocks that it keeps
  // for later among it; 0 on the CPU.
  int64_t reserved_peak_bytes = 0;
  // The host's peak_bytes, also where the engine trains on a device.
  int64_t host_peak_bytes = 0;
};

// "12.3 MiB", "12.3 KiB", "123 B"
std::string BytesText(int64_t bytes);
// One line for the moment, "1234.5 MiB, in backward, unit blocks.3", and one
// for each kind that is held. No newline at the end.
std::string HeldTable(const HeldMoment& moment);
// The peak's table, and the units with the most activations.
std::string StepMemoryTable(const StepMemoryReport& report, size_t max_units);

}  // namespace tessera
#endif  // BASE_STEP_MEMORY_HELD_MEMORY_H_
