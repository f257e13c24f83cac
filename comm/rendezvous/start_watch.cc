// Why `failure` stands in the store: the rank that first knows why the start
// cannot succeed (or the launcher, that saw a process end) is seldom the one
// that waits for it. The first reason holds, since later ones follow from it.
#include "comm/rendezvous/start_watch.h"

#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

constexpr char kFailure[] = "failure";
// A launcher sees the end of its process at once.
constexpr absl::Duration kNewsTime = absl::Milliseconds(300);
// Long enough for a rank that asks for news.
constexpr absl::Duration kFarewell = absl::Milliseconds(300);
constexpr absl::Duration kCountEvery = absl::Milliseconds(150);
constexpr absl::Duration kLookAgain = absl::Milliseconds(20);

std::string AliveKey(int rank) { return absl::StrCat("alive/", rank); }

}  // namespace

void PutFailure(c10d::Store& store, const absl::Status& status,
                bool hosts_store) {
  (void)CatchTorch(
      "store", [&] { store.compareSet(kFailure, "", StatusToText(status)); });
  if (hosts_store) absl::SleepFor(kFarewell);
}

absl::Status StartFailure(c10d::Store& store) {
  return CatchTorch(kStoreError, [&]() -> absl::Status {
    if (!store.check({kFailure})) return absl::OkStatus();
    return StatusFromText(store.get_to_str(kFailure));
  });
}

absl::Status WithStartFailure(const absl::Status& status, c10d::Store& store) {
  // The others are messages of our own, and identical on all ranks. A link may
  // have ended with a rank that ended because of another's end.
  if (!absl::IsInternal(status) && !absl::IsUnavailable(status)) return status;
  const Deadline until = Deadline::After(kNewsTime);
  do {
    const absl::Status cause = StartFailure(store);
    if (!cause.ok()) {
      // Nothing new: it came from there, or the rank that has gone, as is
      // known, had the store.
      if (absl::StrContains(status.message(), cause.message()) ||
          (absl::IsUnavailable(status) &&
           absl::StartsWith(cause.message(), kStoreError))) {
        return status;
      }
      return absl::Status(
          cause.code(),
          absl::StrCat(cause.message(), "; here: ", status.message()));
    }
    absl::SleepFor(kLookAgain);
  } while (!until.HasPassed());
  return status;
}

StartWatch::StartWatch(c10::intrusive_ptr<c10d::Store> store, int rank,
                       int world_size)
    : store_(std::move(store)), rank_(rank), world_size_(world_size) {}

absl::Status StartWatch::Look() {
  if (count_at_.HasPassed()) {
    count_at_ = Deadline::After(kCountEvery);
    // If that fails, so does the next question, which says it.
    (void)CatchTorch("store", [&] { store_->add(AliveKey(rank_), 1); });
  }
  return StartFailure(*store_);
}

absl::Status StartWatch::NoteCounts() {
  if (!noted_.empty()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(noted_,
                           CatchTorch(kStoreError, [&] { return Counts(); }));
  silence_ = Deadline::After(kSilence);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int>> StartWatch::SilentRanks() {
  TESSERA_RETURN_IF_ERROR(NoteCounts());
  while (!silence_.HasPassed()) {
    TESSERA_RETURN_IF_ERROR(Look());
    absl::SleepFor(kLookAgain);
  }
  TESSERA_ASSIGN_OR_RETURN(const std::vector<int64_t> after,
                           CatchTorch(kStoreError, [&] { return Counts(); }));
  std::vector<int> silent;
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_ && after[r] == noted_[r]) silent.push_back(r);
  }
  return silent;
}

std::vector<int64_t> StartWatch::Counts() {
  std::vector<int64_t> counts;
  for (int r = 0; r < world_size_; ++r) {
    counts.push_back(store_->add(AliveKey(r), 0));
  }
  return counts;
}

}  // namespace tessera
