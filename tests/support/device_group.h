// DeviceGroup: the collectives of ranks of one host on the device without
// hardware (testing/device/test_device.h), as GPUs have them: a
// DeviceTransport (comm/device/device_transport.h) over what stands in the
// place of c10d's NCCL here: the backend of GPUs that can open each other's
// memory (comm/cuda_ipc/slot_backend.h, which has NCCL's manners), with memory
// of the host that the ranks share in the place of theirs.
#ifndef TESTS_SUPPORT_DEVICE_GROUP_H_
#define TESTS_SUPPORT_DEVICE_GROUP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/communicator.h"
#include "comm/cuda_ipc/slot_exchange.h"
#include "comm/device/device_transport.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace tessera {

// What stands in NCCL's place, over memory that the ranks of `host` share. Of
// `host` nothing is used afterwards, unless `meet` does. COLLECTIVE.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> MakeDeviceBackend(
    Communicator* host, c10::Device device, Meeting meet);

// A group of the same ranks as `comm`, whose tensors are of `device` or the
// CPU's; it can be split. `comm` itself if it is alone. COLLECTIVE. The same
// one again for the same `comm` and device; lives as long as the process.
absl::StatusOr<std::shared_ptr<Communicator>> DeviceGroup(
    const std::shared_ptr<Communicator>& comm, c10::Device device);

// The same as `options` say, over `host`, which no other uses; `backend` null:
// MakeDeviceBackend's. COLLECTIVE.
absl::StatusOr<std::shared_ptr<Communicator>> MakeDeviceGroup(
    DeviceTransportOptions options, std::shared_ptr<Communicator> host,
    c10::intrusive_ptr<c10d::Backend> backend = nullptr);

// Those of a rank of `comm`.
DeviceTransportOptions DeviceOptionsOf(const Communicator& comm,
                                       c10::Device device);

}  // namespace tessera
#endif  // TESTS_SUPPORT_DEVICE_GROUP_H_
