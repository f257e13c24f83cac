#include "sharding/trace/counted_tensors_test_util.h"

#include <algorithm>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "c10/core/CPUAllocator.h"

namespace tessera {
namespace {

class Counting final : public c10::Allocator {
 public:
  explicit Counting(c10::Allocator* base) : base_(base) { self = this; }

  c10::DataPtr allocate(size_t n) override {
    void* const data = base_->raw_allocate(n);
    if (data != nullptr) Add(data, static_cast<int64_t>(n));
    return c10::DataPtr(data, data, &Free, at::kCPU);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }

  int64_t held() const {
    absl::MutexLock lock(&mutex_);
    return held_;
  }
  int64_t peak() const {
    absl::MutexLock lock(&mutex_);
    return peak_;
  }
  void ResetPeak() {
    absl::MutexLock lock(&mutex_);
    peak_ = 0;
    Note();
  }
  void Sample() {
    absl::MutexLock lock(&mutex_);
    Note();
  }
  void CountBesides(int64_t (*bytes)()) {
    absl::MutexLock lock(&mutex_);
    besides_ = bytes;
  }

  static Counting* self;

 private:
  void Add(void* data, int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    bytes_[data] = bytes;
    held_ += bytes;
    Note();
  }
  static void Free(void* data) {
    if (data == nullptr) return;
    {
      absl::MutexLock lock(&self->mutex_);
      const auto found = self->bytes_.find(data);
      if (found != self->bytes_.end()) {
        self->Note();
        self->held_ -= found->second;
        self->bytes_.erase(found);
      }
    }
    self->base_->raw_deallocate(data);
  }

  void Note() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    peak_ = std::max(peak_, held_ + (besides_ == nullptr ? 0 : besides_()));
  }

  c10::Allocator* const base_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<void*, int64_t> bytes_ ABSL_GUARDED_BY(mutex_);
  int64_t held_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t peak_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t (*besides_)() ABSL_GUARDED_BY(mutex_) = nullptr;
};

Counting* Counting::self = nullptr;

}  // namespace

CountedTensors& CountedTensors::Global() {
  static CountedTensors* const tensors = [] {
    c10::SetCPUAllocator(new Counting(c10::GetCPUAllocator()));
    return new CountedTensors;
  }();
  return *tensors;
}

int64_t CountedTensors::held_bytes() const { return Counting::self->held(); }
int64_t CountedTensors::peak_bytes() const { return Counting::self->peak(); }
void CountedTensors::CountBesides(int64_t (*bytes)()) {
  Counting::self->CountBesides(bytes);
}
void CountedTensors::Sample() { Counting::self->Sample(); }
void CountedTensors::ResetPeak() { Counting::self->ResetPeak(); }

}  // namespace tessera
