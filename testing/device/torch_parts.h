// Declares what torch needs from a backend, each part in a file of its own.
// Register (test_device.h) registers all of them, once.
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
void RegisterOperators();  // operators.cc: operators of memory, copies
void RegisterFallback();   // fallback.cc: all other operators

c10::DeviceAllocator* GetAllocator();
// Returns the CPU generator behind the device's default one.
at::Generator& HostGenerator(int device);
// Returns the CPU generator behind any generator of a test device.
at::Generator& HostGeneratorOf(const at::Generator& of_device);

}  // namespace testdevice
#endif  // TESTING_DEVICE_TORCH_PARTS_H_
