// This is a device without hardware: torch's PrivateUse1 backend "testdevice",
// with several devices, streams, events and a caching allocator. It computes on
// the CPU, with the CPU's bits, but follows the rules of a device, and reports
// whatever breaks them (testing/device/order_checker.h):
//
//   Register({});
//   at::Tensor x = at::ones({4}, TestDevice(1));
//   c10::Stream side = ...;  // c10::Stream, c10::Event: as of any device
//   ...
//   for (const Fault& fault : Faults()) ...
//
// A host that follows a device's pointer gets SIGSEGV. Kernels and collectives
// that are not operators of torch use Launch.
//
// It has two modes. kAtOnce: operators run in the call. kWorkers: each stream
// has a thread that runs them later, with delays; new and freed memory is
// poisoned in the order of its stream, so that a missing wait also shows as
// wrong bits. Both check the order.
//
// The host waits here where it waits with CUDA, and each wait is counted:
// item(), copies to or from memory that is not pinned or not non_blocking,
// operators whose output's shape depends on values, synchronize.
//
// It differs from a device in sparse tensors, several processes and kernels'
// speed, and its bits are the CPU's. Interleaved views count with all that lies
// between their first and last element.
#ifndef TESTING_DEVICE_TEST_DEVICE_H_
#define TESTING_DEVICE_TEST_DEVICE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "c10/core/Device.h"
#include "c10/core/Stream.h"
#include "testing/device/order_checker.h"

namespace testdevice {

struct Options {
  int devices = 2;
};

// Registers the backend. Once in a process, before the first backward; further
// calls do nothing.
void Register(const Options& options);

inline c10::Device TestDevice(int index) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

enum class Mode { kAtOnce, kWorkers };
// Waits for all streams, then sets the mode. `seed` determines the workers'
// delays.
void SetMode(Mode mode, uint64_t seed = 0);

// Seeds the generators of all devices.
void ManualSeed(uint64_t seed);

// ---- For what is not an operator of torch.

// Memory that a task reads or writes: device memory by its device address, or
// pinned memory.
struct Region {
  const void* begin = nullptr;
  int64_t bytes = 0;
  bool writes = false;
};
// Runs `work` on `stream`; it accesses memory through OnHost.
void Launch(c10::Stream stream, const std::string& what,
            const std::vector<Region>& regions, std::function<void()> work);
// Returns where the host finds what lies at a device's address; other addresses
// are returned as they are. For tasks.
void* OnHost(const void* address);
template <typename T>
T* OnHost(T* address) {
  return static_cast<T*>(OnHost(static_cast<const void*>(address)));
}
// Notes that the host reads or writes pinned memory, at once.
void NoteHostAccess(const std::string& what, const Region& region);

// ---- What was found.

std::vector<Fault> Faults();
// Also checks memory that was freed and not given out since.
void CheckFreed();
void ClearFaults();

// How often the host has waited for a stream, for what ("item", "synchronize
// stream"), and on which thread, by the system's name for it.
struct HostWaited {
  std::string what;
  std::string thread;
  int64_t times = 0;
};
std::vector<HostWaited> HostWaits();
int64_t CountHostWaits();
void ResetHostWaits();

// How many tasks streams were given since the process began: by the operators
// of torch ("aten::add.Tensor"), and by Launch.
std::map<std::string, int64_t> LaunchCounts();
// Returns those of `what`, of all streams or of one.
int64_t CountLaunches(const std::string& what);
int64_t CountLaunches(const std::string& what, c10::Stream stream);

// Refuses memory beyond `bytes` with c10::OutOfMemoryError.
void SetMemoryLimit(int device, int64_t bytes);

}  // namespace testdevice
#endif  // TESTING_DEVICE_TEST_DEVICE_H_
