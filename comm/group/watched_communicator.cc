#include "comm/group/watched_communicator.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/torch_guard.h"

namespace tessera {
namespace {

// How long ranks in different collectives wait for one to say why.
constexpr absl::Duration kCauseWait = absl::Milliseconds(300);

std::vector<int> FirstRanks(const GroupOptions& options) {
  std::vector<int> ranks;
  for (int r = 0; r < options.world_size; ++r) {
    ranks.push_back(options.first_rank(r));
  }
  return ranks;
}

}  // namespace

WatchedCommunicator::WatchedCommunicator(const GroupOptions& options,
                                         std::shared_ptr<FailureDomain> domain,
                                         std::function<void()> abort,
                                         CommThread* thread)
    : QueuedCommunicator({options.rank, options.world_size, options.name,
                          domain->failure(), thread}),
      options_(options),
      domain_(std::move(domain)),
      watched_(std::make_shared<WatchedGroup>(
          WatchedGroup{options.name, FirstRanks(options), std::move(abort)})) {}

WatchedCommunicator::~WatchedCommunicator() {
  domain_->monitor().Forget(options_.name);
}

absl::StatusOr<std::shared_ptr<Communicator>> WatchedCommunicator::Split(
    int color, CommTag name) {
  if (options_.make_subgroup == nullptr)
    return Communicator::Split(color, name);
  if (name.what.empty()) name.what = "part";
  absl::StrAppend(&name.what, " ", ++splits_);
  const std::string where = absl::StrCat("split into ", name.what);
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> colors,
      AllGatherStrings(absl::StrCat(color), CommTag(where, name.site)));
  const Subgroup part = SubgroupOf(name.what, colors);
  absl::StatusOr<std::shared_ptr<Communicator>> made =
      options_.make_subgroup(part);
  const absl::Status mine = Annotate(
      made.status(),
      absl::StrCat("group ", part.options.name, " (ranks ",
                   absl::StrJoin(part.options.first_ranks, ", "), ")"));
  // For those of this part that wait to be connected with this rank.
  if (!mine.ok()) Announce(made.status());
  // Nobody goes on before all are connected, or none has a part.
  const absl::Status agreed = AgreeOk(mine, where, name.site);
  if (!mine.ok()) ClearAnnouncement();
  TESSERA_RETURN_IF_ERROR(agreed);
  return made;
}

absl::StatusOr<std::unique_ptr<ShardServer>> WatchedCommunicator::ServeShards(
    CommTag tag) {
  if (options_.make_shard_server == nullptr) {
    return Communicator::ServeShards(std::move(tag));
  }
  if (tag.what.empty()) tag.what = "shard server";
  return options_.make_shard_server(this, tag);
}

Subgroup WatchedCommunicator::SubgroupOf(
    const std::string& name, const std::vector<std::string>& colors) const {
  Subgroup part;
  part.parent_backend = std::string(backend());
  part.options = options_;
  part.options.make_subgroup = nullptr;
  part.options.domain = domain_;
  part.options.name =
      absl::StrCat(options_.name, options_.name.empty() ? "" : "/", name, ".",
                   colors[rank()]);
  part.options.first_ranks.clear();
  for (int r = 0; r < world_size(); ++r) {
    if (colors[r] != colors[rank()]) continue;
    if (r == rank()) part.options.rank = static_cast<int>(part.ranks.size());
    part.ranks.push_back(r);
    part.options.first_ranks.push_back(options_.first_rank(r));
  }
  part.options.world_size = static_cast<int>(part.ranks.size());
  return part;
}

absl::Status WatchedCommunicator::Watched(
    const Call& call, const std::function<absl::Status()>& body) {
  domain_->monitor().Begin(
      {call.sequence, call.signature, call.what, call.details}, watched_);
  absl::Status status = CatchTorch(std::string(backend()).c_str(), body);
  if (absl::IsFailedPrecondition(status)) {
    status = WithTheCause(status);
  } else if (!status.ok()) {
    status = Annotate(status, call.what);
  }
  return domain_->monitor().End(status);
}

absl::Status WatchedCommunicator::WithTheCause(const absl::Status& mismatch) {
  const absl::Time until = absl::Now() + kCauseWait;
  do {
    const std::vector<Announcement> posted = domain_->announcements().Read();
    if (!posted.empty()) return posted.front().status;
    if (domain_->announcements().has_posted()) {
      return domain_->announcements().posted();
    }
    absl::SleepFor(absl::Milliseconds(10));
  } while (absl::Now() < until);
  return mismatch;
}

}  // namespace tessera
