// What torch asks of a backend, each in a file of its own; all are registered
// by Register (test_device.h), once.
#ifndef TESTING_DEVICE_TORCH_PARTS_H_
#define TESTING_DEVICE_TORCH_PARTS_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Generator.h"
#include "c10/core/CachingDeviceAllocator.h"

namespace testdevice {

void RegisterGuard();      // guard.cc: devices, streams and events
void RegisterAllocator();  // allocator.cc
void RegisterHooks();      // hooks.cc: generators, pinned memory
void RegisterOperators();  // operators.cc: those of memory, copies
void RegisterFallback();   // fallback.cc: all others

c10::DeviceAllocator* GetAllocator();
// The CPU's, behind the device's default one.
at::Generator& HostGenerator(int device);
// The CPU's behind any generator of a test device.
at::Generator& HostGeneratorOf(const at::Generator& of_device);

}  // namespace testdevice
#endif  // TESTING_DEVICE_TORCH_PARTS_H_
