#include "testing/device/arena.h"

#include <sys/mman.h>

#include <algorithm>

#include "c10/util/Exception.h"

namespace testdevice {
namespace {

constexpr uintptr_t kDeviceBytes = uintptr_t{1} << 36;  // of addresses

uintptr_t Reserve(uintptr_t bytes, int protection) {
  void* const at = mmap(nullptr, bytes, protection,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "test device: no ", bytes,
              " bytes of address space");
  return reinterpret_cast<uintptr_t>(at);
}

}  // namespace

Arena::Arena(int devices) : devices_(devices) {
  const uintptr_t all = kDeviceBytes * static_cast<uintptr_t>(devices);
  begin_ = Reserve(all, PROT_NONE);
  to_host_ = Reserve(all, PROT_READ | PROT_WRITE) - begin_;
  for (int i = 0; i < devices; ++i) {
    Device device;
    device.begin = begin_ + kDeviceBytes * static_cast<uintptr_t>(i);
    device.next = device.begin;
    device.end = device.begin + kDeviceBytes;
    each_.push_back(device);
  }
}

uintptr_t Arena::Allocate(int device, int stream, int64_t bytes) {
  bytes =
      (std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  absl::MutexLock lock(&mutex_);
  Device& of = each_[static_cast<size_t>(device)];
  if (of.held.allocated + bytes > of.limit) return 0;
  std::vector<uintptr_t>& free = of.free[{stream, bytes}];
  uintptr_t begin = 0;
  if (!free.empty()) {
    begin = free.back();
    free.pop_back();
  } else {
    if (of.end - of.next < static_cast<uintptr_t>(bytes)) return 0;
    begin = of.next;
    of.next += static_cast<uintptr_t>(bytes);
    of.held.reserved += bytes;
  }
  of.held.allocated += bytes;
  of.held.peak = std::max(of.held.peak, of.held.allocated);
  blocks_[begin] = {device, stream, bytes};
  return begin;
}

void Arena::Free(uintptr_t begin) {
  absl::MutexLock lock(&mutex_);
  const auto at = blocks_.find(begin);
  TORCH_CHECK(at != blocks_.end(), "test device: freed twice");
  const Block block = at->second;
  blocks_.erase(at);
  Device& of = each_[static_cast<size_t>(block.device)];
  of.held.allocated -= block.bytes;
  of.free[{block.stream, block.bytes}].push_back(begin);
}

void Arena::ReturnFree() {
  absl::MutexLock lock(&mutex_);
  for (Device& device : each_) {
    for (const auto& [key, blocks] : device.free) {
      device.held.reserved -= key.second * static_cast<int64_t>(blocks.size());
    }
    device.free.clear();
  }
}

int64_t Arena::BytesOf(uintptr_t begin) const {
  absl::MutexLock lock(&mutex_);
  return blocks_.at(begin).bytes;
}

int Arena::StreamOf(uintptr_t begin) const {
  absl::MutexLock lock(&mutex_);
  return blocks_.at(begin).stream;
}

int Arena::DeviceOf(const void* address) const {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address) - begin_;
  const auto device = static_cast<int64_t>(at / kDeviceBytes);
  return device < devices_ ? static_cast<int>(device) : -1;
}

Arena::Held Arena::held(int device) const {
  absl::MutexLock lock(&mutex_);
  return each_[static_cast<size_t>(device)].held;
}

void Arena::ResetPeak(int device) {
  absl::MutexLock lock(&mutex_);
  Held& held = each_[static_cast<size_t>(device)].held;
  held.peak = held.allocated;
}

void Arena::SetLimit(int device, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  each_[static_cast<size_t>(device)].limit = bytes;
}

}  // namespace testdevice
