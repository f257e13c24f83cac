#include <memory>

#include "c10/core/impl/DeviceGuardImplInterface.h"
#include "c10/util/Exception.h"
#include "testing/device/runtime.h"
#include "testing/device/torch_parts.h"

namespace testdevice {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

using EventPtr = std::shared_ptr<Runtime::Event>;

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }

  // ---- devices

  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return TestDevice(Runtime::Get().current_device());
  }
  void setDevice(Device device) const override {
    if (device.has_index()) Runtime::Get().set_current_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    setDevice(device);
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(Runtime::Get().devices());
  }

  // ---- streams

  Stream getStream(Device device) const override {
    return Runtime::Get().Current(Index(device));
  }
  Stream getDefaultStream(Device device) const override {
    return Runtime::Get().Default(Index(device));
  }
  Stream getStreamFromGlobalPool(Device device, bool high) const override {
    return Runtime::Get().FromPool(Index(device), high);
  }
  Stream getNewStream(Device device, int priority) const override {
    return Runtime::Get().FromPool(Index(device), priority < 0);
  }
  Stream exchangeStream(Stream stream) const override {
    return Runtime::Get().Exchange(stream);
  }
  bool queryStream(const Stream& stream) const override {
    return Runtime::Get().IsIdle(stream);
  }
  void synchronizeStream(const Stream& stream) const override {
    Runtime::Get().HostWait(stream, "synchronize stream");
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Runtime::Get().HostWaitForDevice(device, "synchronize device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data,
                             const Stream& stream) const override {
    GetAllocator()->recordStream(data, stream);
  }

  // ---- events

  void record(void** event, const Stream& stream, DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventPtr();
    *static_cast<EventPtr*>(*event) = Runtime::Get().Record(stream);
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return;
    Runtime::Get().Block(**static_cast<EventPtr*>(event), stream);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr ||
           Runtime::Get().Query(**static_cast<EventPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Runtime::Get().HostWait(**static_cast<EventPtr*>(event),
                            "synchronize event");
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  double elapsedTime(void*, void*, DeviceIndex) const override {
    TORCH_CHECK(false, "test device: it keeps no time");
  }

 private:
  int Index(Device device) const {
    return device.has_index() ? device.index()
                              : Runtime::Get().current_device();
  }
};

}  // namespace

void RegisterGuard() {
  static const Guard* const guard = new Guard();
  static const c10::impl::DeviceGuardImplRegistrar registrar(
      c10::DeviceType::PrivateUse1, guard);
}

}  // namespace testdevice
