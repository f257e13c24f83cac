#include "comm/cuda_ipc/slot_backend.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/torch_guard.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr absl::Duration kPoll = absl::Milliseconds(1);

c10::Stream CurrentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// All that a stream has been given until now.
class GivenWork : public c10d::Work {
 public:
  GivenWork(c10::Stream stream, Tensors held)
      : event_(stream.device_type()), held_(std::move(held)) {
    event_.record(stream);
  }
  bool isCompleted() override { return event_.query(); }
  // Errors of the device come from isCompleted().
  std::exception_ptr exception() const override { return nullptr; }
  bool wait(std::chrono::milliseconds) override {
    event_.block(CurrentStream(event_.device()));
    held_.clear();  // who frees them comes after the current stream
    return true;
  }

 private:
  c10::Event event_;
  Tensors held_;
};

class SlotBackend : public c10d::Backend {
 public:
  SlotBackend(std::string name, std::shared_ptr<PeerMemory> memory,
              c10::Stream stream, Meeting meet)
      : Backend(memory->rank(), memory->world_size()),
        name_(std::move(name)),
        memory_(std::move(memory)),
        stream_(stream),
        exchange_(memory_.get(), [this, meet = std::move(meet)] {
          if (aborted_) return absl::CancelledError("the group has failed");
          return meet();
        }) {}

  const std::string getBackendName() const override { return name_; }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    const auto* in = static_cast<const char*>(input.const_data_ptr());
    auto* out = static_cast<char*>(output.mutable_data_ptr());
    const auto bytes = static_cast<int64_t>(input.nbytes());
    return Give({input, output},
                [&] { return exchange_.AllGather(in, bytes, out); });
  }

  WorkPtr alltoall(Tensors& output, Tensors& input,
                   const c10d::AllToAllOptions&) override {
    std::vector<const char*> in;
    std::vector<char*> out;
    int64_t bytes = 0;  // of each part that is not empty
    for (const at::Tensor& t : input) {
      bytes = std::max(bytes, static_cast<int64_t>(t.nbytes()));
      in.push_back(t.numel() == 0
                       ? nullptr
                       : static_cast<const char*>(t.const_data_ptr()));
    }
    for (const at::Tensor& t : output) {
      bytes = std::max(bytes, static_cast<int64_t>(t.nbytes()));
      out.push_back(t.numel() == 0 ? nullptr
                                   : static_cast<char*>(t.mutable_data_ptr()));
    }
    Tensors held = input;
    held.insert(held.end(), output.begin(), output.end());
    return Give(std::move(held),
                [&] { return exchange_.AllToAll(in, bytes, out); });
  }

  WorkPtr broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override {
    auto* data = static_cast<char*>(tensors[0].mutable_data_ptr());
    const auto bytes = static_cast<int64_t>(tensors[0].nbytes());
    return Give({tensors[0]}, [&] {
      return exchange_.Broadcast(data, bytes,
                                 static_cast<int>(options.rootRank));
    });
  }

  void abort() override {
    aborted_ = true;
    memory_->Abort();
    WorkPtr last;
    {
      absl::MutexLock lock(&mutex_);
      last = last_;
    }
    while (last != nullptr && !last->isCompleted()) absl::SleepFor(kPoll);
  }

 private:
  WorkPtr Give(Tensors held, const std::function<absl::Status()>& give) {
    const c10::DeviceGuard guard(stream_.device());
    c10::Event before(stream_.device_type());
    before.record(CurrentStream(stream_.device()));
    before.block(stream_);
    const absl::Status given = give();
    WorkPtr work = c10::make_intrusive<GivenWork>(stream_, std::move(held));
    {
      absl::MutexLock lock(&mutex_);
      last_ = work;
    }
    if (!given.ok()) work->wait();
    ThrowIfError(given);
    return work;
  }

  const std::string name_;
  const std::shared_ptr<PeerMemory> memory_;
  const c10::Stream stream_;
  std::atomic<bool> aborted_{false};
  SlotExchange exchange_;
  absl::Mutex mutex_;
  WorkPtr last_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> MakeSlotBackend(
    std::string name, std::shared_ptr<PeerMemory> memory, c10::Stream stream,
    Meeting meet) {
  return c10::make_intrusive<SlotBackend>(std::move(name), std::move(memory),
                                          stream, std::move(meet));
}

}  // namespace tessera
