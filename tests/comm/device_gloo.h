// DeviceGloo: c10d's Gloo for tensors of the device without hardware
// (testing/device/test_device.h), with the manners of c10d's NCCL: a collective
// is given to a stream of the backend's own, after what the caller's current
// stream has been given; it is done when that stream is; and wait() lets the
// caller's stream, not the host, wait for it.
#ifndef TESTS_COMM_DEVICE_GLOO_H_
#define TESTS_COMM_DEVICE_GLOO_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "testing/device/test_device.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/torch.h"

namespace tessera {

class DeviceGloo : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  DeviceGloo(c10::intrusive_ptr<c10d::Backend> gloo, at::Device device)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        device_(device),
        stream_(Impl().getStreamFromGlobalPool(device)) {}

  const std::string getBackendName() const override { return "device gloo"; }
  void abort() override { gloo_->abort(); }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    return Run("all-gather", input, output, [gloo = gloo_](auto in, auto out) {
      return gloo->_allgather_base(out, in);
    });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override {
    return Run("all-to-all", input, output, [gloo = gloo_](auto in, auto out) {
      std::vector<int64_t> equal;
      return gloo->alltoall_base(out, in, equal, equal);
    });
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options) override {
    return Run("broadcast", tensors[0], tensors[0],
               [gloo = gloo_, options](auto in, auto) {
                 std::vector<at::Tensor> all{in};
                 return gloo->broadcast(all, options);
               });
  }

 private:
  class OnStream : public c10d::Work {
   public:
    OnStream(c10::Stream stream, std::vector<at::Tensor> held)
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
    std::vector<at::Tensor> held_;
  };

  static c10::impl::VirtualGuardImpl Impl() {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
  }

  // Over the memory that the host sees.
  static at::Tensor OnHost(const at::Tensor& t) {
    return torch::from_blob(testdevice::OnHost(t.mutable_data_ptr()), t.sizes(),
                            t.dtype());
  }

  WorkPtr Run(const std::string& what, const at::Tensor& input,
              const at::Tensor& output,
              const std::function<WorkPtr(at::Tensor in, at::Tensor out)>& f) {
    c10::Event before(c10::DeviceType::PrivateUse1);
    before.record(Impl().getStream(device_));
    before.block(stream_);
    const at::Tensor in = OnHost(input), out = OnHost(output);
    testdevice::Launch(
        stream_, what,
        {{input.const_data_ptr(), static_cast<int64_t>(input.nbytes()), false},
         {output.const_data_ptr(), static_cast<int64_t>(output.nbytes()),
          true}},
        [f, in, out] { f(in, out)->wait(); });
    return c10::make_intrusive<OnStream>(
        stream_, std::vector<at::Tensor>{input, output});
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const at::Device device_;
  const c10::Stream stream_;
};

}  // namespace tessera
#endif  // TESTS_COMM_DEVICE_GLOO_H_
