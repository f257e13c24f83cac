// Collectives whose tensors come from elsewhere (CommTag::ready), in a group of
// one; of two ranks: tests/comm/ready_test.cc.
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "base/status_matchers.h"
#include "comm/comm_promise.h"
#include "comm/communicator.h"
#include "comm/group/self_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/torch.h"

namespace tessera {
namespace {

class ReadyTest : public testing::Test {
 protected:
  std::shared_ptr<Communicator> comm_ = MakeSelfCommunicator();
};

CommTag WhenReady(std::function<absl::Status()> ready) {
  CommTag tag{"tag"};
  tag.ready = std::move(ready);
  return tag;
}

// In the call, on the thread of the caller.
TEST_F(ReadyTest, WaitsUntilTensorsAreReady) {
  const at::Tensor a = torch::zeros({4}), b = torch::full({4}, -1.f);
  const auto caller = std::this_thread::get_id();
  TESSERA_EXPECT_OK(comm_
                        ->AllGather(a, b, WhenReady([&] {
                                      EXPECT_EQ(std::this_thread::get_id(),
                                                caller);
                                      EXPECT_EQ(b.sum().item<float>(), -4);
                                      a.fill_(7);
                                      return absl::OkStatus();
                                    }))
                        .Wait());
  EXPECT_EQ(b.sum().item<float>(), 28);
  CommPromise promise;
  std::thread elsewhere([&] {
    a.fill_(8);
    promise.End(absl::OkStatus());
  });
  TESSERA_EXPECT_OK(comm_
                        ->ReduceScatterSum(a, b, WhenReady([&] {
                                             return promise.future().Wait();
                                           }))
                        .Wait());
  elsewhere.join();
  EXPECT_EQ(b.sum().item<float>(), 32);
}

TEST_F(ReadyTest, AnErrorOfReadyIsTheCollectives) {
  const at::Tensor a = torch::zeros({4}), b = torch::full({4}, -1.f);
  EXPECT_EQ(comm_
                ->AllGather(a, b, WhenReady([] {
                              return absl::DataLossError("a disk");
                            }))
                .Wait(),
            absl::DataLossError("a disk"));
  EXPECT_EQ(b.sum().item<float>(), -4);
  EXPECT_THAT(comm_->AllGather(a, b, {"later"}).Wait(),
              StatusIs(absl::StatusCode::kDataLoss));
}

}  // namespace
}  // namespace tessera
