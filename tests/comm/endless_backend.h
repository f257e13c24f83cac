// A backend of c10d's for groups on the device without hardware, whose
// collectives never end by themselves, and the groups over it.
#ifndef TESTS_COMM_ENDLESS_BACKEND_H_
#define TESTS_COMM_ENDLESS_BACKEND_H_

#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "comm/communicator.h"
#include "comm/device/device_transport.h"
#include "comm/world/world.h"
#include "testing/device/test_device.h"
#include "tests/support/device_group.h"
#include "tests/support/rank_pool.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace tessera {

inline constexpr int kDevice = 1;
inline void PrepareDevice(absl::string_view mode) {
  testdevice::Register({});
  testdevice::SetMode(mode == "workers" ? testdevice::Mode::kWorkers
                                        : testdevice::Mode::kAtOnce);
  testdevice::ClearFaults();
}

// Makes a group over the ranks of `world`, which are in no other collective, as
// MakeDeviceGroup. A backend's end may take `patience`.
inline absl::StatusOr<std::shared_ptr<Communicator>> ConnectDevices(
    const World& world, DeviceTransportOptions options,
    c10::intrusive_ptr<c10d::Backend> backend = nullptr,
    absl::Duration patience = absl::Seconds(15),
    c10::intrusive_ptr<c10d::Backend> sums = nullptr) {
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<Communicator> host,
      world.communicator()->Split(0, CommTag("host of devices")));
  options.rank = host->rank();
  options.world_size = host->world_size();
  options.device = testdevice::TestDevice(kDevice);
  options.abort_patience = patience;
  return MakeDeviceGroup(options, std::move(host), std::move(backend),
                         std::move(sums));
}

inline RankPoolOptions TwoRanks(absl::Duration timeout) {
  RankPoolOptions options;
  options.collective_timeout = timeout;
  return options;
}

// What has been called; outlives the backend.
struct BackendCalls {
  std::atomic<int> aborts{0}, shutdowns{0}, destroyed{0};
  absl::Notification aborted;
};

class EndlessBackend : public c10d::Backend {
 public:
  EndlessBackend(const World& world, bool can_be_aborted)
      : Backend(world.rank(), world.world_size()),
        calls_(std::make_shared<BackendCalls>()),
        can_be_aborted_(can_be_aborted) {}
  ~EndlessBackend() override { ++calls_->destroyed; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override {
    return c10::make_intrusive<Endless>();
  }
  // The first goes on for ever, the second cannot be given.
  c10::intrusive_ptr<c10d::Work> alltoall(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&,
      const c10d::AllToAllOptions&) override {
    TORCH_CHECK(!given_, "no more of it");
    given_ = true;
    return c10::make_intrusive<Endless>();
  }
  void abort() override {
    ++calls_->aborts;
    calls_->aborted.Notify();
    if (at_abort_) at_abort_();
    while (!can_be_aborted_) pause();
  }
  void shutdown() override {
    ++calls_->shutdowns;
    if (at_shutdown_) at_shutdown_();
  }

  // Sets what abort() and shutdown() do.
  void SetAtAbort(std::function<void()> at_abort) {
    at_abort_ = std::move(at_abort);
  }
  void SetAtShutdown(std::function<void()> at_shutdown) {
    at_shutdown_ = std::move(at_shutdown);
  }
  const std::shared_ptr<BackendCalls>& calls() const { return calls_; }

 private:
  struct Endless : c10d::Work {
    bool isCompleted() override { return false; }
    std::exception_ptr exception() const override { return nullptr; }
    bool wait(std::chrono::milliseconds) override { return true; }
  };
  const std::shared_ptr<BackendCalls> calls_;
  const bool can_be_aborted_;
  std::function<void()> at_abort_, at_shutdown_;
  bool given_ = false;
};

}  // namespace tessera
#endif  // TESTS_COMM_ENDLESS_BACKEND_H_
