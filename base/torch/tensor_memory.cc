#include "base/torch/tensor_memory.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/torch/counting_allocator.h"
#include "c10/core/CPUAllocator.h"

namespace tessera {
namespace {

thread_local TensorMemorySource* t_source = nullptr;

struct Addresses {
  static Addresses& Global() {
    static auto* const addresses = new Addresses;
    return *addresses;
  }
  absl::Mutex mutex;
  absl::flat_hash_map<const void*, std::unique_ptr<TensorMemory>> at
      ABSL_GUARDED_BY(mutex);
};

// Returns false if `data` is another's.
bool Free(void* data) {
  std::unique_ptr<TensorMemory> memory;  // destroyed without the lock
  Addresses& addresses = Addresses::Global();
  absl::MutexLock lock(&addresses.mutex);
  const auto found = addresses.at.find(data);
  if (found == addresses.at.end()) return false;
  memory = std::move(found->second);
  addresses.at.erase(found);
  return true;
}

void DeleteMemory(void* data) { TESSERA_CHECK(Free(data)); }

class Front final : public c10::Allocator {
 public:
  static void Install() {
    static const bool installed = [] {
      base_ = CountingAllocator::Over(c10::GetCPUAllocator());
      c10::SetCPUAllocator(new Front);
      return true;
    }();
    (void)installed;
  }

  c10::DataPtr allocate(size_t n) override {
    if (t_source == nullptr || n == 0) return base_->allocate(n);
    return t_source->Allocate(static_cast<int64_t>(n), *base_);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &FreeRaw; }
  bool is_simple_data_ptr(const c10::DataPtr& memory) const override {
    return memory.get_deleter() != &DeleteMemory &&
           base_->is_simple_data_ptr(memory);
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }

 private:
  static void FreeRaw(void* data) {
    if (!Free(data)) base_->raw_deallocate(data);
  }

  static c10::Allocator* base_;
};

c10::Allocator* Front::base_ = nullptr;

}  // namespace

c10::DataPtr DataPtrOf(void* data, std::unique_ptr<TensorMemory> memory) {
  Addresses& addresses = Addresses::Global();
  absl::MutexLock lock(&addresses.mutex);
  TESSERA_CHECK(addresses.at.try_emplace(data, std::move(memory)).second);
  return c10::DataPtr(data, data, &DeleteMemory, at::kCPU);
}

TensorMemory* TensorMemoryOf(const c10::DataPtr& data) {
  if (data.get_deleter() != &DeleteMemory) return nullptr;
  Addresses& addresses = Addresses::Global();
  absl::MutexLock lock(&addresses.mutex);
  const auto found = addresses.at.find(data.get_context());
  return found == addresses.at.end() ? nullptr : found->second.get();
}

void CountTensorMemory() { Front::Install(); }

TensorMemoryScope::TensorMemoryScope(TensorMemorySource* source)
    : before_(std::exchange(t_source, source)) {
  Front::Install();
}

TensorMemoryScope::~TensorMemoryScope() { t_source = before_; }

}  // namespace tessera
