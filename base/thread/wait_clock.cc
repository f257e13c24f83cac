#include "base/thread/wait_clock.h"

#include <atomic>

namespace tessera {
namespace {

std::atomic<int64_t> data_wait_nanos{0};

}  // namespace

int64_t DataWaitNanos() {
  return data_wait_nanos.load(std::memory_order_relaxed);
}

void AddDataWait(int64_t nanos) {
  data_wait_nanos.fetch_add(nanos, std::memory_order_relaxed);
}

}  // namespace tessera
