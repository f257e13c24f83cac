// How the backends of groups on a device end: at Shutdown, with their groups,
// and after a failure.
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/device/open_backend.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/comm/endless_backend.h"
#include "tests/support/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using testdevice::TestDevice;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

using BackendPtr = c10::intrusive_ptr<EndlessBackend>;

BackendPtr Make(const World& world) {
  return c10::make_intrusive<EndlessBackend>(world, /*can_be_aborted=*/true);
}

std::string TextOf(const BackendCalls& calls) {
  return absl::StrCat(calls.aborts.load(), " aborts, ", calls.shutdowns.load(),
                      " shutdowns, ", calls.destroyed.load(), " destroyed");
}

// args: what shutdown() of the first of two backends does: "", "blocks" or
// "throws". Calls Shutdown, and ends the process with what was called until
// then in its last line.
TESSERA_RANK_FUNCTION(ShutsDown) {
  PrepareDevice("once");
  BackendPtr first = Make(world), second = Make(world);
  const auto calls = first->calls(), later = second->calls();
  first->SetAtShutdown([args = std::string(args)] {
    while (args == "blocks") pause();
    if (args == "throws") throw std::runtime_error("no way");
  });
  second->SetAtShutdown([calls] {
    if (calls->shutdowns == 0) throw std::runtime_error("before the first");
  });
  const absl::Duration patience =
      args == "blocks" ? absl::Milliseconds(200) : absl::Seconds(15);
  TESSERA_ASSIGN_OR_RETURN(
      const auto a, ConnectDevices(world, {}, std::move(first), patience));
  TESSERA_ASSIGN_OR_RETURN(
      const auto b, ConnectDevices(world, {}, std::move(second), patience));
  TESSERA_RETURN_IF_ERROR(a->AgreeOk(absl::OkStatus(), "before the end"));
  Shutdown();
  fprintf(stderr, "first: %s; second: %s.\n", TextOf(*calls).c_str(),
          TextOf(*later).c_str());
  fflush(stderr);
  _exit(3);
}

RankPool::Answers ShutDown(const std::string& how) {
  RankPool pool(TwoRanks(absl::Seconds(40)));
  return pool.Run("ShutsDown", how, absl::Seconds(20));
}

constexpr char kClosed[] = "second: 0 aborts, 1 shutdowns, 1 destroyed.";

TEST(DeviceEndTest, ShutdownClosesBackendsOnceAndInOrder) {
  EXPECT_THAT(ShutDown(""),
              Each(StatusIs(
                  absl::StatusCode::kUnavailable,
                  AllOf(HasSubstr("first: 0 aborts, 1 shutdowns, 1 destroyed;"),
                        HasSubstr(kClosed), Not(HasSubstr("closed within"))))));
}

TEST(DeviceEndTest, ABackendThatDoesNotCloseIsLeft) {
  EXPECT_THAT(
      ShutDown("blocks"),
      Each(StatusIs(
          absl::StatusCode::kUnavailable,
          AllOf(HasSubstr("device of rank "), HasSubstr(" of 2 on "),
                HasSubstr("has not been closed within 200ms"),
                HasSubstr("first: 0 aborts, 1 shutdowns, 0 destroyed;")))));
}

TEST(DeviceEndTest, ABackendThatCannotBeClosedIsLeft) {
  EXPECT_THAT(ShutDown("throws"),
              Each(StatusIs(
                  absl::StatusCode::kUnavailable,
                  AllOf(HasSubstr("could not be closed: "), HasSubstr("no way"),
                        HasSubstr("first: 0 aborts, 1 shutdowns, 0 destroyed;"),
                        HasSubstr(kClosed)))));
}

// Nobody waits for the end of a group's backend that blocks.
TESSERA_RANK_FUNCTION(DropsAGroup) {
  PrepareDevice("once");
  BackendPtr backend = Make(world);
  const auto calls = backend->calls();
  const auto entered = std::make_shared<absl::Notification>();
  const auto goes_on = std::make_shared<absl::Notification>();
  backend->SetAtShutdown([entered, goes_on] {
    entered->Notify();
    goes_on->WaitForNotification();
  });
  TESSERA_ASSIGN_OR_RETURN(auto comm,
                           ConnectDevices(world, {}, std::move(backend)));
  comm = nullptr;
  entered->WaitForNotification();
  const std::string meanwhile = TextOf(*calls);
  goes_on->Notify();
  CloseOpenBackends();
  return absl::StrCat(meanwhile, ", then ", TextOf(*calls));
}

TEST(DeviceEndTest, AGroupsEndClosesItsBackend) {
  EXPECT_THAT(RankPool::Get(2)->Run("DropsAGroup", "", absl::Seconds(20)),
              Each(IsOkAndHolds("0 aborts, 1 shutdowns, 0 destroyed, then 0 "
                                "aborts, 1 shutdowns, 1 destroyed")));
}

// A sum of which the second of two parts cannot be given to the device, while a
// gather of another group goes on for ever there. An abort ends when all others
// have begun.
TESSERA_RANK_FUNCTION(FailsHalfway) {
  PrepareDevice("once");
  const BackendPtr gathers = Make(world), sums = Make(world),
                   sibling = Make(world);
  for (const BackendPtr& backend : {gathers, sums, sibling}) {
    backend->SetAtAbort(
        [a = gathers->calls(), b = sums->calls(), c = sibling->calls()] {
          for (const auto& calls : {a, b, c})
            calls->aborted.WaitForNotification();
        });
  }
  DeviceTransportOptions options;
  options.slices_bytes = 400;
  TESSERA_ASSIGN_OR_RETURN(
      const auto comm,
      ConnectDevices(world, options, gathers, absl::Seconds(15), sums));
  TESSERA_ASSIGN_OR_RETURN(const auto other,
                           ConnectDevices(world, {}, sibling));
  const auto on = torch::TensorOptions(TestDevice(kDevice));
  at::Tensor whole = torch::zeros({world.world_size()}, on);
  TESSERA_RETURN_IF_ERROR(
      other->AllGather(torch::ones({1}, on), whole, {"unit b"}).Wait());
  const absl::Status status =
      comm->ReduceScatterSum(torch::ones({world.world_size() * 100}, on),
                             torch::zeros({100}, on), {"unit a"})
          .Wait();
  return absl::StrCat("failed: ", TextOf(*sums->calls()),
                      ", gathers: ", TextOf(*gathers->calls()),
                      ", sibling: ", TextOf(*sibling->calls()), ": ",
                      status.ToString());
}

TEST(DeviceEndTest, WhatFailsHalfwayIsAbortedWithAllOfItsDomain) {
  RankPool pool(TwoRanks(absl::Seconds(40)));
  EXPECT_THAT(pool.Run("FailsHalfway", "", absl::Seconds(20)),
              Each(IsOkAndHolds(AllOf(
                  HasSubstr("failed: 1 aborts, 0 shutdowns, 0 destroyed"),
                  HasSubstr("gathers: 1 aborts, 0 shutdowns, 0 destroyed"),
                  HasSubstr("sibling: 1 aborts, 0 shutdowns, 0 destroyed"),
                  HasSubstr("no more of it")))));
}

// The ranks are in different collectives: nothing was given to the device, and
// another rank might never come to a shutdown().
TESSERA_RANK_FUNCTION(FailsOnTheHost) {
  PrepareDevice("once");
  BackendPtr backend = Make(world);
  const auto calls = backend->calls();
  TESSERA_ASSIGN_OR_RETURN(auto comm,
                           ConnectDevices(world, {}, std::move(backend)));
  const auto on = torch::TensorOptions(TestDevice(kDevice));
  at::Tensor whole = torch::zeros({world.world_size()}, on);
  const absl::Status status =
      comm->AllGather(torch::ones({1}, on), whole,
                      {world.rank() == 0 ? "unit a" : "unit b"})
          .Wait();
  comm = nullptr;
  CloseOpenBackends();
  return absl::StrCat(TextOf(*calls), status.ok() ? "" : ", failed");
}

TEST(DeviceEndTest, TheEndOfAGroupThatHasFailedIsAnAbort) {
  RankPool pool(TwoRanks(absl::Seconds(40)));
  EXPECT_THAT(pool.Run("FailsOnTheHost", "", absl::Seconds(20)),
              Each(IsOkAndHolds("1 aborts, 0 shutdowns, 0 destroyed, failed")));
}

}  // namespace
}  // namespace tessera
