#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/detail/PrivateUse1HooksInterface.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "c10/core/Allocator.h"
#include "testing/device/runtime.h"
#include "testing/device/torch_parts.h"

namespace testdevice {
namespace {

// A generator of the device draws what a CPU generator does.
class Generator final : public c10::GeneratorImpl {
 public:
  Generator(int device, at::Generator host)
      : GeneratorImpl(TestDevice(device),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}

  at::Generator& host() { return host_; }

  void set_current_seed(uint64_t seed) override {
    host_.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override { host_.set_offset(offset); }
  uint64_t get_offset() const override { return host_.get_offset(); }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    return new Generator(device().index(), host_.clone());
  }

  at::Generator host_;
};

std::vector<at::Generator>& Defaults() {
  static auto* const all = [] {
    auto* const generators = new std::vector<at::Generator>;
    for (int i = 0; i < Runtime::Get().devices(); ++i) {
      generators->push_back(
          at::make_generator<Generator>(i, at::detail::createCPUGenerator()));
    }
    return generators;
  }();
  return *all;
}

// Host memory that streams read and write.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Sweep();
    void* const data = std::malloc(bytes == 0 ? 1 : bytes);
    TORCH_CHECK(data != nullptr, "test device: no pinned memory");
    {
      absl::MutexLock lock(&mutex_);
      all_.insert(data);
    }
    Runtime::Get().checker().AllocateOnHost(reinterpret_cast<uintptr_t>(data),
                                            static_cast<int64_t>(bytes));
    return {data, data, &Delete, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool Has(const void* data) const {
    absl::MutexLock lock(&mutex_);
    return all_.count(data) > 0;
  }

 private:
  struct Leaving {
    void* data;
    std::vector<Worker::Done> until;
  };
  static void Delete(void* data);
  // Frees what no task can use any more.
  void Sweep();

  mutable absl::Mutex mutex_;
  std::unordered_set<const void*> all_ ABSL_GUARDED_BY(mutex_);
  std::vector<Leaving> leaving_ ABSL_GUARDED_BY(mutex_);
};

PinnedAllocator* Pinned() {
  static auto* const allocator = new PinnedAllocator();
  return allocator;
}

// As CUDA's, nobody waits here: a block is freed when streams have done what
// they have been given until now.
void PinnedAllocator::Delete(void* data) {
  Runtime::Get().checker().Free(reinterpret_cast<uintptr_t>(data));
  PinnedAllocator* const pinned = Pinned();
  Leaving leaving{data, Runtime::Get().MarkAll()};
  {
    absl::MutexLock lock(&pinned->mutex_);
    pinned->leaving_.push_back(std::move(leaving));
  }
  pinned->Sweep();
}

void PinnedAllocator::Sweep() {
  absl::MutexLock lock(&mutex_);
  const auto gone = std::partition(
      leaving_.begin(), leaving_.end(), [](const Leaving& leaving) {
        return !std::all_of(
            leaving.until.begin(), leaving.until.end(),
            [](const auto& done) { return done->HasBeenNotified(); });
      });
  for (auto each = gone; each != leaving_.end(); ++each) {
    all_.erase(each->data);
    std::free(each->data);
  }
  leaving_.erase(gone, leaving_.end());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(Runtime::Get().devices());
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(Runtime::Get().current_device());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Runtime::Get().set_current_device(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(
      c10::DeviceIndex device) const override {
    return Defaults()[static_cast<size_t>(
        device < 0 ? Runtime::Get().current_device() : device)];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(
        device < 0 ? Runtime::Get().current_device() : device,
        at::detail::createCPUGenerator());
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const int device = Runtime::Get().arena().DeviceOf(data);
    TORCH_CHECK(device >= 0, "test device: not a pointer of a device");
    return TestDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return Pinned()->Has(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return Pinned(); }
  void resizePrivateUse1Bytes(const c10::Storage&, size_t) const override {
    TORCH_CHECK(false, "test device: storages keep their size");
  }
};

}  // namespace

at::Generator& HostGeneratorOf(const at::Generator& of_device) {
  return of_device.get<Generator>()->host();
}

at::Generator& HostGenerator(int device) {
  return HostGeneratorOf(Defaults()[static_cast<size_t>(device)]);
}

void RegisterHooks() {
  static auto* const hooks = new Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace testdevice
