#include "comm/watched_communicator.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/torch_guard.h"

namespace tessera {
namespace {

// How long ranks in different collectives wait for one to say why.
constexpr absl::Duration kCauseWait = absl::Milliseconds(300);

}  // namespace

WatchedCommunicator::WatchedCommunicator(const GroupOptions& options,
                                         std::unique_ptr<Announcements> board,
                                         std::function<void()> abort,
                                         CommThread* thread)
    : QueuedCommunicator(options.rank, options.world_size, thread),
      board_(std::move(board)),
      monitor_(board_.get(),
               {options.collective_timeout, options.announce_grace},
               std::move(abort)) {}

absl::Status WatchedCommunicator::EndOf(int peer) const {
  for (const EndedRank& ended : board_->lifeline().Ended()) {
    if (ended.rank != peer) continue;
    return absl::UnavailableError(absl::StrCat(
        "rank ", peer, " has ended (",
        ended.left ? "it has left this group" : "its process is gone",
        "); look at that rank's own last words"));
  }
  return absl::OkStatus();
}

absl::Status WatchedCommunicator::Watched(
    const Call& call, const std::function<absl::Status()>& body) {
  monitor_.Begin({call.sequence, call.signature, call.what, call.details});
  absl::Status status = CatchTorch(std::string(backend()).c_str(), body);
  if (absl::IsFailedPrecondition(status)) {
    status = WithTheCause(status);
  } else if (!status.ok()) {
    status = Annotate(status, call.what);
  }
  return monitor_.End(status);
}

absl::Status WatchedCommunicator::WithTheCause(const absl::Status& mismatch) {
  const absl::Time until = absl::Now() + kCauseWait;
  do {
    const std::vector<Announcement> said = board_->Read();
    if (!said.empty()) return said.front().status;
    if (board_->speaking()) return board_->words();
    absl::SleepFor(absl::Milliseconds(10));
  } while (absl::Now() < until);
  return mismatch;
}

}  // namespace tessera
