// DeviceKernels (optim/device_kernels.h) of the device without hardware
// (testing/device/test_device.h): tasks on its streams that do what GPU kernels
// do, by the functions that these share with the CPU, and declare what they
// read and write.
#ifndef TESTS_SUPPORT_DEVICE_KERNELS_H_
#define TESTS_SUPPORT_DEVICE_KERNELS_H_

namespace tessera {

// From then on DeviceKernelsOf(PrivateUse1) gives them; another call does
// nothing. LOCAL. REQUIRES: testdevice::Register was called, before the first
// kernel.
void RegisterTestDeviceKernels();

}  // namespace tessera
#endif  // TESTS_SUPPORT_DEVICE_KERNELS_H_
