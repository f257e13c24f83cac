// A device without hardware: torch's PrivateUse1 backend "testdevice", with
// several devices, streams, events and a caching allocator. It computes on the
// CPU, with the CPU's bits, but keeps the laws of a device, and tells of all
// that breaks them (testing/device/order_checker.h):
//
//   Register({});
//   at::Tensor x = at::ones({4}, TestDevice(1));
//   c10::Stream side = ...;  // c10::Stream, c10::Event: as of any device
//   ...
//   for (const Fault& fault : Faults()) ...
//
// A host that follows a device's pointer gets SIGSEGV. Kernels and collectives
// that are no operators of torch go through Launch.
//
// Two modes. kAtOnce: operators run in the call. kWorkers: each stream has a
// thread that runs them later, with delays; memory that is new or freed is
// poisoned in the order of its stream; so a missing wait shows as wrong bits,
// too. Both check the order.
//
// What CUDA makes the host wait for waits here, and is counted: item(), copies
// to or from memory that is not pinned or not non_blocking, operators whose
// output's shape depends on values, synchronize.
//
// Not like a device: sparse tensors; several processes; kernels' speed; bits
// are the CPU's. Interleaved views count with all that lies between their first
// and last element.
#ifndef TESTING_DEVICE_TEST_DEVICE_H_
#define TESTING_DEVICE_TEST_DEVICE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "c10/core/Device.h"
#include "c10/core/Stream.h"
#include "testing/device/order_checker.h"

namespace testdevice {

struct Options {
  int devices = 2;
};

// Once in a process, before the first backward; another call does nothing.
void Register(const Options& options);

inline c10::Device TestDevice(int index) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

enum class Mode { kAtOnce, kWorkers };
// Waits for all streams first. `seed`: of the workers' delays.
void SetMode(Mode mode, uint64_t seed = 0);

// All devices' generators.
void ManualSeed(uint64_t seed);

// ---- What is no operator of torch.

// Memory of a device that a task reads or writes, by its device's address; or
// pinned memory.
struct Region {
  const void* begin = nullptr;
  int64_t bytes = 0;
  bool writes = false;
};
// `work` runs on `stream`, and sees memory through OnHost.
void Launch(c10::Stream stream, const std::string& what,
            const std::vector<Region>& regions, std::function<void()> work);
// Where the host finds what lies at a device's address; other addresses are as
// they are. For tasks.
void* OnHost(const void* address);
template <typename T>
T* OnHost(T* address) {
  return static_cast<T*>(OnHost(static_cast<const void*>(address)));
}
// The host reads or writes pinned memory, at once.
void NoteHostAccess(const std::string& what, const Region& region);

// ---- What was found.

std::vector<Fault> Faults();
// Memory that was freed, and not given out since, is looked at, too.
void CheckFreed();
void ClearFaults();

// How often the host has waited for a stream, and for what: "item",
// "synchronize stream"; and on which thread, by the system's name for it.
struct HostWaited {
  std::string what;
  std::string thread;
  int64_t times = 0;
};
std::vector<HostWaited> HostWaits();
int64_t CountHostWaits();
void ResetHostWaits();

// More than that is refused, with c10::OutOfMemoryError.
void SetMemoryLimit(int device, int64_t bytes);

}  // namespace testdevice
#endif  // TESTING_DEVICE_TEST_DEVICE_H_
