// Collectives whose tensors come from elsewhere: CommTag::ready on one rank of
// two.
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/comm_promise.h"
#include "comm/comm_thread.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/comm/collective_checks.h"
#include "tests/support/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Each collective, of tensors that rank 1 has only once `ready` is called.
TESSERA_RANK_FUNCTION(TensorsComeLate) {
  Communicator& comm = *world.communicator();
  const at::Tensor mine = torch::zeros({1000});
  const at::Tensor all = torch::full({2000}, -1.f);
  const auto ready = [&]() -> absl::Status {
    if (!CommThread::IsCurrent()) return absl::InternalError("thread");
    if (all.ne(-1).any().item<bool>()) return absl::InternalError("began");
    mine.fill_(7);
    return absl::OkStatus();
  };
  const auto tag = [&] {
    mine.fill_(world.rank() == 0 ? 5 : 0);
    all.fill_(-1);
    CommTag tag{"publish of unit a"};
    if (world.rank() == 1) tag.ready = ready;
    return tag;
  };
  const at::Tensor parts =
      torch::cat({torch::full({1000}, 5.f), torch::full({1000}, 7.f)});
  TESSERA_RETURN_IF_ERROR(comm.AllGather(mine, all, tag()).Wait());
  TESSERA_RETURN_IF_ERROR(ExpectBits(all, parts, "all-gather"));
  const CommFuture reduced = comm.AllReduceSum(mine, tag());
  TESSERA_RETURN_IF_ERROR(reduced.Wait());
  TESSERA_RETURN_IF_ERROR(
      ExpectBits(mine, torch::full({1000}, 12.f), "all-reduce"));
  const CommFuture sent = comm.Broadcast(mine, 1, tag());
  TESSERA_RETURN_IF_ERROR(sent.Wait());
  TESSERA_RETURN_IF_ERROR(
      ExpectBits(mine, torch::full({1000}, 7.f), "broadcast"));
  const at::Tensor half = torch::full({500}, -1.f);
  const CommFuture scattered = comm.ReduceScatterSum(mine, half, tag());
  TESSERA_RETURN_IF_ERROR(scattered.Wait());
  TESSERA_RETURN_IF_ERROR(
      ExpectBits(half, torch::full({500}, 12.f), "reduce-scatter"));
  return "ok";
}

TEST(ReadyTest, ACollectiveUsesItsTensorsWhenTheyAreReady) {
  EXPECT_THAT(RankPool::Get(2)->Run("TensorsComeLate", ""),
              Each(IsOkAndHolds("ok")));
}

// Rank 1's are there when a thread of its own says so; rank 0 waits for it.
TESSERA_RANK_FUNCTION(AnotherThreadMakesThemReady) {
  const at::Tensor tensor = torch::full({1000}, 5.f);
  if (world.rank() == 0) {
    TESSERA_RETURN_IF_ERROR(
        world.communicator()->AllReduceSum(tensor, {"sum"}).Wait());
  } else {
    CommPromise promise;
    CommTag tag{"sum"};
    tag.ready = [updated = promise.future()] { return updated.Wait(); };
    const CommFuture future =
        world.communicator()->AllReduceSum(tensor, std::move(tag));
    std::thread elsewhere([&] {
      tensor.fill_(7);
      promise.End(absl::OkStatus());
    });
    elsewhere.join();
    TESSERA_RETURN_IF_ERROR(future.Wait());
  }
  TESSERA_RETURN_IF_ERROR(ExpectBits(tensor, torch::full({1000}, 12.f), "sum"));
  return "ok";
}

TEST(ReadyTest, AnotherThreadMakesThemReady) {
  EXPECT_THAT(RankPool::Get(2)->Run("AnotherThreadMakesThemReady", ""),
              Each(IsOkAndHolds("ok")));
}

// Answers with the error, and changes nothing.
TESSERA_RANK_FUNCTION(Rank1HasNoTensor) {
  const at::Tensor tensor = torch::full({1000}, 5.f);
  CommTag tag{"sum"};
  if (world.rank() == 1) {
    tag.ready = [] { return absl::DataLossError("a disk"); };
  }
  const absl::Status status =
      world.communicator()->AllReduceSum(tensor, std::move(tag)).Wait();
  if (world.rank() == 1) {
    TESSERA_RETURN_IF_ERROR(ExpectBits(tensor, torch::full({1000}, 5.f), "it"));
  }
  const absl::Status later = world.communicator()->Barrier("later");
  if (later != status) return later;
  return status;
}

TEST(ReadyTest, AnErrorOfReadyIsTheCollectives) {
  const RankPool::Answers answers =
      RankPool::Get(2)->Run("Rank1HasNoTensor", "");
  EXPECT_THAT(answers[1],
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("a disk")));
  EXPECT_THAT(answers[0],
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("rank 1"), HasSubstr("a disk"))));
}

}  // namespace
}  // namespace tessera
