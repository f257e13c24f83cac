// DeviceMemory reports what a process holds on a device that it trains on,
// while this lives: model states and buffers as the device's ledger counts
// them, and all else that the device's allocator has given out ("tensors").
//
//   allocated by libtorch's allocator  [ ledger's kinds ... | tensors ]
//
// StepMemory looks at it when another unit is used, when a phase of the step
// begins or ends, and when memory is refused. A look asks the allocator, which
// is too slow to do for each of its blocks. So the breakdown is that of the
// largest of these moments; only the allocator knows the exact peak.
//
// Threads: any.
#ifndef BASE_STEP_MEMORY_DEVICE_MEMORY_H_
#define BASE_STEP_MEMORY_DEVICE_MEMORY_H_

#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/memory/ledger.h"
#include "base/step_memory/held_memory.h"

namespace tessera {

class DeviceMemory {
 public:
  struct Moment {
    HeldMemory held;
    MemoryPhase phase = MemoryPhase::kOutside;
    int unit = 0;  // StepMemory::UnitNumber
  };

  // `allocated_bytes` returns what the allocator has given out now; any thread
  // may call it. The ledger outlives this.
  DeviceMemory(const MemoryLedger* ledger,
               std::function<int64_t()> allocated_bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  const MemoryLedger& ledger() const { return *ledger_; }

  // Returns what the ledger counts, and as "tensors" what `allocated_bytes`
  // exceeds that by.
  static HeldMemory HeldOn(const MemoryLedger& ledger, int64_t allocated_bytes);
  HeldMemory Now() const;
  void Look(MemoryPhase phase, int unit);
  // Return the largest moment that was looked at since the last TakePeak.
  Moment peak() const;
  Moment TakePeak();

 private:
  const MemoryLedger* const ledger_;
  const std::function<int64_t()> allocated_bytes_;
  mutable absl::Mutex mutex_;
  Moment peak_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // BASE_STEP_MEMORY_DEVICE_MEMORY_H_
