// Ranks that call different collectives, end, or give up: what the others are
// told.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/reduce/reduce.h"
#include "comm/shm/collectives.h"
#include "comm/shm/shm_testing.h"
#include "comm/shm/team.h"

namespace tessera::shm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// ---- ranks that differ

TEST(CollectivesMismatch, IsToldToAllAtOnce) {
  for (int kind = 0; kind < 4; ++kind) {
    Host host(3);
    const auto results = host.Run([&](int r, Collectives& c) {
      std::vector<float> data(64);
      const bool other = r == 1;
      const auto f = ElementType::kFloat32;
      if (other && kind == 0) return c.Barrier("gradient of b");
      return c.AllReduce(other && kind == 1 ? "gradient of b" : "gradient of a",
                         other && kind == 2 ? ElementType::kInt32 : f,
                         data.data(), other && kind == 3 ? 63 : 64);
    });
    const std::vector<std::string> words = {
        "barrier 'gradient of b'", "gradient of b", "64 int32", "63 float32"};
    for (const absl::Status& status : results) {
      EXPECT_THAT(
          status,
          StatusIs(absl::StatusCode::kFailedPrecondition,
                   AllOf(HasSubstr("different collectives"),
                         HasSubstr("gradient of a': 64 float32, sum #1"),
                         HasSubstr(words[kind]), HasSubstr("rank"),
                         HasSubstr("see Engine::AnyRankHasData"))));
    }
  }
}

// A call that rank 1 makes alone has nothing to do with batches.
TEST(CollectivesMismatch, OfACallThatOneRankMakesAlone) {
  Host host(2);
  const auto results = host.Run([&](int r, Collectives& c) {
    return c.Barrier(r == 1 ? "SetLearningRate" : "gradient of a");
  });
  for (const absl::Status& status : results) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                 AllOf(HasSubstr("barrier 'SetLearningRate'"),
                                       HasSubstr("that a rank makes alone"),
                                       Not(HasSubstr("AnyRankHasData")))));
  }
}

// Rank 2 comes when rank 0 has said that it sleeps for it.
TEST(TeamTest, SaysForWhomItSleeps) {
  Host host(3);
  std::atomic<int> awaited{-1};
  host.team(0).SetOnSleep([&](int peer) { awaited = peer; });
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  const auto results = host.Run([&](int r, Collectives& c) {
    while (r == 2 && awaited != 2 && absl::Now() < deadline) {
      std::this_thread::yield();
    }
    return c.Barrier("last");
  });
  EXPECT_EQ(awaited, 2);
  for (const absl::Status& status : results) TESSERA_EXPECT_OK(status);
}

// ---- ranks that go

// Asked of each rank that is slept for.
void SetGone(Host* host, int rank, const std::atomic<bool>* gone) {
  for (int p = 0; p < host->size(); ++p) {
    host->team(p).SetGone([rank, gone](int peer) -> absl::Status {
      if (peer != rank || !*gone) return absl::OkStatus();
      return absl::UnavailableError("rank 1 has ended");
    });
  }
}

TEST(CollectivesGone, EndTheWaitsOfTheOthers) {
  Host host(2);
  std::atomic<bool> gone{false};
  SetGone(&host, 1, &gone);
  const auto results = host.Run([&](int r, Collectives& c) -> absl::Status {
    TESSERA_RETURN_IF_ERROR(c.Barrier("first"));
    if (r == 1) gone = true;
    return r == 1 ? absl::OkStatus() : c.Barrier("second");
  });
  EXPECT_EQ(results[0], absl::UnavailableError("rank 1 has ended"));
}

// Rank 1 has done what is its own: the others finish theirs, whatever became of
// it.
TEST(CollectivesGone, AfterTheLastCollectiveHarmNobody) {
  for (int round = 0; round < 50; ++round) {
    Host host(3);
    std::atomic<bool> gone{false};
    SetGone(&host, 1, &gone);
    const auto results = host.Run([&](int r, Collectives& c) {
      std::vector<std::string> texts;
      const absl::Status status = c.AllGatherTexts("last", "text", &texts);
      if (r == 1) gone = true;
      return status;
    });
    for (const absl::Status& status : results) TESSERA_EXPECT_OK(status);
  }
}

// Parts go where nobody expects them, or are expected of nobody.
TEST(CollectivesParts, ThatDoNotMatchAreAnErrorAtOnce) {
  for (const bool sent : {true, false}) {
    Host host(2);
    const auto results = host.Run([&](int r, Collectives& c) {
      std::vector<const char*> in(2);
      std::vector<char*> out(2);
      if (sent) in[1 - r] = host.heap(r);
      if (!sent) out[1 - r] = host.heap(r);
      return c.MoveParts("unit a", CollectiveOp::kSendReceive, in, out, 64);
    });
    EXPECT_THAT(
        results[1],
        StatusIs(absl::StatusCode::kFailedPrecondition,
                 sent
                     ? "unit a: rank 0 sends 64 bytes to rank 1, which expects "
                       "0"
                     : "unit a: rank 0 sends 0 bytes to rank 1, which expects "
                       "64"));
  }
}

// Rank 0 gives up while rank 1 reads its memory, which rank 0's caller may then
// write to.
TEST(CollectivesGone, WhatItsOwnerGaveUpIsNotAResult) {
  Host host(2);
  std::atomic<bool> reads{false}, gave_up{false};
  const auto results = host.Run([&](int r, Collectives& c) {
    Exchange& exchange = c.exchange();
    Collective call =
        Exchange::New(CollectiveOp::kAllGather, "", ElementType::kUInt8, 64);
    exchange.SetRows(&call, host.heap(r), {64});
    call.read = [&, r](const Window&) {
      if (r == 1) {
        reads = true;
        while (!gave_up) std::this_thread::yield();
      } else {
        while (!reads) std::this_thread::yield();
        host.team(0).Abort(absl::CancelledError("enough"));
      }
      return absl::OkStatus();
    };
    const absl::Status status = exchange.Run(&call);
    if (r == 0) gave_up = true;
    return status;
  });
  EXPECT_EQ(results[0], absl::CancelledError("enough"));
  EXPECT_THAT(results[1],
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("rank 0 has given this collective up")));
}

TEST(CollectivesGone, AnAbortEndsAWait) {
  Host host(2);
  std::thread aborter([&] {
    // Sleeping, not spinning.
    while (host.team(0).mine().door.sleeping == 0) std::this_thread::yield();
    host.team(0).Abort(absl::CancelledError("enough"));
  });
  EXPECT_EQ(host.rank(0).Barrier("alone"), absl::CancelledError("enough"));
  aborter.join();
}

}  // namespace
}  // namespace tessera::shm
