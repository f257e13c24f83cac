// What the tests of memory limits share: two ranks, and the devices to train
// on.
#ifndef TESTS_MEMORY_MEMORY_LIMIT_TEST_UTIL_H_
#define TESTS_MEMORY_MEMORY_LIMIT_TEST_UTIL_H_

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "testing/device/test_device.h"

namespace tessera {

inline constexpr int kWorld = 2;

inline at::Device DeviceOf(absl::string_view name) {
  testdevice::Register({});
  return name == "cpu" ? at::Device(at::kCPU) : testdevice::TestDevice(1);
}

}  // namespace tessera
#endif  // TESTS_MEMORY_MEMORY_LIMIT_TEST_UTIL_H_
