#include "testing/device/test_device.h"

#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/core/DeviceType.h"
#include "testing/device/runtime.h"
#include "testing/device/torch_parts.h"

namespace testdevice {

void Register(const Options& options) {
  static std::once_flag once;
  std::call_once(once, [&] {
    Runtime::Make(options.devices);
    c10::register_privateuse1_backend("testdevice");
    RegisterGuard();
    RegisterAllocator();
    RegisterHooks();
    RegisterOperators();
    RegisterFallback();
  });
}

void SetMode(Mode mode, uint64_t seed) { Runtime::Get().SetMode(mode, seed); }

void ManualSeed(uint64_t seed) {
  for (int i = 0; i < Runtime::Get().devices(); ++i) {
    HostGenerator(i).set_current_seed(seed);
  }
}

void Launch(c10::Stream stream, const std::string& what,
            const std::vector<Region>& regions, std::function<void()> work) {
  std::vector<Access> accesses;
  for (size_t i = 0; i < regions.size(); ++i) {
    const auto begin = reinterpret_cast<uintptr_t>(regions[i].begin);
    accesses.push_back({begin, begin + static_cast<uintptr_t>(regions[i].bytes),
                        regions[i].writes, static_cast<int>(i)});
  }
  Runtime::Get().Launch(
      stream, what, accesses,
      [](int argument) { return absl::StrCat("its region ", argument); },
      std::move(work));
}

void* OnHost(const void* address) {
  Arena& arena = Runtime::Get().arena();
  auto at = reinterpret_cast<uintptr_t>(address);
  if (arena.DeviceOf(address) >= 0) at = arena.OnHost(at);
  return reinterpret_cast<void*>(at);
}

void NoteHostAccess(const std::string& what, const Region& region) {
  const auto begin = reinterpret_cast<uintptr_t>(region.begin);
  Runtime::Get().checker().HostAccess(
      what,
      {begin, begin + static_cast<uintptr_t>(region.bytes), region.writes, -1});
}

std::vector<Fault> Faults() { return Runtime::Get().checker().faults(); }
void CheckFreed() { Runtime::Get().checker().CheckFreed(); }
void ClearFaults() { Runtime::Get().checker().ClearFaults(); }

std::vector<HostWaited> HostWaits() { return Runtime::Get().host_waits(); }

int64_t CountHostWaits() {
  int64_t times = 0;
  for (const HostWaited& each : HostWaits()) times += each.times;
  return times;
}

std::map<std::string, int64_t> LaunchCounts() {
  return Runtime::Get().launch_counts();
}

int64_t CountLaunches(const std::string& what) { return LaunchCounts()[what]; }

int64_t CountLaunches(const std::string& what, c10::Stream stream) {
  return Runtime::Get().CountLaunches(what, stream);
}

void ResetHostWaits() { Runtime::Get().ResetHostWaits(); }

void SetMemoryLimit(int device, int64_t bytes) {
  Runtime::Get().arena().SetLimit(device, bytes);
}

}  // namespace testdevice
