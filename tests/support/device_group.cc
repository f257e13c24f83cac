#include "tests/support/device_group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/group/queued_communicator.h"
#include "comm/group/self_communicator.h"
#include "comm/group/watched_communicator.h"
#include "comm/shared_memory.h"
#include "testing/device/test_device.h"

namespace tessera {
namespace {

constexpr int64_t kSlotBytes = 256 << 10;
constexpr int64_t kHeaderBytes = 4096;

c10::impl::VirtualGuardImpl Impl() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
}

//   [ how often each rank has come | slot of rank 0 | slot of rank 1 | ... ]
class Slots {
 public:
  Slots(int rank, int size, std::unique_ptr<SharedMemory> memory)
      : rank_(rank), size_(size), memory_(std::move(memory)) {}

  int rank() const { return rank_; }
  int size() const { return size_; }
  char* of(int rank) const {
    return memory_->writable() + kHeaderBytes + rank * kSlotBytes;
  }
  // Returns when all ranks have come as often as this one.
  void Meet() {
    const int64_t mine = ++count(rank_);
    for (int r = 0; r < size_; ++r) {
      while (count(r) < mine) {
        TORCH_CHECK(!aborted_, "the collective was aborted");
        sched_yield();
        usleep(20);
      }
    }
  }
  void Abort() { aborted_ = true; }

 private:
  std::atomic<int64_t>& count(int rank) const {
    return reinterpret_cast<std::atomic<int64_t>*>(memory_->writable())[rank];
  }
  const int rank_, size_;
  const std::unique_ptr<SharedMemory> memory_;
  std::atomic<bool> aborted_{false};
};

class DeviceBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  DeviceBackend(std::shared_ptr<Slots> slots, at::Device device)
      : Backend(slots->rank(), slots->size()),
        slots_(std::move(slots)),
        stream_(Impl().getStreamFromGlobalPool(device)) {}

  const std::string getBackendName() const override { return "test device"; }
  void abort() override { slots_->Abort(); }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    const auto bytes = static_cast<int64_t>(input.nbytes());
    return Run(
        "all-gather", {input}, {output},
        [slots = slots_.get(), bytes](const char* const* in, char* const* out) {
          Pieces(bytes, kSlotBytes, [&](int64_t at, int64_t n) {
            std::memcpy(slots->of(slots->rank()), in[0] + at, n);
            slots->Meet();
            for (int r = 0; r < slots->size(); ++r) {
              std::memcpy(out[0] + r * bytes + at, slots->of(r), n);
            }
            slots->Meet();
          });
        });
  }
  WorkPtr alltoall(Tensors& output, Tensors& input,
                   const c10d::AllToAllOptions&) override {
    const auto bytes = static_cast<int64_t>(input[0].nbytes());
    return Run(
        "all-to-all", input, output,
        [slots = slots_.get(), bytes](const char* const* in, char* const* out) {
          const int64_t piece = kSlotBytes / slots->size();
          Pieces(bytes, piece, [&](int64_t at, int64_t n) {
            for (int r = 0; r < slots->size(); ++r) {
              std::memcpy(slots->of(slots->rank()) + r * piece, in[r] + at, n);
            }
            slots->Meet();
            for (int r = 0; r < slots->size(); ++r) {
              std::memcpy(out[r] + at, slots->of(r) + slots->rank() * piece, n);
            }
            slots->Meet();
          });
        });
  }
  WorkPtr broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override {
    const auto bytes = static_cast<int64_t>(tensors[0].nbytes());
    const auto root = static_cast<int>(options.rootRank);
    return Run("broadcast", tensors, tensors,
               [slots = slots_.get(), bytes, root](const char* const* in,
                                                   char* const* out) {
                 Pieces(bytes, kSlotBytes, [&](int64_t at, int64_t n) {
                   if (slots->rank() == root) {
                     std::memcpy(slots->of(root), in[0] + at, n);
                   }
                   slots->Meet();
                   std::memcpy(out[0] + at, slots->of(root), n);
                   slots->Meet();
                 });
               });
  }

 private:
  using Body = std::function<void(const char* const* in, char* const* out)>;

  class OnStream : public c10d::Work {
   public:
    OnStream(c10::Stream stream, Tensors held)
        : event_(stream.device_type()), held_(std::move(held)) {
      event_.record(stream);
    }
    bool isCompleted() override { return event_.query(); }
    std::exception_ptr exception() const override { return nullptr; }
    bool wait(std::chrono::milliseconds) override {
      event_.block(Impl().getStream(event_.device()));
      held_.clear();
      return true;
    }

   private:
    c10::Event event_;
    Tensors held_;
  };

  static void Pieces(int64_t bytes, int64_t most,
                     const std::function<void(int64_t at, int64_t n)>& piece) {
    for (int64_t at = 0; at < bytes; at += most) {
      piece(at, std::min(most, bytes - at));
    }
  }

  WorkPtr Run(const std::string& what, const Tensors& inputs,
              const Tensors& outputs, const Body& body) {
    c10::Event before(c10::DeviceType::PrivateUse1);
    before.record(Impl().getStream(stream_.device()));
    before.block(stream_);
    std::vector<testdevice::Region> regions;
    std::vector<const char*> in;
    std::vector<char*> out;
    for (const at::Tensor& t : inputs) {
      const auto* data = static_cast<const char*>(t.const_data_ptr());
      regions.push_back({data, static_cast<int64_t>(t.nbytes()), false});
      in.push_back(testdevice::OnHost(data));
    }
    for (const at::Tensor& t : outputs) {
      auto* data = static_cast<char*>(t.mutable_data_ptr());
      regions.push_back({data, static_cast<int64_t>(t.nbytes()), true});
      out.push_back(testdevice::OnHost(data));
    }
    testdevice::Launch(stream_, what, regions, [slots = slots_, body, in, out] {
      body(in.data(), out.data());
    });
    Tensors held = inputs;
    held.insert(held.end(), outputs.begin(), outputs.end());
    return c10::make_intrusive<OnStream>(stream_, std::move(held));
  }

  const std::shared_ptr<Slots> slots_;
  const c10::Stream stream_;
};

// Makes the subgroups of a device group, over those of its host group.
absl::StatusOr<std::shared_ptr<Communicator>> MakeSubgroup(
    const std::shared_ptr<Communicator>& host, c10::Device device,
    const Subgroup& subgroup) {
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<Communicator> part,
      host->Split(subgroup.ranks[0], CommTag("host of a part")));
  if (subgroup.ranks.size() == 1) return MakeSelfCommunicator(subgroup.options);
  DeviceCommunicatorOptions options{subgroup.options};
  options.device = device;
  return MakeDeviceGroup(options, std::move(part));
}

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> MakeDeviceBackend(
    Communicator* host, c10::Device device) {
  TESSERA_ASSIGN_OR_RETURN(
      std::unique_ptr<SharedMemory> memory,
      host->ShareMemory(kHeaderBytes + host->world_size() * kSlotBytes,
                        CommTag("slots of a test device")));
  return c10::make_intrusive<DeviceBackend>(
      std::make_shared<Slots>(host->rank(), host->world_size(),
                              std::move(memory)),
      device);
}

absl::StatusOr<std::shared_ptr<Communicator>> MakeDeviceGroup(
    DeviceCommunicatorOptions options, std::shared_ptr<Communicator> host,
    c10::intrusive_ptr<c10d::Backend> backend) {
  if (backend == nullptr) {
    TESSERA_ASSIGN_OR_RETURN(backend,
                             MakeDeviceBackend(host.get(), options.device));
  }
  options.backend = "device";
  if (!options.ordered_sum) {
    options.ordered_sum = [](const at::Tensor& slices, double divisor,
                             const at::Tensor& sum) {
      AddSlices(slices, divisor, sum);
      return absl::OkStatus();
    };
  }
  options.make_subgroup = [host, device = options.device](const Subgroup& s) {
    return MakeSubgroup(host, device, s);
  };
  auto queued = std::dynamic_pointer_cast<WatchedCommunicator>(host);
  return MakeDeviceCommunicator(options, queued->domain(), queued,
                                std::move(backend));
}

DeviceCommunicatorOptions DeviceOptionsOf(const Communicator& comm,
                                          c10::Device device) {
  DeviceCommunicatorOptions options{
      dynamic_cast<const WatchedCommunicator&>(comm).options()};
  options.device = device;
  return options;
}

absl::StatusOr<std::shared_ptr<Communicator>> DeviceGroup(
    const std::shared_ptr<Communicator>& comm, c10::Device device) {
  if (comm->world_size() == 1) return comm;
  using Key = std::pair<const void*, int>;
  static auto* const made = new std::map<Key, std::shared_ptr<Communicator>>;
  std::shared_ptr<Communicator>& group =
      (*made)[Key(comm.get(), device.index())];
  if (group != nullptr) return group;
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> host,
                           comm->Split(0, CommTag("host of devices")));
  // Named as the host group: what is said of it is of a group of its own.
  DeviceCommunicatorOptions options = DeviceOptionsOf(*host, device);
  options.name += ".devices";
  TESSERA_ASSIGN_OR_RETURN(group, MakeDeviceGroup(options, std::move(host)));
  return group;
}

}  // namespace tessera
