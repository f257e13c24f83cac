#include "base/thread/wait_clock.h"

#include <atomic>

namespace tessera {
namespace {

std::atomic<int64_t> data_wait_nanos{0};
std::atomic<bool> is_told{false};

}  // namespace

int64_t DataWaitNanos() {
  return data_wait_nanos.load(std::memory_order_relaxed);
}

void AddDataWait(int64_t nanos) {
  data_wait_nanos.fetch_add(nanos, std::memory_order_relaxed);
  is_told.store(true, std::memory_order_relaxed);
}

bool DataWaitIsTold() { return is_told.load(std::memory_order_relaxed); }

}  // namespace tessera
