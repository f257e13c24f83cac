// TensorBytes counts the bytes that libtorch's CPU allocator has given out, by
// slot, that is, by when they were made.
//
//   allocator --> AddTensorBytes(slot)      slot = CurrentTensorSlot()
//   its deleter --> RemoveTensorBytes(slot), the same slot, whenever that is
//
// A deleter can name its slot without memory of its own, since there is a
// deleter for each (base/torch/counting_allocator.h). Two sets of slots take
// turns from step to step, so that what is older than a step is not counted as
// the step's own.
//
//   set 0  [ outside | backward | step | forward, no unit | units | others ]
//   set 1  [ outside | ... ]
//
// A call costs two additions without a lock and two loads.
//
// Threads: any.
#ifndef BASE_STEP_MEMORY_TENSOR_BYTES_H_
#define BASE_STEP_MEMORY_TENSOR_BYTES_H_

#include <array>
#include <atomic>
#include <cstdint>

#include "base/memory/memory.h"

namespace tessera {

inline constexpr int kTensorSlotsOfSet = 512;
inline constexpr int kTensorSlots = 2 * kTensorSlotsOfSet;

namespace tensor_bytes_internal {

struct Counters {
  std::atomic<int64_t> all{0};
  std::atomic<int> slot{0};  // slot of what is made now
  std::atomic<int> unit{0};  // used last; 0: none
  // When the bytes held exceed this, Grown is called.
  std::atomic<int64_t> floor{INT64_MAX};
  std::atomic<bool> records{false};  // Shrunk is called, too
  std::array<std::atomic<int64_t>, kTensorSlots> by_slot{};
};
extern Counters g_counters;

// These functions are in step_memory.cc.
void Grown(int64_t held);
void Shrunk();
void UnitChanged(int unit);

}  // namespace tensor_bytes_internal

inline int CurrentTensorSlot() {
  return tensor_bytes_internal::g_counters.slot.load(std::memory_order_relaxed);
}

inline void AddTensorBytes(int slot, int64_t bytes) {
  auto& counters = tensor_bytes_internal::g_counters;
  counters.by_slot[static_cast<size_t>(slot)].fetch_add(
      bytes, std::memory_order_relaxed);
  const int64_t held =
      counters.all.fetch_add(bytes, std::memory_order_relaxed) + bytes +
      MemoryLedger::Host().total().current_bytes;
  if (held > counters.floor.load(std::memory_order_relaxed)) {
    tensor_bytes_internal::Grown(held);
  }
}

inline void RemoveTensorBytes(int slot, int64_t bytes) {
  auto& counters = tensor_bytes_internal::g_counters;
  counters.by_slot[static_cast<size_t>(slot)].fetch_sub(
      bytes, std::memory_order_relaxed);
  counters.all.fetch_sub(bytes, std::memory_order_relaxed);
  if (counters.records.load(std::memory_order_relaxed)) {
    tensor_bytes_internal::Shrunk();
  }
}

// Notes that an operator is about to use a parameter of `unit`
// (StepMemory::UnitNumber).
inline void NoteUnitUse(int unit) {
  auto& counters = tensor_bytes_internal::g_counters;
  if (counters.unit.load(std::memory_order_relaxed) != unit) {
    tensor_bytes_internal::UnitChanged(unit);
  }
}

}  // namespace tessera
#endif  // BASE_STEP_MEMORY_TENSOR_BYTES_H_
