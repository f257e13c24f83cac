#include "sharding/trace/traced_memory.h"

#include <utility>

#include "base/torch/storage_access.h"
#include "c10/core/CPUAllocator.h"

namespace tessera {
namespace {

constexpr char kNoData[] =
    "a plan follows the sizes of tensors, not their values, and the data of "
    "one "
    "was asked for (an accessor, a raw pointer). Let the model not look at "
    "values that depend on its weights or inputs, or plan it without that "
    "part.";

}  // namespace

TracedMemory::TracedMemory(int64_t bytes, std::shared_ptr<TraceLog> log,
                           bool known)
    : log_(std::move(log)), bytes_(bytes), known_(known) {
  if (log_ != nullptr && bytes_ > 0) allocation_ = log_->Allocated(bytes_);
}

TracedMemory::~TracedMemory() {
  if (allocation_ >= 0) log_->Freed(allocation_, bytes_);
}

void TracedMemory::Delete(void* memory) {
  delete static_cast<TracedMemory*>(memory);
}

c10::DataPtr TracedMemory::PtrOf(std::unique_ptr<TracedMemory> memory,
                                 void* data) {
  return c10::DataPtr(data, memory.release(), &Delete, at::kCPU);
}

TracedMemory* TracedMemory::Of(c10::StorageImpl* storage) {
  const c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  if (data.get_deleter() != &Delete) return nullptr;
  return static_cast<TracedMemory*>(data.get_context());
}

c10::Storage TracedMemory::Fake(int64_t bytes, std::shared_ptr<TraceLog> log) {
  std::unique_ptr<TracedMemory> memory(
      new TracedMemory(bytes, std::move(log), /*known=*/false));
  c10::Storage storage(c10::Storage::use_byte_size_t(),
                       static_cast<size_t>(bytes),
                       PtrOf(std::move(memory), nullptr),
                       c10::GetCPUAllocator(), /*resizable=*/true);
  HideStorageSaying(storage.unsafeGetStorageImpl(), kNoData);
  return storage;
}

void TracedMemory::Follow(c10::StorageImpl* storage,
                          std::shared_ptr<TraceLog> log) {
  std::unique_ptr<TracedMemory> memory(
      new TracedMemory(static_cast<int64_t>(storage->nbytes()), std::move(log),
                       /*known=*/true));
  TracedMemory* const raw = memory.get();
  void* const data = storage->_mutable_data_ptr_no_checks().get();
  raw->real_ = storage->set_data_ptr(PtrOf(std::move(memory), data));
}

void TracedMemory::Forget(c10::StorageImpl* storage) {
  if (TracedMemory* const memory = Of(storage)) memory->known_ = false;
  HideStorageSaying(storage, kNoData);
}

void TracedMemory::Regrow(c10::StorageImpl* storage, int64_t bytes,
                          std::shared_ptr<TraceLog> log) {
  std::unique_ptr<TracedMemory> memory(
      new TracedMemory(bytes, std::move(log), /*known=*/false));
  storage->set_data_ptr_noswap(PtrOf(std::move(memory), nullptr));
  storage->set_nbytes(static_cast<size_t>(bytes));
  HideStorageSaying(storage, kNoData);
}

}  // namespace tessera
