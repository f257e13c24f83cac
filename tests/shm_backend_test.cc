// The c10d backend "shm": what conformance_test does not show.
#include "comm/shm_backend.h"

#include <unistd.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/shm/arena.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rank_pool.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/FileStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// `path`: of a file to meet by, of this call alone.
absl::StatusOr<BackendPtr> Make(const World& world, absl::string_view path,
                                absl::Duration timeout = absl::Seconds(30)) {
  GroupOptions options;
  options.rank = world.rank();
  options.world_size = world.world_size();
  options.collective_timeout = timeout;
  return MakeShmBackend(c10::make_intrusive<c10d::FileStore>(
                            std::string(path), world.world_size()),
                        options);
}

std::string WordsOf(const c10::intrusive_ptr<c10d::Work>& work) {
  try {
    work->wait();
    return "";
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
}

// A new file's path for each test.
std::string Path(const std::string& name) {
  return absl::StrCat(testing::TempDir(), "/shm_backend.", name);
}

void ExpectAll(RankPool* pool, const char* function, const std::string& want) {
  for (const auto& answer : pool->Run(function, Path(function))) {
    EXPECT_THAT(answer, IsOkAndHolds(want));
  }
}

TESSERA_RANK_FUNCTION(ThroughAProcessGroup) {
  auto store = c10::make_intrusive<c10d::FileStore>(
      absl::StrCat(args, ".group"), world.world_size());
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend, Make(world, args));
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, world.rank(),
                                                       world.world_size());
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    backend);
  Tensors t{at::full({3}, world.rank() + 1.0)};
  group->allreduce(t)->wait();
  return absl::StrCat(t[0].sum().item<double>());
}

TEST(ShmBackend, ThroughAProcessGroup) {
  ExpectAll(RankPool::Get(2), "ThroughAProcessGroup", "9");
}

// Results of one are read by the next, without a wait between them.
TESSERA_RANK_FUNCTION(ManyInFlight) {
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend, Make(world, args));
  Tensors t{at::ones({1000})};
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 0; i < 20; ++i) {
    works.push_back(backend->allreduce(t));
    works.push_back(backend->broadcast(t));
  }
  works.back()->wait();
  for (const auto& work : works) {
    if (!work->isSuccess()) return absl::InternalError("not in order");
  }
  return absl::StrCat(t[0][999].item<int64_t>());
}

TEST(ShmBackend, ManyInFlight) {
  ExpectAll(RankPool::Get(2), "ManyInFlight", "1048576");
}

TESSERA_RANK_FUNCTION(Coalesced) {
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend, Make(world, args));
  const int other = 1 - world.rank();
  Tensors sum{at::ones({5})}, out{at::full({100'000}, 1.0 * world.rank())},
      in{at::empty({100'000})};
  backend->startCoalescing();
  backend->send(out, other, 0);
  backend->allreduce(sum);
  backend->recv(in, other, 0);
  auto work = backend->endCoalescing();
  work->wait();
  const bool told = work->getFuture()->completed();
  return absl::StrCat(sum[0].sum().item<double>(), " ",
                      (in[0] == other).all().item<bool>(), " ", told, " ",
                      work->result().size());
}

TEST(ShmBackend, Coalesced) {
  ExpectAll(RankPool::Get(2), "Coalesced", "10 1 1 3");
}

TESSERA_RANK_FUNCTION(AllocatesWhereAllRead) {
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend, Make(world, args));
  TESSERA_ASSIGN_OR_RETURN(shm::Arena* const arena, shm::Arena::Get());
  const at::Tensor small =
      backend->allocateTensor(3, at::TensorOptions().dtype(at::kBFloat16));
  const at::Tensor plain = at::empty({3});
  return absl::StrCat(arena->Owns(small.data_ptr()),
                      arena->Owns(plain.data_ptr()), small.numel(),
                      small.dtype() == at::kBFloat16,
                      backend->supportsTensorAlloc(0));
}

TEST(ShmBackend, AllocatesWhereAllRead) {
  ExpectAll(RankPool::Get(2), "AllocatesWhereAllRead", "10311");
}

TESSERA_RANK_FUNCTION(OtherCollectives) {
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend, Make(world, args));
  Tensors t{at::ones({5})};
  return WordsOf(world.rank() == 0 ? backend->allreduce(t)
                                   : backend->broadcast(t));
}

TEST(ShmBackend, RanksInOtherCollectivesAreToldSo) {
  for (const auto& answer :
       RankPool::Get(2)->Run("OtherCollectives", Path("OtherCollectives"))) {
    TESSERA_ASSERT_OK(answer.status());
    EXPECT_THAT(*answer,
                (AllOf(HasSubstr("the ranks are in different collectives"),
                       HasSubstr("all-reduce"), HasSubstr("broadcast"),
                       HasSubstr("rank 1"))));
  }
}

TESSERA_RANK_FUNCTION(BadArguments) {
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend, Make(world, args));
  std::string words;
  auto expect_throw = [&](const std::function<void()>& call) {
    try {
      call();
      words += "nothing thrown\n";
    } catch (const c10::Error& error) {
      words += std::string(error.what_without_backtrace()) + "\n";
    }
  };
  Tensors one{at::ones({5})}, two{one[0], one[0]}, other{at::ones({4})};
  c10d::AllreduceOptions band;
  band.reduceOp = c10d::ReduceOp::BAND;
  c10d::BroadcastOptions root;
  root.rootRank = 7;
  std::vector<Tensors> lists{{one[0], other[0]}};
  expect_throw([&] { backend->allreduce(two); });
  expect_throw([&] { backend->allreduce(one, band); });
  expect_throw([&] { backend->broadcast(one, root); });
  expect_throw([&] { backend->allgather(lists, one); });
  expect_throw([&] { backend->send(one, 2, 0); });
  expect_throw([&] { backend->_allgather_base(other[0], one[0]); });
  at::Tensor whole = at::ones({10});
  at::Tensor overlapping = whole.narrow(0, 2, 5);
  expect_throw([&] { backend->_allgather_base(whole, overlapping); });
  expect_throw([&] { backend->allocateTensor(int64_t{1} << 62, at::kFloat); });
  // And it goes on.
  backend->allreduce(one)->wait();
  return words + absl::StrCat(one[0].sum().item<double>());
}

TEST(ShmBackend, BadArguments) {
  ExpectAll(RankPool::Get(2), "BadArguments",
            "shm all-reduce: expected 1 tensors, got 2\n"
            "shm all-reduce: expected SUM, AVG, MIN, MAX or PRODUCT\n"
            "shm broadcast: expected a root of 0 to 1, got 7\n"
            "shm all-gather: expected 5 elements of Float, got 4 of Float\n"
            "shm send: expected a rank of 0 to 1, got 2\n"
            "shm all-gather: expected 10 elements of Float, got 4 of Float\n"
            "shm all-gather: an input and an output overlap, other than as "
            "this rank's own part\n"
            "shm allocateTensor: expected a size of 0 or more, got "
            "4611686018427387904\n"
            "10");
}

TESSERA_RANK_FUNCTION(OtherDtypes) {
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend, Make(world, args));
  Tensors t{world.rank() == 0 ? at::ones({5}, at::kInt) : at::ones({5})};
  return WordsOf(backend->broadcast(t));
}

TEST(ShmBackend, SoAreRanksWithOtherDtypes) {
  for (const auto& answer :
       RankPool::Get(2)->Run("OtherDtypes", Path("OtherDtypes"))) {
    TESSERA_ASSERT_OK(answer.status());
    EXPECT_THAT(*answer,
                AllOf(HasSubstr("int32"), HasSubstr("float32"),
                      HasSubstr("the ranks are in different collectives")));
  }
}

// Lazily conjugated and negated tensors are what they say.
TESSERA_RANK_FUNCTION(LazyTensors) {
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend, Make(world, args));
  const at::Tensor one =
      at::complex(at::ones({3}), at::full({3}, 1.0 + world.rank()));
  Tensors in{at::conj(one)};
  std::vector<Tensors> out{{at::empty_like(one), at::conj(one.clone())}};
  backend->allgather(out, in)->wait();
  std::string sums;
  for (const at::Tensor& t : out[0]) {
    absl::StrAppend(&sums, at::imag(t.resolve_conj()).sum().item<int64_t>(),
                    " ");
  }
  return sums;
}

TEST(ShmBackend, LazyTensors) {
  ExpectAll(RankPool::Get(2), "LazyTensors", "-3 -6 ");
}

// What was begun by all ends well when one closes its backend; what this one
// does not come to any more ends soon.
TESSERA_RANK_FUNCTION(OneCloses) {
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend,
                           Make(world, args, absl::Seconds(600)));
  Tensors t{at::ones({100'000})};
  auto begun = backend->allreduce(t);
  if (world.rank() == 0) {
    backend->shutdown();
    const std::string words = WordsOf(backend->barrier());
    backend = nullptr;
    return absl::StrCat(begun->isSuccess(), " ", words);
  }
  const std::string words = WordsOf(begun);
  return absl::StrCat(words.empty(), " ", WordsOf(backend->barrier()));
}

TEST(ShmBackend, ARankThatClosesIt) {
  const auto answers = RankPool::Get(2)->Run("OneCloses", Path("OneCloses"));
  EXPECT_THAT(answers[0], IsOkAndHolds("1 the group was shut down"));
  EXPECT_THAT(answers[1],
              IsOkAndHolds(AllOf(HasSubstr("1 "), HasSubstr("rank 0 has ended "
                                                            "(it has left"))));
}

// A callback may hold the last reference, and may throw. Rank 0 has them; its
// operations end when rank 1 comes, which is after they were added.
TESSERA_RANK_FUNCTION(CallbacksOfAllKinds) {
  for (bool message : {false, true}) {
    TESSERA_ASSIGN_OR_RETURN(BackendPtr backend,
                             Make(world, absl::StrCat(args, ".", message)));
    Tensors t{at::ones({5})};
    if (world.rank() == 1) {
      TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("callbacks"));
      (message ? backend->send(t, 0, 0) : backend->allreduce(t))->wait();
      TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("through"));
      continue;
    }
    auto work = message ? backend->recv(t, 1, 0) : backend->allreduce(t);
    auto holder = std::make_shared<BackendPtr>(std::move(backend));
    work->getFuture()->addCallback([holder](c10::ivalue::Future&) {
      *holder = nullptr;
      throw std::runtime_error("of the user");
    });
    TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("callbacks"));
    work->wait();
    if (!work->getFuture()->completed()) return "not complete";
    TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("through"));
  }
  return "alive";
}

TEST(ShmBackend, CallbacksMayDropItAndThrow) {
  ExpectAll(RankPool::Get(2), "CallbacksOfAllKinds", "alive");
}

// Rank 1 ends while rank 0 waits for its message.
TESSERA_RANK_FUNCTION(PeerEnds) {
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend, Make(world, args));
  backend->barrier()->wait();
  if (world.rank() == 1) _exit(0);
  Tensors t{at::ones({5})};
  return WordsOf(backend->recv(t, 1, 0));
}

TEST(ShmBackend, AMessageFromARankThatEnds) {
  RankPool pool(RankPoolOptions{});
  const auto answers = pool.Run("PeerEnds", Path("PeerEnds"));
  EXPECT_THAT(answers[0], IsOkAndHolds(HasSubstr("rank 1 has ended")));
}

TESSERA_RANK_FUNCTION(NobodyComes) {
  TESSERA_ASSIGN_OR_RETURN(BackendPtr backend,
                           Make(world, args, absl::Seconds(1)));
  if (world.rank() == 1) {
    // Until rank 0 has given up.
    TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("given up"));
    return "";
  }
  const std::string words = WordsOf(backend->barrier());
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("given up"));
  return words;
}

TEST(ShmBackend, ACollectiveThatNobodyComesTo) {
  const auto answers =
      RankPool::Get(2)->Run("NobodyComes", Path("NobodyComes"));
  EXPECT_THAT(answers[0],
              IsOkAndHolds(AllOf(HasSubstr("barrier #1"),
                                 HasSubstr("has not ended within 1s"),
                                 HasSubstr("rank 1 has not come"))));
}

}  // namespace
}  // namespace tessera
