#include <cstring>
#include <utility>

#include "c10/core/CachingDeviceAllocator.h"
#include "c10/util/Exception.h"
#include "testing/device/runtime.h"
#include "testing/device/torch_parts.h"

namespace testdevice {
namespace {

void Delete(void* data) {
  if (data != nullptr) Runtime::Get().Free(data);
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Runtime& runtime = Runtime::Get();
    void* const data =
        bytes == 0 ? nullptr
                   : runtime.Allocate(static_cast<int64_t>(bytes), "a tensor");
    return {data, data, &Delete, TestDevice(runtime.current_device())};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Runtime& runtime = Runtime::Get();
    Launch(runtime.Current(runtime.current_device()), "copy of an allocation",
           {{from, static_cast<int64_t>(bytes), false},
            {to, static_cast<int64_t>(bytes), true}},
           [=] { std::memcpy(OnHost(to), OnHost(from), bytes); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Runtime::Get().arena().ReturnFree();
  }
  // Ignores memory that is not its own, as CUDA's allocator does.
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() == &Delete && data.get() != nullptr) {
      Runtime::Get().RecordStream(data.get(), stream);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex device) override {
    const Arena::Held held = Runtime::Get().arena().held(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = held.allocated;
    stats.allocated_bytes[0].peak = held.peak;
    stats.reserved_bytes[0].current = held.reserved;
    stats.reserved_bytes[0].peak = held.reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Runtime::Get().arena().ResetPeak(device);
  }
};

}  // namespace

c10::DeviceAllocator* GetAllocator() {
  static Allocator* const allocator = new Allocator();
  return allocator;
}

void RegisterAllocator() {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, GetAllocator());
}

}  // namespace testdevice
