#include "base/torch/counting_allocator.h"

#include <malloc.h>

#include <array>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/step_memory/step_memory.h"
#include "base/step_memory/tensor_bytes.h"
#include "c10/core/CPUAllocator.h"

namespace tessera {
namespace {

c10::Allocator* g_base = nullptr;
c10::DeleterFnPtr g_base_deleter = nullptr;  // null: nothing is counted

int64_t SizeOf(void* block) {
  return static_cast<int64_t>(malloc_usable_size(block));
}

template <size_t slot>
void Delete(void* block) {
  RemoveTensorBytes(static_cast<int>(slot), SizeOf(block));
  g_base_deleter(block);
}

template <size_t... slots>
constexpr std::array<c10::DeleterFnPtr, sizeof...(slots)> Deleters(
    std::index_sequence<slots...>) {
  return {&Delete<slots>...};
}
constexpr auto kDeleters = Deleters(std::make_index_sequence<kTensorSlots>());

void DeleteRaw(void* block) {
  if (block == nullptr) return;
  if (g_base_deleter == nullptr) return g_base->raw_deallocate(block);
  RemoveTensorBytes(CurrentTensorSlot(), SizeOf(block));
  g_base_deleter(block);
}

// Only a user's forward needs this: Backward and Step report it in their
// Status.
void AddHeldTo(c10::Error* error) {
  StepMemory& memory = StepMemory::Global();
  memory.NoteRefusal();
  const StepMemory::Refusal refusal = memory.last_refusal();
  if (refusal.moment.phase != MemoryPhase::kForward) return;
  error->add_context(
      absl::StrCat("held when it was refused: ", HeldTable(refusal.moment)));
}

}  // namespace

CountingAllocator* CountingAllocator::Over(c10::Allocator* base) {
  TESSERA_CHECK(g_base == nullptr);
  g_base = base;
  if (base == c10::GetDefaultCPUAllocator()) {
    g_base_deleter = base->raw_deleter();
  }
  return new CountingAllocator;
}

c10::DataPtr CountingAllocator::allocate(size_t n) {
  c10::DataPtr memory;
  try {
    memory = g_base->allocate(n);
  } catch (c10::Error& error) {
    AddHeldTo(&error);
    throw;
  }
  if (memory.get() == nullptr || g_base_deleter == nullptr) return memory;
  const int slot = CurrentTensorSlot();
  if (memory.compare_exchange_deleter(g_base_deleter,
                                      kDeleters[static_cast<size_t>(slot)])) {
    AddTensorBytes(slot, SizeOf(memory.get()));
  }
  return memory;
}

c10::DeleterFnPtr CountingAllocator::raw_deleter() const { return &DeleteRaw; }

bool CountingAllocator::is_simple_data_ptr(const c10::DataPtr& memory) const {
  return g_base->is_simple_data_ptr(memory);
}

void CountingAllocator::copy_data(void* to, const void* from, size_t n) const {
  default_copy_data(to, from, n);
}

}  // namespace tessera
