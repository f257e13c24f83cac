#include "comm/serve/shard_watch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "comm/record/hang_dump.h"

namespace tessera {
namespace {

// A wait is looked at from here on.
constexpr absl::Duration kFirstLook = absl::Milliseconds(100);
// What a dead rank had sent may still arrive; and why it closed its end may
// come later than that.
constexpr absl::Duration kEndedGrace = absl::Milliseconds(300);
// Between two questions to the store: many ranks ask.
constexpr absl::Duration kReadInterval = absl::Milliseconds(400);

absl::Duration Tick(const GroupOptions& options) {
  return std::min(
      {kFirstLook, options.collective_timeout / 8,
       std::max(options.announce_grace / 4, absl::Milliseconds(20))});
}

}  // namespace

ShardWatch::ShardWatch(const GroupOptions& options,
                       std::shared_ptr<FailureDomain> domain)
    : options_(options),
      domain_(std::move(domain)),
      tick_(Tick(options)),
      progress_(&domain_->board()) {}

absl::Status ShardWatch::Judge(
    const std::vector<std::optional<AwaitedShard>>& awaited) {
  const AwaitedShard* oldest = nullptr;
  for (const auto& shard : awaited) {
    if (!shard.has_value()) continue;
    if (oldest == nullptr || shard->begin < oldest->begin) oldest = &*shard;
  }
  if (oldest == nullptr) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(domain_->failure()->Get());
  TESSERA_RETURN_IF_ERROR(JudgeEnded(*oldest));
  TESSERA_RETURN_IF_ERROR(JudgeClosed(awaited));
  TESSERA_RETURN_IF_ERROR(JudgeAnnouncements(*oldest));
  return JudgeTime(awaited);
}

absl::Status ShardWatch::SaidOr(const absl::Status& otherwise) const {
  const std::vector<Announcement> said = domain_->board().Read();
  return said.empty() ? otherwise : said.front().status;
}

bool ShardWatch::IsMember(int first_rank) const {
  for (int r = 0; r < options_.world_size; ++r) {
    if (options_.first_rank(r) == first_rank) return true;
  }
  return false;
}

absl::Status ShardWatch::JudgeEnded(const AwaitedShard& oldest) const {
  for (const EndedRank& ended : domain_->board().liveness().Ended()) {
    // One that left is missed only by who waits for it: JudgeClosed.
    if (ended.left) continue;
    const absl::Duration since = std::max(ended.since, oldest.begin);
    if (MonotonicNow() - since < kEndedGrace) continue;
    return SaidOr(Annotate(HasEnded(ended.rank, ended.left), oldest.what));
  }
  return absl::OkStatus();
}

absl::Status ShardWatch::JudgeClosed(
    const std::vector<std::optional<AwaitedShard>>& awaited) const {
  for (int r = 0; r < options_.world_size; ++r) {
    if (!awaited[r].has_value() || !awaited[r]->closed.has_value()) continue;
    const absl::Duration since =
        std::max(*awaited[r]->closed, awaited[r]->begin);
    if (MonotonicNow() - since < kEndedGrace) continue;
    const int rank = options_.first_rank(r);
    absl::Status end = domain_->EndOf(rank);
    if (end.ok()) {
      end = absl::UnavailableError(absl::StrCat(
          "rank ", rank,
          " serves its shards no more; look at that rank's own last words"));
    }
    return SaidOr(Annotate(end, awaited[r]->what));
  }
  return absl::OkStatus();
}

absl::Status ShardWatch::JudgeAnnouncements(const AwaitedShard& oldest) {
  const absl::Duration now = MonotonicNow();
  if (now - oldest.begin < std::min(kFirstLook, tick_) || now < read_at_) {
    return absl::OkStatus();
  }
  const int first_world = domain_->board().world_size();
  read_at_ =
      now +
      std::min({std::max(kReadInterval, first_world * absl::Milliseconds(2)),
                options_.announce_grace / 4, options_.collective_timeout / 8});
  const std::optional<AnnouncementSnapshot> board =
      domain_->board().ReadSnapshot();
  if (!board.has_value()) return absl::OkStatus();
  progress_.Learn(*board);
  std::map<std::pair<int, int64_t>, absl::Duration> standing;
  for (const Announcement& said : board->said) {
    const std::pair<int, int64_t> key(said.rank, said.count);
    const auto seen = seen_.find(key);
    const absl::Duration first = seen == seen_.end() ? now : seen->second;
    standing.emplace(key, first);
    // It may stand long in an agreement of others, which tells them orderly.
    const std::optional<WaitingIn>& at = board->waiting[said.rank];
    const bool will_tell =
        !IsMember(said.rank) && at.has_value() && !at->finished;
    const absl::Duration since = std::max(first, oldest.begin);
    if (said.final || (now - since >= options_.announce_grace && !will_tell)) {
      return said.status;
    }
  }
  seen_ = std::move(standing);
  return absl::OkStatus();
}

absl::Status ShardWatch::JudgeTime(
    const std::vector<std::optional<AwaitedShard>>& awaited) const {
  const absl::Duration now = MonotonicNow();
  const int own = domain_->board().rank();
  std::vector<std::string> words;
  std::string what;
  for (int r = 0; r < options_.world_size; ++r) {
    if (!awaited[r].has_value() ||
        now - awaited[r]->begin < options_.collective_timeout) {
      continue;
    }
    if (what.empty()) what = awaited[r]->what;
    const int rank = options_.first_rank(r);
    const std::string shard = absl::StrCat("shard ", awaited[r]->key,
                                           " of version ", awaited[r]->version);
    words.push_back(
        rank == own
            ? absl::StrCat("this rank, ", rank, ", has itself no ", shard)
            : absl::StrCat("rank ", rank, " has not sent its ", shard, " (",
                           progress_.Of(rank), ")"));
  }
  if (words.empty()) return absl::OkStatus();
  return WithHangDump(
      own, absl::DeadlineExceededError(
               absl::StrCat(what, " has not ended within ",
                            absl::FormatDuration(options_.collective_timeout),
                            ": ", absl::StrJoin(words, "; "))));
}

}  // namespace tessera
