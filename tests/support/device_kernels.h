// Implements DeviceKernels (optim/device_kernels.h) for the device without
// hardware (testing/device/test_device.h): tasks on its streams do what GPU
// kernels do, by the functions that these share with the CPU, and declare what
// they read and write.
#ifndef TESTS_SUPPORT_DEVICE_KERNELS_H_
#define TESTS_SUPPORT_DEVICE_KERNELS_H_

namespace tessera {

// Makes DeviceKernelsOf(PrivateUse1) return them; further calls do nothing.
// LOCAL. REQUIRES: testdevice::Register was called, before the first kernel.
void RegisterTestDeviceKernels();

}  // namespace tessera
#endif  // TESTS_SUPPORT_DEVICE_KERNELS_H_
