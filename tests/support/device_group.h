// DeviceGroup gives ranks of one host collectives on the device without
// hardware (testing/device/test_device.h), as GPUs have them: a
// DeviceTransport (comm/device/device_transport.h) over a substitute for
// c10d's NCCL. The substitute is the backend of GPUs that can open each other's
// memory (comm/cuda_ipc/slot_backend.h, which behaves like NCCL), over host
// memory that the ranks share.
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

// Makes the substitute for NCCL over memory that the ranks of `host` share.
// `host` is not used afterwards, unless `meet` uses it. COLLECTIVE.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> MakeDeviceBackend(
    Communicator* host, c10::Device device, Meeting meet);

// Returns a group of the same ranks as `comm`, whose tensors are on `device` or
// the CPU; it can be split, and serve shards. Returns `comm` itself if it has
// one rank. COLLECTIVE. Returns the same group for the same `comm` and device;
// it lives as long as the process.
absl::StatusOr<std::shared_ptr<Communicator>> DeviceGroup(
    const std::shared_ptr<Communicator>& comm, c10::Device device);

// Makes a group with `options` over `host`, which nothing else uses, as
// MakeDeviceTransport. If `backend` is null, there are two of
// MakeDeviceBackend's on a device that has room for one collective at a time
// and starts them in the order of the host. COLLECTIVE.
absl::StatusOr<std::shared_ptr<Communicator>> MakeDeviceGroup(
    DeviceTransportOptions options, std::shared_ptr<Communicator> host,
    c10::intrusive_ptr<c10d::Backend> backend = nullptr,
    c10::intrusive_ptr<c10d::Backend> sums = nullptr);

// Returns the options of a rank of `comm`.
DeviceTransportOptions DeviceOptionsOf(const Communicator& comm,
                                       c10::Device device);

}  // namespace tessera
#endif  // TESTS_SUPPORT_DEVICE_GROUP_H_
