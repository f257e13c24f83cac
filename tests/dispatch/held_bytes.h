// HeldBytes counts what libtorch's CPU tensors hold.
#ifndef TESTS_DISPATCH_HELD_BYTES_H_
#define TESTS_DISPATCH_HELD_BYTES_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

#include "c10/core/CPUAllocator.h"

namespace tessera {

// While it lives, counts the bytes that libtorch's CPU tensors have allocated
// since and still hold. The engine's own memory is not included.
class HeldBytes {
 public:
  HeldBytes() : kept_(c10::GetCPUAllocator()) {
    Counting& counting = Counting::Global();
    counting.inner = kept_;
    counting.held = 0;
    c10::SetCPUAllocator(&counting);
  }
  ~HeldBytes() { c10::SetCPUAllocator(kept_); }
  static int64_t get() { return Counting::Global().held; }

 private:
  // It lives as long as the process, as what it allocated may.
  struct Counting final : c10::Allocator {
    static Counting& Global() {
      static auto* counting = new Counting();
      return *counting;
    }
    c10::DataPtr allocate(size_t n) override {
      void* data = inner->raw_allocate(n);
      held += static_cast<int64_t>(n);
      std::lock_guard<std::mutex> lock(mutex);
      bytes[data] = n;
      return {data, data, &Free, at::kCPU};
    }
    static void Free(void* data) {
      Counting& counting = Global();
      {
        std::lock_guard<std::mutex> lock(counting.mutex);
        counting.held -= static_cast<int64_t>(counting.bytes[data]);
        counting.bytes.erase(data);
      }
      counting.inner->raw_deallocate(data);
    }
    c10::DeleterFnPtr raw_deleter() const override { return &Free; }
    void copy_data(void* to, const void* from, size_t n) const override {
      default_copy_data(to, from, n);
    }
    c10::Allocator* inner = nullptr;
    std::atomic<int64_t> held{0};
    std::mutex mutex;
    std::map<void*, size_t> bytes;
  };
  c10::Allocator* const kept_;
};

}  // namespace tessera
#endif  // TESTS_DISPATCH_HELD_BYTES_H_
