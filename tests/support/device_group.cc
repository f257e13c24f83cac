#include "tests/support/device_group.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/cuda_ipc/peer_memory.h"
#include "comm/cuda_ipc/slot_backend.h"
#include "comm/group/group_communicator.h"
#include "comm/group/self_communicator.h"
#include "comm/serve/tcp_shard_server.h"
#include "comm/shared_memory.h"
#include "testing/device/test_device.h"

namespace tessera {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int64_t kSlotBytes = 64 << 10;

c10::impl::VirtualGuardImpl Impl() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
}

// Slots in memory that the processes share. Marks are counts of their records:
// of those that the host has made, and of those that a stream has come to.
//
//   [ marks of rank 0 | marks of rank 1 | ... ]
//   [ slots of rank 0 | slots of rank 1 | ... ]
class TestPeerMemory : public PeerMemory,
                       public std::enable_shared_from_this<TestPeerMemory> {
 public:
  static int64_t Bytes(int ranks) {
    return ranks * static_cast<int64_t>(sizeof(Marks) + kSlots * kSlotBytes);
  }
  TestPeerMemory(const Communicator& host, std::unique_ptr<SharedMemory> memory,
                 c10::Stream stream)
      : rank_(host.rank()),
        size_(host.world_size()),
        memory_(std::move(memory)),
        stream_(stream) {}

  int rank() const override { return rank_; }
  int world_size() const override { return size_; }
  int64_t slot_bytes() const override { return kSlotBytes; }

  absl::Status Record(Mark mark, int slot) override {
    Count& own = count(rank_, mark, slot);
    Launch("mark of a slot", {},
           [&own, n = ++own.recorded] { own.reached = n; });
    return absl::OkStatus();
  }
  absl::Status Await(int rank, Mark mark, int slot) override {
    const Count& theirs = count(rank, mark, slot);
    Launch("wait for a mark", {}, [this, &theirs, n = theirs.recorded.load()] {
      while (theirs.reached < n) {
        TORCH_CHECK(!aborted_, "the collective was aborted");
        sched_yield();
        usleep(20);
      }
    });
    return absl::OkStatus();
  }
  absl::Status Put(const void* from, int slot, int64_t at,
                   int64_t bytes) override {
    Launch("write of a slot", {{from, bytes, false}},
           [to = of(rank_, slot) + at, from, bytes] {
             std::memcpy(to, testdevice::OnHost(from), bytes);
           });
    return absl::OkStatus();
  }
  absl::Status Get(int rank, int slot, int64_t at, void* to,
                   int64_t bytes) override {
    Launch("read of a slot", {{to, bytes, true}},
           [to, from = of(rank, slot) + at, bytes] {
             std::memcpy(testdevice::OnHost(to), from, bytes);
           });
    return absl::OkStatus();
  }
  absl::Status Copy(const void* from, void* to, int64_t bytes) override {
    Launch(
        "copy", {{from, bytes, false}, {to, bytes, true}}, [from, to, bytes] {
          std::memcpy(testdevice::OnHost(to), testdevice::OnHost(from), bytes);
        });
    return absl::OkStatus();
  }
  void Abort() override { aborted_ = true; }

 private:
  struct Count {
    std::atomic<int64_t> recorded, reached;
  };
  using Marks = Count[kMarks][kSlots];

  // A task keeps this alive.
  void Launch(const std::string& what,
              const std::vector<testdevice::Region>& regions,
              std::function<void()> work) {
    testdevice::Launch(
        stream_, what, regions,
        [self = shared_from_this(), work = std::move(work)] { work(); });
  }
  Count& count(int rank, Mark mark, int slot) const {
    auto* const all = reinterpret_cast<Marks*>(memory_->writable());
    return all[rank][static_cast<int>(mark)][slot];
  }
  char* of(int rank, int slot) const {
    return memory_->writable() + size_ * sizeof(Marks) +
           (rank * kSlots + slot) * kSlotBytes;
  }

  const int rank_, size_;
  const std::unique_ptr<SharedMemory> memory_;
  const c10::Stream stream_;
  std::atomic<bool> aborted_{false};
};

// The collectives of a device, in the order in which its host has given them.
struct Turns {
  std::atomic<int64_t> given{0}, over{0};
};

// Gives an inner backend's collectives to a device that has room for one at a
// time, over all backends of the process. One holds its place from its turn on,
// also while it waits for what it reads.
class OnePlaceBackend : public c10d::Backend {
 public:
  OnePlaceBackend(c10::intrusive_ptr<c10d::Backend> inner, c10::Stream stream)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        stream_(stream) {}

  const std::string getBackendName() const override { return "one place"; }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& options) override {
    return InTurn([&] { return inner_->_allgather_base(out, in, options); });
  }
  WorkPtr alltoall(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in,
                   const c10d::AllToAllOptions& options) override {
    return InTurn([&] { return inner_->alltoall(out, in, options); });
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options) override {
    return InTurn([&] { return inner_->broadcast(tensors, options); });
  }
  void abort() override {
    *aborted_ = true;
    inner_->abort();
  }
  void shutdown() override { inner_->shutdown(); }

 private:
  WorkPtr InTurn(const std::function<WorkPtr()>& give) {
    static auto& turns = *new Turns;
    const int64_t turn = turns.given++;
    testdevice::Launch(stream_, "turn of a collective", {},
                       [turn, aborted = aborted_] {
                         while (turns.over < turn && !*aborted) usleep(20);
                       });
    const auto ends = absl::MakeCleanup([this] {
      testdevice::Launch(stream_, "end of a turn", {}, [] { ++turns.over; });
    });
    return give();
  }

  const c10::intrusive_ptr<c10d::Backend> inner_;
  const c10::Stream stream_;
  const std::shared_ptr<std::atomic<bool>> aborted_ =
      std::make_shared<std::atomic<bool>>(false);
};

// Makes the subgroups of a device group, over those of its host group.
absl::StatusOr<std::shared_ptr<Communicator>> MakeSubgroup(
    const std::shared_ptr<Communicator>& host, c10::Device device,
    const Subgroup& subgroup) {
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<Communicator> part,
      host->Split(subgroup.ranks[0], CommTag("host of a part")));
  if (subgroup.ranks.size() == 1) return MakeSelfCommunicator(subgroup.options);
  return MakeDeviceGroup(DeviceOptionsOf(*part, device), std::move(part));
}

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> MakeBackend(
    Communicator* host, c10::Stream stream, Meeting meet) {
  TESSERA_ASSIGN_OR_RETURN(
      std::unique_ptr<SharedMemory> memory,
      host->ShareMemory(TestPeerMemory::Bytes(host->world_size()),
                        CommTag("slots of a test device")));
  return MakeSlotBackend(
      "test device",
      std::make_shared<TestPeerMemory>(*host, std::move(memory), stream),
      stream, std::move(meet));
}

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> MakeDeviceBackend(
    Communicator* host, c10::Device device, Meeting meet) {
  return MakeBackend(host, Impl().getStreamFromGlobalPool(device),
                     std::move(meet));
}

absl::StatusOr<std::shared_ptr<Communicator>> MakeDeviceGroup(
    DeviceTransportOptions options, std::shared_ptr<Communicator> host,
    c10::intrusive_ptr<c10d::Backend> backend,
    c10::intrusive_ptr<c10d::Backend> sums) {
  const auto hosts = std::dynamic_pointer_cast<GroupCommunicator>(host);
  if (backend == nullptr) {
    const auto meeting = std::make_shared<HostMeeting>(hosts->transport());
    options.on_agreed = [meeting](const auto& call) { meeting->Begin(call); };
    for (auto* made : {&backend, &sums}) {
      const c10::Stream stream = Impl().getStreamFromGlobalPool(options.device);
      TESSERA_ASSIGN_OR_RETURN(
          auto inner, MakeBackend(host.get(), stream,
                                  [meeting] { return meeting->Meet(); }));
      *made = c10::make_intrusive<OnePlaceBackend>(std::move(inner), stream);
    }
  }
  options.backend = "device";
  if (!options.ordered_sum) {
    options.ordered_sum = [](const at::Tensor& slices, double divisor,
                             const at::Tensor& sum) {
      AddSlices(slices, divisor, sum);
      return absl::OkStatus();
    };
  }
  GroupMakers makers;
  makers.shard_server = MakeTcpShardServer;
  makers.subgroup = [host, device = options.device](const Subgroup& s) {
    return MakeSubgroup(host, device, s);
  };
  TESSERA_ASSIGN_OR_RETURN(
      auto group,
      GroupCommunicator::Create(
          hosts->options(), std::move(makers), hosts->domain(),
          MakeDeviceTransport(options, hosts->transport(), std::move(backend),
                              std::move(sums))));
  group->CountOnFrom(*hosts);
  return group;
}

DeviceTransportOptions DeviceOptionsOf(const Communicator& comm,
                                       c10::Device device) {
  DeviceTransportOptions options;
  options.rank = comm.rank();
  options.world_size = comm.world_size();
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
  DeviceTransportOptions options = DeviceOptionsOf(*host, device);
  TESSERA_ASSIGN_OR_RETURN(group, MakeDeviceGroup(options, std::move(host)));
  return group;
}

}  // namespace tessera
