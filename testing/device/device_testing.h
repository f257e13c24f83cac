// Helpers that tests of the device share; each test runs in both modes.
#ifndef TESTING_DEVICE_DEVICE_TESTING_H_
#define TESTING_DEVICE_DEVICE_TESTING_H_

#include <cstring>

#include "ATen/core/Tensor.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"

namespace testdevice {

class TestDeviceTest : public ::testing::TestWithParam<Mode> {
 protected:
  static void SetUpTestSuite() { Register({}); }
  void SetUp() override {
    SetMode(GetParam(), 1);
    ClearFaults();
    ResetHostWaits();
  }
  void TearDown() override { SetMode(Mode::kAtOnce); }
  // Compares bits. The tensor has NaN where a worker would have come too late.
  static bool HasBits(const at::Tensor& of_device, const at::Tensor& expected) {
    const at::Tensor got = of_device.cpu();
    return got.sizes().equals(expected.sizes()) &&
           std::memcmp(got.const_data_ptr(), expected.const_data_ptr(),
                       got.nbytes()) == 0;
  }
};

}  // namespace testdevice
#endif  // TESTING_DEVICE_DEVICE_TESTING_H_
