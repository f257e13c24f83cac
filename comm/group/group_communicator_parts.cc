// What a group makes: subgroups, servers of shards, boards of notes.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/thread/deadline.h"
#include "comm/group/group_communicator.h"

namespace tessera {
namespace {

class DomainNotes : public NoteBoard {
 public:
  DomainNotes(std::shared_ptr<FailureDomain> domain, std::string board,
              std::vector<int> ranks, absl::Duration patience)
      : domain_(std::move(domain)),
        board_(std::move(board)),
        ranks_(std::move(ranks)),
        patience_(patience) {}

  bool Write(const std::string& text) override {
    return domain_->announcements().WriteNote(board_, text);
  }
  std::optional<std::vector<std::string>> Read(
      const std::vector<int>& ranks) override {
    std::vector<int> first;
    for (int r : ranks) first.push_back(ranks_[static_cast<size_t>(r)]);
    return domain_->announcements().ReadNotes(board_, first);
  }
  absl::Status EndOf(int rank) const override {
    return domain_->EndOf(ranks_[static_cast<size_t>(rank)]);
  }
  absl::Duration patience() const override { return patience_; }

 private:
  const std::shared_ptr<FailureDomain> domain_;
  const std::string board_;
  const std::vector<int> ranks_;  // in the domain's first group
  const absl::Duration patience_;
};

}  // namespace

// Why it is so. A rank whose subgroup cannot be made must not return at once:
// the other ranks of it would wait to be connected with it, and those of other
// subgroups would go on, into a collective of this group that it never comes
// to. So it announces its failure, which ends the first kind of wait, and then
// comes to the agreement like all others, which returns its error on every
// rank. The announcement is taken back after the agreement only: the error is
// known to all then, and an announcement that stood would end this group's
// later collectives.
//
// The count of splits makes the names of groups unique in the failure domain,
// and so the keys with which they meet in the store: ranks of an earlier split
// of the same name must not be taken for those of this one.
absl::StatusOr<std::shared_ptr<Communicator>> GroupCommunicator::Split(
    int color, CommTag name) {
  if (makers_.subgroup == nullptr) return Communicator::Split(color, name);
  if (name.what.empty()) name.what = "subgroup";
  absl::StrAppend(&name.what, " ", ++splits_);
  const std::string where = absl::StrCat("split into ", name.what);
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> colors,
      AllGatherStrings(absl::StrCat(color), CommTag(where, name.site)));
  const Subgroup subgroup = SubgroupOf(name.what, colors);
  absl::StatusOr<std::shared_ptr<Communicator>> made =
      makers_.subgroup(subgroup);
  const absl::Status mine = Annotate(
      made.status(),
      absl::StrCat("group ", subgroup.options.name, " (ranks ",
                   absl::StrJoin(subgroup.options.first_ranks, ", "), ")"));
  if (!mine.ok()) Announce(made.status());
  // Nobody goes on before all are connected, or none has a subgroup.
  const absl::Status agreed = AgreeOk(mine, where, name.site);
  if (!mine.ok()) ClearAnnouncement();
  TESSERA_RETURN_IF_ERROR(agreed);
  return made;
}

absl::StatusOr<std::unique_ptr<ShardServer>> GroupCommunicator::ServeShards(
    CommTag tag) {
  if (makers_.shard_server == nullptr) {
    return Communicator::ServeShards(std::move(tag));
  }
  if (tag.what.empty()) tag.what = "shard server";
  return makers_.shard_server(this, tag);
}

absl::StatusOr<std::unique_ptr<NoteBoard>> GroupCommunicator::ShareNotes(
    CommTag tag) {
  if (tag.what.empty()) tag.what = "notes";
  auto board = std::make_unique<DomainNotes>(
      domain_, absl::StrCat(options_.name, "#", ++boards_), watched_->ranks,
      options_.collective_timeout);
  // A store waits for a key that nobody has set: all set theirs first.
  // (If the one that keeps the store has ended nobody takes it any more.)
  const Deadline until = Deadline::After(options_.connect_timeout);
  absl::Status mine;
  while (!board->Write("") && mine.ok()) {
    if (until.HasPassed()) {
      mine = absl::UnavailableError(
          "the store where the ranks met does not take a note");
    }
    for (int r = 0; r < world_size(); ++r) mine.Update(board->EndOf(r));
  }
  TESSERA_RETURN_IF_ERROR(AgreeOk(mine, tag.what, tag.site));
  return board;
}

Subgroup GroupCommunicator::SubgroupOf(
    const std::string& name, const std::vector<std::string>& colors) const {
  Subgroup subgroup;
  subgroup.parent_backend = std::string(backend());
  subgroup.options = options_;
  subgroup.options.domain = domain_;
  subgroup.options.name =
      absl::StrCat(options_.name, options_.name.empty() ? "" : "/", name, ".",
                   colors[rank()]);
  subgroup.options.first_ranks.clear();
  for (int r = 0; r < world_size(); ++r) {
    if (colors[r] != colors[rank()]) continue;
    if (r == rank())
      subgroup.options.rank = static_cast<int>(subgroup.ranks.size());
    subgroup.ranks.push_back(r);
    subgroup.options.first_ranks.push_back(options_.first_rank(r));
  }
  subgroup.options.world_size = static_cast<int>(subgroup.ranks.size());
  return subgroup;
}

}  // namespace tessera
