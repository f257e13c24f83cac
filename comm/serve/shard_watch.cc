// Why pulls are judged at all, though a broken connection is seen at once: who
// serves may be stopped, may have failed and live on, or may never come to the
// version that is asked for. None of that breaks a connection.
#include "comm/serve/shard_watch.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "comm/record/hang_dump.h"
#include "comm/serve/shard_streams.h"

namespace tessera {
namespace {

std::vector<int> FirstRanks(const GroupOptions& options) {
  std::vector<int> ranks;
  for (int r = 0; r < options.world_size; ++r) {
    ranks.push_back(options.first_rank(r));
  }
  return ranks;
}

}  // namespace

ShardWatch::ShardWatch(const GroupOptions& options,
                       std::shared_ptr<FailureDomain> domain)
    : domain_(std::move(domain)),
      ranks_(FirstRanks(options)),
      judge_(&domain_->announcements(),
             {options.collective_timeout, options.announce_grace}) {}

absl::Status ShardWatch::Judge(const Awaited& awaited) {
  const AwaitedShard* oldest = nullptr;
  for (const auto& shard : awaited) {
    if (!shard.has_value()) continue;
    if (oldest == nullptr || shard->begin < oldest->begin) oldest = &*shard;
  }
  if (oldest == nullptr) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(domain_->failure()->Get());
  const WaitJudge::Wait wait{oldest->what, oldest->begin, &ranks_,
                             /*collective=*/nullptr};
  TESSERA_RETURN_IF_ERROR(judge_.JudgeEnded(wait));
  TESSERA_RETURN_IF_ERROR(JudgeClosed(awaited));
  TESSERA_RETURN_IF_ERROR(judge_.JudgeAnnouncements(wait));
  return JudgeTime(awaited);
}

// One that left in an orderly way is missed only by who waits for it.
absl::Status ShardWatch::JudgeClosed(const Awaited& awaited) const {
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (!awaited[r].has_value() || !awaited[r]->closed.has_value() ||
        !judge_.EndedGraceIsOver(*awaited[r]->closed, awaited[r]->begin)) {
      continue;
    }
    absl::Status end = domain_->EndOf(ranks_[r]);
    if (end.ok()) {
      end = absl::UnavailableError(absl::StrCat(
          "rank ", ranks_[r],
          " no longer serves its shards; look at that rank's own last "
          "lines"));
    }
    return judge_.PostedOr(Annotate(end, awaited[r]->what));
  }
  return absl::OkStatus();
}

absl::Status ShardWatch::JudgeTime(const Awaited& awaited) const {
  const int own = domain_->announcements().rank();
  std::vector<std::string> missing;
  std::string what;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (!awaited[r].has_value() || !judge_.TimedOut(awaited[r]->begin)) {
      continue;
    }
    if (what.empty()) what = awaited[r]->what;
    const int rank = ranks_[r];
    const std::string shard =
        awaited[r]->version == ShardRequest::kPosted
            ? absl::StrCat("message ", awaited[r]->key)
            : absl::StrCat("shard ", awaited[r]->key, " of version ",
                           awaited[r]->version);
    missing.push_back(
        rank == own
            ? absl::StrCat("this rank, ", rank, ", has itself no ", shard)
            : absl::StrCat("rank ", rank, " has not sent its ", shard, " (",
                           judge_.progress().Of(rank), ")"));
  }
  if (missing.empty()) return absl::OkStatus();
  return WithHangDump(own, judge_.TooLong(what, absl::StrJoin(missing, "; ")));
}

}  // namespace tessera
